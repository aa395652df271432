"""Workers that agree before they communicate, so that one without memory keeps none waiting.

In a `MultiWorkerMirroredStrategy` a worker that does not take part in a reduction makes all
others wait for ever. So the phases of a batch run one by one: those that may run out of memory
do not communicate, and after each of them the workers tell each other whether it went well.
"""

from __future__ import annotations

from typing import Any, Callable

from bigbatch.backends.keras import backend_of
from bigbatch.errors import ContextError, explain

_WELL, _NO_MEMORY, _FAILED = range(3)

_ALONE = explain(
    received="a worker that ran out of memory while gradients were added up over workers",
    expected="memory for that, which is the same for every micro-batch size",
    fix="use a smaller model, or more memory; start all workers again",
)
_OTHER = explain(
    received="an error on another worker",
    expected="all workers of the MultiWorkerMirroredStrategy to train together",
    fix="read the last output of the other worker, then start all workers again",
)


class Workers:
    """Runs the phases of a batch; if one worker runs out of memory all raise.

    Args:
        model: a Keras model that several workers train.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._backend = backend_of(model)

    def train(self, phases: Any, data: Any, size: Any) -> dict[str, Any]:
        """Make one update.

        Args:
            phases: the `Phases` of a trainer.
            data: a batch.
            size: samples per micro-batch.
        """
        self._attempt(phases.begin)
        if phases.needs_counts:
            self._attempt(phases.count, data, size)
            phases.use_counts()
        logs: dict[str, Any] = {}
        for number in range(len(phases.passes)):
            if number:
                self._attempt(phases.begin_again, number)
            self._attempt(phases.add, data, size, self._backend.ops.ones(), number)
            try:
                logs = phases.finish(is_whole=True, number=number)
            except self._backend.OUT_OF_MEMORY as error:
                # The others are past this, or wait for it: there is no way back.
                raise ContextError(phases.rollback.half_updated or _ALONE) from error
        if phases.settles:
            phases.settle(data, size)
        return logs

    def _attempt(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that does not communicate; raise if it fails on any worker."""
        result, message = None, "another worker ran out of memory"
        no_memory = self._backend.OUT_OF_MEMORY
        try:
            result, outcome = function(*arguments), _WELL
        except no_memory as error:
            message, outcome = str(error), _NO_MEMORY
        except Exception:
            self._backend.largest_of_all(self._model, _FAILED)
            raise
        # Outside the handler, whose traceback keeps tensors alive.
        outcome = self._backend.largest_of_all(self._model, outcome)
        if outcome == _FAILED:
            raise ContextError(_OTHER)
        if outcome == _NO_MEMORY:
            raise self._backend.out_of_memory(message)
        return result
