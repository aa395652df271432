"""Variables as they were before something that may fail."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterable, Iterator

import numpy as np
import tensorflow as tf

from bigbatch.backends.tensorflow.compat import (
    outside_strategy_scope,
    undistributed_variable,
)
from bigbatch.backends.tensorflow.values import after
from bigbatch.backends.tensorflow.variables import local_variable, on_this_replica
from bigbatch.errors import ContextError, explain

_NONE, _TAKEN, _FINAL = 0, 1, 2
_HALF_UPDATED = explain(
    received="an optimizer that ran out of memory in the middle of an update",
    expected="memory for the update itself, which is the same for every micro-batch size",
    fix="some weights are updated and some are not: load them from a checkpoint, and use an "
    "optimizer with fewer slots, a smaller model, or more memory",
)


class Rollback:
    """Copies of what a batch changes before its update: taken in a graph, restored from Python.

    Weights and optimizers need no copy if they change last, and only if all went well.

    Args:
        strategy: the strategy of the model; every replica's value is kept.
        variables: the metrics, moving statistics and random state of a model.
        weights: variables that updates change before the last one of the batch.
    """

    def __init__(
        self, strategy: Any, variables: Iterable[Any], weights: Iterable[Any] = ()
    ) -> None:
        self._strategy = strategy
        local = strategy.experimental_local_results
        self._copies: dict[int, tuple[Any, Any]] = {}
        weights = list(weights)
        self._weights = {_key(part) for one in weights for part in local(one)}
        self.include([*weights, *variables])
        with strategy.scope():
            self._phase = local(local_variable(tf.constant(_NONE), summed=False))[0]

    def include(self, variables: Iterable[Any]) -> None:
        """Copy other variables, too, from the next batch on."""
        local = self._strategy.experimental_local_results
        with self._strategy.scope():
            for variable in variables:
                if _key(local(variable)[0]) in self._copies:
                    continue
                copy = local_variable(tf.zeros(variable.shape, variable.dtype), summed=False)
                pairs = zip(local(variable), local(copy))
                self._copies.update((_key(one), (one, its)) for one, its in pairs)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Keep the values that variables have now; return a block that may fail."""
        with outside_strategy_scope():
            for variable, copy in self._copies.values():
                copy.assign(variable.read_value())
            taken = self._phase.assign(_TAKEN)
        # In a graph nothing else would make this come first.
        with after([taken]):
            yield

    def begin_again(self) -> None:
        """Let another pass begin with the state, but not the weights, of the first."""
        with outside_strategy_scope():
            for key, (variable, copy) in self._copies.items():
                if key not in self._weights:
                    variable.assign(copy.read_value())

    def before(self, variable: Any) -> Any:
        """Return the value that a variable of one replica had when the copies were taken."""
        key = _key(variable)
        if key not in self._copies:  # run eagerly, which shows it only now
            self._copies[key] = variable, undistributed_variable(variable.read_value())
        return self._copies[key][1].read_value()

    def final(self, results: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
        """Say, in a graph, that when `results` are there nothing can be put back any more.

        Returns:
            A block for the update.
        """
        with outside_strategy_scope(), after(results):
            return after([self._phase.assign(_FINAL)])

    @property
    def is_final(self) -> bool:
        """Whether the update has begun, after which nothing can be put back."""
        return int(self._phase.read_value()) == _FINAL

    @property
    def half_updated(self) -> str | None:
        """What to say of an update that failed and cannot be undone, if one has begun."""
        return _HALF_UPDATED if self.is_final else None

    def forget(self) -> None:
        """Be as if nothing had been taken."""
        self._phase.assign(_NONE)

    def restore(self) -> None:
        """Give the variables their values back, if any were taken and the update not begun."""
        with outside_strategy_scope():
            if int(self._phase.read_value()) == _TAKEN:
                for variable, copy in self._copies.values():
                    variable.assign(copy.read_value())
                self._phase.assign(_NONE)

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


class UpdateResults:
    """The values that one update has given variables, for micro-batches that run after it.

    Args:
        strategy: the strategy of the model; every replica has its own values.
        variables: variables that the update changes.
        before: returns the value that a variable of one replica had before the batch.
    """

    def __init__(
        self, strategy: Any, variables: list[Any], before: Callable[[Any], Any]
    ) -> None:
        self._strategy, self._before = strategy, before
        self.variables = variables
        """The variables that the update changes."""
        with strategy.scope():
            self._copies = [
                local_variable(tf.zeros(one.shape, one.dtype), summed=False)
                for one in variables
            ]

    def keep(self) -> None:
        """Keep the values that the variables have now; called outside `strategy.run`."""
        local = self._strategy.experimental_local_results
        for variable, copy in zip(self.variables, self._copies):
            for part, its in zip(local(variable), local(copy)):
                its.assign(part.read_value())

    def assign(self) -> None:
        """Make the update once more, on this replica."""
        for variable, copy in zip(self.variables, self._copies):
            value = on_this_replica(self._strategy, copy).read_value()
            on_this_replica(self._strategy, variable).assign(value)

    def undo(self) -> None:
        """Give the variables the values they had before the batch, on this replica."""
        for variable in self.variables:
            part = on_this_replica(self._strategy, variable)
            part.assign(self._before(part))


def _key(variable: Any) -> int:
    """Return what tells variables apart: one may be found as several Python objects."""
    return id(variable.handle)


def way_back(variables: Iterable[Any]) -> Callable[[], None]:
    """Return a function that gives variables the values they have now.

    The copies are in the memory of the host, not on the device.
    """
    copies = [(variable, np.array(variable.numpy())) for variable in variables]

    def put_back() -> None:
        with outside_strategy_scope():
            for variable, copy in copies:
                variable.assign(copy)

    return put_back


@contextlib.contextmanager
def unchanged(variables: Iterable[Any]) -> Iterator[Callable[[], None]]:
    """Return a block after which variables are as before; it gives a way to go back sooner."""
    put_back = way_back(variables)
    try:
        yield put_back
    finally:
        put_back()
