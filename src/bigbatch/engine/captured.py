"""Take the gradients that a `train_step` hands to its optimizers, without an update."""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import Any, Callable, Iterator

from bigbatch.backends.keras import backend_of, optimizers_of
from bigbatch.errors import ContextError, explain


class CapturedGradients:
    """The gradients that one optimizer was given in one micro-batch."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.variables: list[Any] = []
        self.gradients: list[Any] = []
        self.is_weighted = False
        """Whether the weight of the micro-batch is in the gradients already."""


class _Capture:
    """What the optimizers of a model do in one thread while a micro-batch runs."""

    def __init__(
        self,
        captured: list[CapturedGradients],
        weigh: Callable[[Any], Any],
        keep: Callable[[CapturedGradients], None],
    ) -> None:
        self._captured = {id(one.optimizer): one for one in captured}
        self._weigh, self._keep = weigh, keep

    def apply(self, optimizer: Any, name: str, gradients: list[Any], variables: Any) -> None:
        one = self._captured[id(optimizer)]
        if one.variables:
            raise ContextError(
                explain(
                    received=f"a train_step that applies gradients of the optimizer {name!r} "
                    "twice",
                    expected="one update per optimizer and batch",
                    fix="add the losses up and apply their gradients once, or give the second "
                    "update an optimizer of its own",
                )
            )
        one.variables, one.gradients = variables, gradients
        self._keep(one)

    def weigh(self, optimizer: Any, loss: Any) -> Any:
        self._captured[id(optimizer)].is_weighted = True
        return self._weigh(loss)


class Capturing:
    """Lets the optimizers of a model hand over gradients in place of an update.

    Replicas run in threads, which may stop in the middle of a `train_step` and let another run:
    optimizers are changed once for all threads, and act for the one that calls them.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._local = threading.local()
        self._lock = threading.Lock()
        self._open = 0
        self._replaced = contextlib.ExitStack()

    @contextlib.contextmanager
    def gradients(
        self, weigh: Callable[[Any], Any], keep: Callable[[CapturedGradients], None]
    ) -> Iterator[list[CapturedGradients]]:
        """Return a block in which `optimizer.apply` captures gradients and changes no weight.

        Args:
            weigh: multiplies a loss by the weight of the micro-batch. It is applied where
                Keras scales the loss, just before the backward pass; a `train_step` that does
                not scale its loss gives gradients that have still to be weighted.
            keep: called as soon as an optimizer has been given its gradients.

        Returns:
            The captured gradients, of those optimizers that were applied, when it is done.
        """
        optimizers = optimizers_of(self._model)
        captured = [CapturedGradients(optimizer) for optimizer in optimizers]
        before = getattr(self._local, "capture", None)
        self._local.capture = _Capture(captured, weigh, keep)
        self._enter(optimizers)
        try:
            yield captured
        finally:
            self._local.capture = before
            self._leave()
        captured[:] = [one for one in captured if one.variables]
        self._check(optimizers, captured)

    def _enter(self, optimizers: list[Any]) -> None:
        with self._lock:
            self._open += 1
            if self._open > 1:
                return
            backend = backend_of(self._model)
            for optimizer in optimizers:
                name = backend.name_of(optimizer)

                def apply(
                    gradients: Any, variables: Any, one: Any = optimizer, n: Any = name
                ) -> None:
                    self._local.capture.apply(one, n, gradients, variables)

                def weigh(loss: Any, one: Any = optimizer) -> Any:
                    return self._local.capture.weigh(one, loss)

                self._replaced.enter_context(backend.capturing(optimizer, apply, weigh))

    def _leave(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._replaced.close()

    def _check(self, optimizers: list[Any], captured: list[CapturedGradients]) -> None:
        name_of = backend_of(self._model).name_of
        # Without trainable weights Keras warns, and there is nothing to update.
        if not captured and self._model.trainable_weights:
            names = ", ".join(repr(name_of(one)) for one in optimizers) or "none found"
            raise ContextError(
                explain(
                    received="a train_step that hands no gradients to an optimizer of the "
                    f"model ({names})",
                    expected="one call of optimizer.apply_gradients or optimizer.apply per "
                    "batch",
                    fix="use optimizers that are attributes of the model or its layers",
                )
            )
        if len(captured) > 1:
            names = ", ".join(name_of(one.optimizer) for one in captured)
            warnings.warn(
                f"bigbatch: train_step uses several optimizers ({names}). All of them "
                "accumulate, and update together, each from gradients of the weights before "
                "the batch.",
                stacklevel=2,
            )
