"""`Monitor`: a callback that logs how updates were made."""

from __future__ import annotations

import math
from typing import Any

from bigbatch.backends.keras import Callback
from bigbatch.engine.hooks import is_attached, observe
from bigbatch.engine.trial import memory_of


class Monitor(Callback):
    """Logs the updates, micro-batches, effective batch size and peak memory of every epoch.

    - `updates`: the number of updates,
    - `micro_batches`: the number of micro-batches, on all replicas,
    - `effective_batch_size`: the mean number of samples of an update,
    - `peak_memory`: the most bytes in use on a device in this epoch; NaN if the
      device does not count them (a CPU does with `TF_CPU_ALLOCATOR_USE_BFC=true`).

    `history`, `TensorBoard`, `CSVLogger` and all other loggers get these values, whatever the
    order of callbacks. The progress bar does not show them. For a model that does not
    accumulate, `Monitor` logs nothing.

    Example:
        >>> import keras
        >>> import numpy as np
        >>> import bigbatch
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> model = bigbatch.accumulate(model, microbatch_size=8)
        >>> x, y = np.ones((64, 4)), np.ones((64, 1))
        >>> fit = model.fit(x, y, batch_size=32, callbacks=[bigbatch.Monitor()], verbose=0)
        >>> [fit.history[name] for name in ("updates", "micro_batches", "effective_batch_size")]
        [[2.0], [8.0], [32.0]]
    """

    def __init__(self) -> None:
        super().__init__()
        self._statistics: Any = None
        self._before = (0, 0, 0)

    def set_model(self, model: Any) -> None:
        """Begin to count the updates of a model."""
        super().set_model(model)
        self._statistics = None
        if not is_attached(model):
            return
        self._statistics = observe(model, what="Monitor", with_noise=False)
        logs = {
            "updates": lambda: self._done(0),
            "micro_batches": lambda: self._done(1),
            "effective_batch_size": lambda: self._done(2) / max(1, self._done(0)),
            "peak_memory": self._peak_memory,
        }
        self._statistics.logs.update(logs)
        self._statistics.hidden.update(logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start counting for an epoch."""
        del epoch, logs
        if self._statistics is None:
            return
        self._before = self._statistics.counts
        memory = memory_of(self.model)
        if memory.is_hard:
            memory.reset_peak()

    def _done(self, index: int) -> int:
        return self._statistics.counts[index] - self._before[index]

    def _peak_memory(self) -> float:
        memory = memory_of(self.model)
        return memory.peak() if memory.is_hard else math.nan
