"""The state of a model on JAX: values that Keras hands over, takes back, and may lose.

While `fit` runs, the variables of a model are empty: their values travel through the train
function. A `keras.StatelessScope` around it lets everything else read and assign variables as
always; what they hold at the end is the new state.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterable, Iterator

import jax
import keras
import numpy as np

from bigbatch.backends.jax.compat import set_state, weights_of
from bigbatch.backends.jax.data import own_rows
from bigbatch.backends.jax.devices import current_shards
from bigbatch.backends.jax.memory import noticing
from bigbatch.backends.keras import optimizers_of
from bigbatch.errors import ContextError, explain

_NONE, _TAKEN, _FINAL = 0, 1, 2
_HALF_UPDATED = explain(
    received="an optimizer that ran out of memory in the middle of an update",
    expected="memory for the update itself, which is the same for every micro-batch size",
    fix="the weights are lost: load them from a checkpoint, and use an optimizer with fewer "
    "slots, a smaller model, or more memory",
)


def variables_of(model: Any) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Return the variables of a model, in the order and parts of its state."""
    optimizer = model.optimizer.variables if model.optimizer is not None else []
    return (
        list(model.trainable_variables),
        list(model.non_trainable_variables),
        list(optimizer),
        list(model.metrics_variables),
    )


def of_updates(model: Any) -> list[Any]:
    """Return what updates change: weights, and the variables of optimizers.

    Those of optimizers that the model is not compiled with are there if it keeps them among
    its variables: Keras hands over no others.
    """
    trainable, others, slots, _ = variables_of(model)
    others_of = [one for one in optimizers_of(model) if one is not model.optimizer]
    kept = {id(variable) for one in others_of for variable in one.variables}
    # Weights that are not trainable any more may be those that an optimizer was built for.
    kept |= {id(variable) for one in optimizers_of(model) for variable in weights_of(one)}
    return [*trainable, *slots, *(one for one in others if id(one) in kept)]


def of_microbatches(model: Any) -> list[Any]:
    """Return the other variables of a model: statistics, seeds, metrics."""
    _, others, _, metrics = variables_of(model)
    known = {id(one) for one in of_updates(model)}
    return [one for one in (*others, *metrics) if id(one) not in known]


def values_of(variables: Iterable[Any]) -> list[Any]:
    """Return the values that variables have now."""
    return [variable.value for variable in variables]


def without_repetitions(values: list[Any]) -> list[Any]:
    """Return arrays that can be overwritten: a copy where two variables have the same one.

    After `fit` with an average of weights, weights and average share their arrays.
    """
    seen: set[int] = set()
    copies = []
    for value in values:
        copies.append(jax.numpy.copy(value) if id(value) in seen else value)
        seen.add(id(value))
    return copies


def assign(variables: Iterable[Any], values: Iterable[Any]) -> None:
    """Give variables values."""
    for variable, value in zip(variables, values):
        variable.assign(value)


@contextlib.contextmanager
def scope_of(variables: Iterable[Any], values: Iterable[Any]) -> Iterator[Callable[[], Any]]:
    """Return a block in which variables have other values, and nothing else changes.

    It gives a function that returns the values they have by then.
    """
    variables = list(variables)
    scope = keras.StatelessScope(list(zip(variables, values)))
    with scope:
        yield lambda: [scope.get_current_value(variable) for variable in variables]


class Cell:
    """A value that is none of the model's: noted by an update, read by Python."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def assign(self, value: Any) -> None:
        """Replace the value."""
        self.value = value

    def read_value(self) -> Any:
        """Return the value."""
        return self.value

    def numpy(self) -> Any:
        """Return the value as a NumPy array."""
        return np.asarray(self.value)

    @property
    def shape(self) -> Any:
        """The shape of the value."""
        return self.value.shape

    @property
    def dtype(self) -> Any:
        """The type of the value."""
        return self.value.dtype


def train_function(
    model: Any, train: Callable[[Any], dict[str, Any]]
) -> Callable[[Any, Any], tuple[dict[str, Any], Any]]:
    """Return what Keras calls with its state and an iterator; it returns logs and state."""

    def train_on_next(state: Any, iterator: Any) -> tuple[dict[str, Any], Any]:
        parts = variables_of(model)
        variables = [variable for part in parts for variable in part]
        values = [value for part in state for value in part]
        shards = current_shards()
        if shards is None or shards.processes == 1:
            everywhere = list
        else:  # each process runs programs of its own
            values, iterator = shards.here(values), map(own_rows, iterator)
            everywhere = shards.everywhere
        with scope_of(variables, values) as current:
            try:
                logs = train(iterator)
            except BaseException:
                # Or the weights would be lost.
                set_state(model, packed(parts, everywhere(current())))
                raise
            return logs, packed(parts, everywhere(current()))

    return train_on_next


@contextlib.contextmanager
def on_own_devices(model: Any) -> Iterator[None]:
    """Return a block in which the variables of a model are those of this process alone.

    As in a train function. Outside of it they are arrays that all processes share.
    """
    shards = current_shards()
    if shards is None or shards.processes == 1:
        yield
        return
    variables = [variable for part in variables_of(model) for variable in part]
    values: list[Any] = []
    with scope_of(variables, shards.here(values_of(variables))) as current:
        try:
            yield
        finally:
            values = current()
    assign(variables, shards.everywhere(values))


def packed(parts: Iterable[list[Any]], values: list[Any]) -> tuple[list[Any], ...]:
    """Return values in the parts of the state of a model."""
    left = iter(values)
    return tuple([next(left) for _ in part] for part in parts)


class Rollback:
    """What a batch changes before its update, as it was: arrays of JAX never change.

    Args:
        variables: the metrics, moving statistics and random state of a model.
        weights: variables that updates change before the last one of the batch.
    """

    def __init__(self, variables: Iterable[Any], weights: Iterable[Any] = ()) -> None:
        self._variables, self._weights = list(variables), list(weights)
        self._values: dict[int, Any] = {}
        self._phase = _NONE

    def include(self, variables: Iterable[Any]) -> None:
        """Keep the values of other variables, too: these are all that a batch changes."""
        del variables

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Keep the values that variables have now; return a block that may fail."""
        both = [*self._variables, *self._weights]
        self._values = dict(zip(map(id, both), values_of(both)))
        self._phase = _TAKEN
        yield

    def begin_again(self) -> None:
        """Let another pass begin with the state, but not the weights, of the first."""
        assign(self._variables, map(self.before, self._variables))

    def before(self, variable: Any) -> Any:
        """Return the value that a variable had before the batch, or has if that is the same."""
        value = self._values.get(id(variable))
        return variable.value if value is None else value

    def final(self, results: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
        """Wait for `results`; then nothing can be put back any more.

        Errors come late on JAX: they must be here before the update overwrites weights.

        Returns:
            A block for the update.
        """
        with noticing():
            jax.block_until_ready(list(results))
        self._phase = _FINAL
        if not self._weights:  # or micro-batches may run again
            self._values = {}
        return contextlib.nullcontext()

    @property
    def half_updated(self) -> str | None:
        """What to say of an update that failed and cannot be undone, if one has begun."""
        return _HALF_UPDATED if self._phase == _FINAL else None

    def forget(self) -> None:
        """Be as if nothing had been taken."""
        self._phase, self._values = _NONE, {}

    def restore(self) -> None:
        """Give the variables their values back, if any were taken and the update not begun."""
        if self._phase == _TAKEN:
            both = [*self._variables, *self._weights]
            assign(both, map(self.before, both))
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
            if self._phase == _FINAL:
                raise ContextError(_HALF_UPDATED) from failure
            self.restore()
            raise


@contextlib.contextmanager
def unchanged(variables: Iterable[Any]) -> Iterator[Callable[[], None]]:
    """Return a block after which variables are as before; it gives a way to go back sooner.

    There are copies in the memory of the host, too: an update gives the arrays of weights away.
    """
    copies = [(one, one.value, np.array(one.value)) for one in variables]

    def put_back() -> None:
        for variable, value, copy in copies:
            is_lost = not isinstance(value, jax.Array) or value.is_deleted()
            variable.assign(jax.numpy.asarray(copy) if is_lost else value)

    try:
        yield put_back
    finally:
        put_back()
