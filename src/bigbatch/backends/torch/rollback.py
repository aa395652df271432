"""Variables and random numbers as they were before something that may fail."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterable, Iterator

import torch

from bigbatch.backends.torch.compat import forget_global_seeds, global_seed_state
from bigbatch.core.python_random import PythonDraws, put_back_python_states, python_states
from bigbatch.errors import ContextError, explain

_NONE, _TAKEN, _FINAL = 0, 1, 2
_HALF_UPDATED = explain(
    received="an optimizer that ran out of memory in the middle of an update",
    expected="memory for the update itself, which is the same for every micro-batch size",
    fix="some weights are updated and some are not: load them from a checkpoint, and use an "
    "optimizer with fewer slots, a smaller model, or more memory",
)


class Copies:
    """Values of tensors, and the state of global generators, to be put back.

    Args:
        tensors: what may change.
        on_host: whether the copies are in the memory of the host, not on the device.
    """

    def __init__(self, tensors: Iterable[Any], *, on_host: bool = False) -> None:
        copy = _on_host if on_host else torch.clone
        self.of = {id(one): (one, copy(one.detach())) for one in tensors}
        """Tensors and the values they had, by the `id` of the tensor."""
        self._random = generator_states(), python_states()
        self._seeds = [(one, one.clone()) for one in global_seed_state()]

    def put_back(self, but: Iterable[int] = ()) -> None:
        """Give everything the value it had, but for tensors with these `id`s."""
        with torch.no_grad():
            for key, (tensor, value) in self.of.items():
                if key not in but:
                    tensor.copy_(value)
            for tensor, value in self._seeds:
                tensor.copy_(value)
        if not self._seeds:
            forget_global_seeds()
        set_generator_states(self._random[0])
        put_back_python_states(self._random[1])


def _on_host(value: Any) -> Any:
    return value.to("cpu", copy=True)


def generator_states() -> tuple[Any, list[Any]]:
    """Return the state of the generators that unseeded draws come from."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), on_gpus


def set_generator_states(states: tuple[Any, list[Any]]) -> None:
    """Undo what has been drawn since `generator_states`."""
    torch.set_rng_state(states[0])
    if states[1]:
        torch.cuda.set_rng_state_all(states[1])


class Rollback:
    """Copies of what a batch changes before its last update.

    Weights and optimizers need no copy if they change last, and only if all went well.

    Args:
        tensors: the metrics, moving statistics and random state of a model.
        weights: tensors that updates change before the last one of the batch.
    """

    def __init__(self, tensors: Iterable[Any], weights: Iterable[Any] = ()) -> None:
        self._tensors: dict[int, Any] = {}
        weights = list(weights)
        self._weights = {id(one) for one in weights}
        self.include([*weights, *tensors])
        self._copies: Copies | None = None
        self._phase = _NONE

    def include(self, tensors: Iterable[Any]) -> None:
        """Copy other tensors, too, from the next batch on."""
        self._tensors.update((id(one), one) for one in tensors)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Keep the values that variables have now; return a block that may fail."""
        self._copies, self._phase = Copies(self._tensors.values()), _TAKEN
        yield

    def begin_again(self) -> None:
        """Let another pass begin with the state, but not the weights, of the first."""
        assert self._copies is not None
        self._copies.put_back(but=self._weights)

    def before(self, tensor: Any) -> Any:
        """Return the value that a tensor had when the copies were taken."""
        assert self._copies is not None
        return self._copies.of[id(tensor)][1]

    @contextlib.contextmanager
    def final(self, results: Iterable[Any]) -> Iterator[None]:
        """Return a block for the update, in which nothing can be put back any more."""
        del results
        self._phase = _FINAL
        if not self._weights:  # or they are needed to settle what comes after updates
            self._copies = None
        yield

    @property
    def is_final(self) -> bool:
        """Whether the update has begun, after which nothing can be put back."""
        return self._phase == _FINAL

    @property
    def half_updated(self) -> str | None:
        """What to say of an update that failed and cannot be undone, if one has begun."""
        return _HALF_UPDATED if self.is_final else None

    def forget(self) -> None:
        """Be as if nothing had been taken."""
        self._phase, self._copies = _NONE, None

    def restore(self) -> None:
        """Give the variables their values back, if any were taken and the update not begun."""
        if self._phase == _TAKEN and self._copies is not None:
            self._copies.put_back()
            self.forget()

    @contextlib.contextmanager
    def undone_if(self, error: type[Exception]) -> Iterator[None]:
        """Return a block after which, if it fails with `error`, everything is as before.

        Unless it was the update itself that failed: then an error says that.
        """
        self.forget()
        try:
            yield
        except error as failure:
            if self.is_final:
                raise ContextError(_HALF_UPDATED) from failure
            self.restore()
            raise


@contextlib.contextmanager
def gradients_aside(parameters: Iterable[Any]) -> Iterator[None]:
    """Return a block that begins without gradients, after which those from before are there."""
    gradients = [(one, one.grad) for one in parameters]
    for one, _ in gradients:
        one.grad = None
    try:
        yield
    finally:
        for one, gradient in gradients:
            one.grad = gradient


@contextlib.contextmanager
def unchanged(tensors: Iterable[Any]) -> Iterator[Callable[[], None]]:
    """Return a block after which tensors are as before; it gives a way to go back sooner."""
    copies, by_python = Copies(tensors, on_host=True), PythonDraws()
    parameters = [one for one, _ in copies.of.values() if one.requires_grad]

    def put_back() -> None:
        copies.put_back()
        by_python.start_again()

    with gradients_aside(parameters), by_python.drawing():
        try:
            yield put_back
        finally:
            copies.put_back()


class UpdateResults:
    """The values that one update has given variables, for micro-batches that run after it.

    Args:
        tensors: those that the update changes.
        before: returns the value that a tensor had before the batch.
    """

    def __init__(self, tensors: list[Any], before: Callable[[Any], Any]) -> None:
        self.tensors = tensors
        """Those that the update changes."""
        self._before = before
        self._values: list[Any] = []

    def keep(self) -> None:
        """Keep the values that the tensors have now."""
        self._values = [one.detach().clone() for one in self.tensors]

    def assign(self) -> None:
        """Make the update once more."""
        _copy(zip(self.tensors, self._values))

    def undo(self) -> None:
        """Give the tensors the values they had before the batch."""
        _copy((one, self._before(one)) for one in self.tensors)


@contextlib.contextmanager
def discarding(updates: Iterable[UpdateResults]) -> Iterator[None]:
    """Return a block after which what updates change is as before."""
    tensors = {id(one): one for update in updates for one in update.tensors}
    values = [(one, one.detach().clone()) for one in tensors.values()]
    try:
        yield
    finally:
        _copy(values)


def _copy(pairs: Iterable[tuple[Any, Any]]) -> None:
    with torch.no_grad():
        for tensor, value in pairs:
            tensor.copy_(value)
