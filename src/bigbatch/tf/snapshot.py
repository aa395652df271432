"""Variables as they were before something that may fail."""

from __future__ import annotations

import contextlib
from typing import Any, Iterable, Iterator, Sequence

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
        self._replicas: dict[int, int] = {}
        for variable in variables:
            copy = local_variable(tf.zeros(variable.shape, variable.dtype), summed=False)
            self._pairs += zip(local(variable), local(copy))
            self._replicas.update((id(v), i) for i, v in enumerate(local(variable)))
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
    def ids(self) -> set[int]:
        """The `id` of every variable that is kept, on each replica."""
        return {id(variable) for variable, _ in self._pairs}

    def put_back(self, variables: dict[int, Any], samples: Sequence[Any]) -> None:
        """Give some variables the values that were taken; in a graph.

        Args:
            variables: which ones, by `id`.
            samples: how many samples each replica of this process has: without any, its
                variables are left alone.
        """
        with outside_strategy_scope():
            for variable, copy in self._pairs:
                if id(variable) in variables:
                    value, replica = copy.read_value(), self._replicas[id(variable)]
                    if len(samples) > 1:
                        value = tf.where(samples[replica] > 0, value, variable.read_value())
                    variable.assign(value)

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
