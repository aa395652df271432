"""Variables as they were before something that may fail."""

from __future__ import annotations

import contextlib
from typing import Any, Iterable, Iterator

import tensorflow as tf

from bigbatch.tf.buffers import local_variable
from bigbatch.tf.compat import outside_strategy_scope
from bigbatch.tf.values import after


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
        self._is_taken = local(local_variable(tf.constant(False), summed=False))[0]

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Keep the values the variables have now; return a block for what may fail."""
        with outside_strategy_scope():
            for variable, copy in self._pairs:
                copy.assign(variable.read_value())
            taken = self._is_taken.assign(True)
        # In a graph nothing else would make this come first.
        with after([taken]):
            yield

    def drop(self, results: Iterable[Any]) -> None:
        """Say, when `results` are there, that there is nothing to go back to."""
        with outside_strategy_scope(), after(results):
            self._is_taken.assign(False)

    def restore(self) -> None:
        """Give the variables their values back, if any were taken and not dropped."""
        with outside_strategy_scope():
            if self._is_taken.read_value():
                for variable, copy in self._pairs:
                    variable.assign(copy.read_value())
                self._is_taken.assign(False)
