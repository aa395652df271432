"""Variables as they were before something that may fail."""

from __future__ import annotations

import contextlib
from typing import Any, Iterable, Iterator

import tensorflow as tf

from bigbatch.tf.buffers import local_variable
from bigbatch.tf.compat import outside_strategy_scope
from bigbatch.tf.values import after

_NONE, _TAKEN, _DROPPED = 0, 1, 2


class Snapshot:
    """Copies of variables: taken and dropped in a graph, restored from Python.

    Args:
        variables: the variables; in the scope of a strategy every replica's value is kept.
    """

    def __init__(self, variables: Iterable[Any]) -> None:
        local = tf.distribute.get_strategy().experimental_local_results
        self._pairs = []
        for variable in variables:
            copy = local_variable(tf.zeros(variable.shape, variable.dtype), summed=False)
            self._pairs += zip(local(variable), local(copy))
        self._phase = local(local_variable(tf.constant(_NONE), summed=False))[0]

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Keep the values the variables have now; return a block for what may fail."""
        with outside_strategy_scope():
            for variable, copy in self._pairs:
                copy.assign(variable.read_value())
            taken = self._phase.assign(_TAKEN)
        # In a graph nothing else would make this come first.
        with after([taken]):
            yield

    def dropped(self, results: Iterable[Any]) -> Any:
        """Say, when `results` are there, that there is nothing to go back to.

        Returns:
            A block for what comes then: if that fails, `is_dropped` says so.
        """
        with outside_strategy_scope(), after(results):
            return after([self._phase.assign(_DROPPED)])

    @property
    def is_dropped(self) -> bool:
        """Whether the last values that were taken have been dropped."""
        return int(self._phase.read_value()) == _DROPPED

    def forget(self) -> None:
        """Be as if nothing had been taken yet."""
        self._phase.assign(_NONE)

    def restore(self) -> None:
        """Give the variables their values back, if any were taken and not dropped."""
        with outside_strategy_scope():
            if int(self._phase.read_value()) == _TAKEN:
                for variable, copy in self._pairs:
                    variable.assign(copy.read_value())
                self._phase.assign(_NONE)
