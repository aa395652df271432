"""`NoiseScale`: a callback that estimates the critical batch size."""

from __future__ import annotations

import math
from typing import Any

from bigbatch.backends.keras import Callback
from bigbatch.core.noise import Estimate
from bigbatch.engine.hooks import observe
from bigbatch.engine.statistics import UpdateStatistics


class NoiseScale(Callback):
    """Estimates the gradient noise scale from the gradients of micro-batches, while training.

    Above the critical batch size a larger batch stops paying off. Far below it, a batch twice
    as large makes nearly twice the progress per update; far above it, hardly any more
    (McCandlish et al. 2018). The callback does not change training. Every epoch it logs
    `noise_scale`, the critical batch size in samples, or NaN while that is not yet known.

    An estimate needs two micro-batches per update and tens to hundreds of updates. It grows
    as the loss falls, and does not say how well a model generalises. With dropout it
    includes the noise of the draws; with batch normalisation, masks or weights it is
    approximate.

    Example:
        >>> import keras
        >>> import numpy as np
        >>> import bigbatch
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> model = bigbatch.accumulate(model, microbatch_size=8)
        >>> noise = bigbatch.NoiseScale()
        >>> x, y = np.ones((64, 4)), np.ones((64, 1))
        >>> history = model.fit(x, y, batch_size=32, callbacks=[noise], verbose=0)
        >>> noise.critical_batch_size  # all samples are the same: one is as good as many
        0.0
    """

    def __init__(self) -> None:
        super().__init__()
        self._statistics: UpdateStatistics | None = None
        self.history: list[Estimate] = []
        """The estimates at the end of each epoch."""

    def set_model(self, model: Any) -> None:
        """Begin to measure the gradients of a model's micro-batches."""
        super().set_model(model)
        statistics = observe(model, what="NoiseScale", with_noise=True)
        if statistics is not self._statistics:
            statistics.forget_noise()
            self._statistics, self.history = statistics, []
        statistics.logs["noise_scale"] = self._log

    def _log(self) -> float:
        self.history.append(self.estimate)
        critical = self.history[-1].critical_batch_size
        return math.nan if critical is None else critical

    @property
    def estimate(self) -> Estimate:
        """The estimate so far."""
        return Estimate() if self._statistics is None else self._statistics.estimate

    @property
    def critical_batch_size(self) -> float | None:
        """The samples beyond which a larger batch pays less; `None` is "not yet known"."""
        return self.estimate.critical_batch_size

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the critical batch size; `None` is "not yet known"."""
        return self.estimate.interval

    def _repr_html_(self) -> str:
        from bigbatch.core.report import Report

        return Report("Gradient noise scale", [], [self.advice()]).html()

    def advice(self) -> str:
        """Say in one sentence what the batch size is worth."""
        return self.estimate.advice()

    def plot(self) -> Any:
        """Return a matplotlib figure of the critical batch size, epoch by epoch."""
        from bigbatch.diagnostics.figures import noise_figure

        return noise_figure(self.history)
