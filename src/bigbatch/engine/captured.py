"""Capture the gradients that a `train_step` passes to its optimizers, without an update."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator

from bigbatch.backends.keras import Held, backend_of
from bigbatch.errors import ContextError, explain


@dataclass
class CapturedGradients:
    """The gradients that an optimizer was given in one micro-batch, at one call of `apply`."""

    optimizer: Any
    number: int = 0
    """How many calls of `apply` the `train_step` has made before."""
    variables: list[Any] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    is_weighted: bool = False
    """Whether the weight of the micro-batch is in the gradients already."""
    place: int | None = None
    """Where the call stands in the graph that is being traced."""
    is_in_pairs: bool = True
    """Whether `apply_gradients` was called, not `apply`: an optimizer may have its own."""


class _Capture:
    """What the optimizers of a model do in one thread while a micro-batch runs."""

    def __init__(
        self,
        backend: Any,
        weigh: Callable[[Any], Any],
        take: Callable[[CapturedGradients], bool | None],
    ) -> None:
        self._backend, self._weigh, self._take = backend, weigh, take
        self._weighted: set[int] = set()
        self._here = backend.trace_now()
        self._is_done = False
        self.count = 0

    def apply(
        self,
        optimizer: Any,
        gradients: list[Any],
        variables: list[Any],
        is_in_pairs: bool = True,
    ) -> None:
        if self._is_done:
            return
        if self._backend.trace_now() is not self._here:
            raise _without_number(self._backend.name_of(optimizer))
        is_weighted, place = id(optimizer) in self._weighted, self._backend.place_in_trace()
        number, self.count = self.count, self.count + 1
        one = CapturedGradients(
            optimizer, number, variables, gradients, is_weighted, place, is_in_pairs
        )
        self._is_done = bool(self._take(one))

    def weigh(self, optimizer: Any, loss: Any) -> Any:
        self._weighted.add(id(optimizer))
        return self._weigh(loss)


class Capturing:
    """Lets the optimizers of a model hand over gradients in place of an update.

    Replicas run in threads, which may stop in the middle of a `train_step` and let another run:
    optimizers are changed once for all threads, and act for the one that calls them.

    Args:
        model: a Keras model.
        held: its optimizers.
    """

    def __init__(self, model: Any, held: Held) -> None:
        self._model, self._held = model, held
        self._local = threading.local()
        self._lock = threading.Lock()
        self._open = 0
        self._replaced = contextlib.ExitStack()

    @contextlib.contextmanager
    def gradients(
        self, weigh: Callable[[Any], Any], take: Callable[[CapturedGradients], bool | None]
    ) -> Iterator[None]:
        """Return a block in which `optimizer.apply` hands over gradients, and no more.

        Args:
            weigh: multiplies a loss by the weight of the micro-batch. It is applied where
                Keras scales the loss, just before the backward pass; a `train_step` that does
                not scale its loss gives gradients that have still to be weighted.
            take: called with the gradients, whenever an optimizer is given some, until it
                returns that the others are of no use.
        """
        optimizers = self._held.optimizers()
        before = getattr(self._local, "capture", None)
        capture = _Capture(backend_of(self._model), weigh, take)
        self._local.capture = capture
        self._enter(optimizers)
        try:
            yield
        finally:
            self._local.capture = before
            self._leave()
        # Without trainable weights Keras warns, and there is nothing to update.
        if not capture.count and self._model.trainable_weights:
            raise self._no_gradients(optimizers)

    def _enter(self, optimizers: list[Any]) -> None:
        with self._lock:
            self._open += 1
            if self._open > 1:
                return
            backend = backend_of(self._model)
            for optimizer in optimizers:

                def apply(*given: Any, one: Any = optimizer) -> None:
                    self._local.capture.apply(one, *given)

                def weigh(loss: Any, one: Any = optimizer) -> Any:
                    return self._local.capture.weigh(one, loss)

                self._replaced.enter_context(backend.capturing(optimizer, apply, weigh))

    def _leave(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._replaced.close()

    def _no_gradients(self, optimizers: list[Any]) -> ContextError:
        name_of = backend_of(self._model).name_of
        names = ", ".join(repr(name_of(one)) for one in optimizers) or "none found"
        return ContextError(
            explain(
                received="a train_step that passes no gradients to an optimizer of the "
                f"model ({names})",
                expected="one call of optimizer.apply_gradients or optimizer.apply per batch",
                fix="use optimizers of Keras that are attributes of the model or its layers; "
                "updates by hand, or by torch.optim, cannot be accumulated",
            )
        )


def _without_number(name: str) -> ContextError:
    return ContextError(
        explain(
            received=f"a train_step that applies gradients of the optimizer {name!r} inside "
            "tf.cond, tf.while_loop or another tf.function",
            expected="calls of optimizer.apply that can be numbered: the same ones for every "
            "batch",
            fix="call optimizer.apply in train_step itself, in a Python loop if there are "
            "several updates",
        )
    )
