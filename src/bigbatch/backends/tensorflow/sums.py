"""Where the micro-batches of a batch are added up, on each replica by itself."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, Iterable

import tensorflow as tf

from bigbatch.backends.tensorflow.values import (
    DENSE,
    joined,
    kind_of,
    plus,
    widened,
    zeros,
)
from bigbatch.backends.tensorflow.variables import (
    ANY_SHAPE,
    add_to,
    local_variable,
    this_replica,
)

_NUMBERS = itertools.count()


class GradientSum:
    """The sum of the dense gradients of one variable, in a graph.

    It is added to inside the function of a micro-batch, where a gradient is gone as soon as it
    is added: what a function returns is kept until everything the function does is done. It
    takes memory only from `open` to `close`.
    """

    def __init__(self, variable: Any) -> None:
        self.shape = tf.TensorShape(variable.shape)
        self.dtype = widened(variable.dtype)
        self._number = next(_NUMBERS)
        self.variable = local_variable(self._nothing(), ANY_SHAPE)
        """The variable that holds it."""
        self.is_used = False
        """Whether anything has been traced to be added."""

    @property
    def bytes(self) -> int:
        """What it takes while it is open."""
        return self.dtype.size * self.shape.num_elements()

    def open(self) -> None:
        """Start from zero."""
        self.variable.assign(zeros(self.shape, self.dtype))

    def add(self, value: Any) -> None:
        """Add a tensor."""
        self.is_used = True
        add_to(self.variable, tf.cast(value, self.dtype))

    def value(self) -> Any:
        """Return this replica's sum."""
        return tf.ensure_shape(self.variable.read_value(), self.shape)

    def close(self) -> None:
        """Give the memory back; who has read the sum still has it."""
        self.variable.assign(self._nothing())

    def _nothing(self) -> Any:
        if not self.shape.rank:
            return tf.zeros([], self.dtype)
        # TensorFlow takes all that is assigned to a variable in a graph to have one shape, and
        # equal operations for one: were there no rows in sight, and the same for every
        # variable, it would mix up the shapes of gradients. So it must not see the number.
        number = tf.raw_ops.PlaceholderWithDefault(input=tf.constant(self._number), shape=[])
        return tf.zeros(tf.stack([number - self._number, *self.shape[1:]]), self.dtype)


class GradientSums:
    """The sums of the dense gradients of one optimizer's variables.

    Args:
        variables: those whose gradients have a place here. Gradients of others, such as
            variables that only tracing makes, are returned by a micro-batch and added up with
            everything else; so are sparse ones.
    """

    def __init__(self, variables: Iterable[Any]) -> None:
        self._sums = {id(variable): GradientSum(variable) for variable in variables}

    @property
    def all(self) -> list[GradientSum]:
        """All sums there are, whether they take memory or not."""
        return list(self._sums.values())

    @property
    def used(self) -> list[GradientSum]:
        """The sums that take memory while a batch runs."""
        return [one for one in self._sums.values() if one.is_used]

    def adding(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which a micro-batch runs whose gradients are added here."""
        return contextlib.nullcontext()

    def add(self, variables: list[Any], gradients: list[Any]) -> list[Any]:
        """Add up gradients that have a place, in a graph; return the others, and `None`."""
        left = []
        for variable, gradient in zip(variables, gradients):
            place = self._sums.get(id(variable))
            if place is not None and kind_of(gradient) == DENSE and not tf.executing_eagerly():
                place.add(gradient)
                gradient = None
            left.append(gradient)
        return left

    def value(self, variable: Any) -> Any:
        """Return this replica's sum for a variable, or `None`."""
        place = self._sums.get(id(variable))
        return place.value() if place is not None and place.is_used else None


class StoredSums:
    """Sums of the other results of micro-batches, in variables: they last between graphs.

    Args:
        specs: the types of the tensors that are added up.
        is_rows: for each, whether its rows are listed one after another, not added.
    """

    def __init__(self, specs: list[tf.TensorSpec], is_rows: list[bool]) -> None:
        self._specs, self._is_rows = specs, is_rows
        self._variables = [
            local_variable(
                tf.zeros([0, *spec.shape[1:]], spec.dtype),
                tf.TensorShape([None, *spec.shape[1:]]),
            )
            if rows
            # A number is added to tensors of every shape.
            else local_variable(tf.zeros([], spec.dtype), ANY_SHAPE)
            for spec, rows in zip(specs, is_rows)
        ]

    def release(self) -> None:
        """Forget rows, which take memory, on this replica."""
        for variable, spec, rows in zip(self._variables, self._specs, self._is_rows):
            if rows:
                variable.assign(tf.zeros([0, *spec.shape[1:]], spec.dtype))

    def clear(self) -> None:
        """Start from nothing, on this replica."""
        for variable, spec, rows in zip(self._variables, self._specs, self._is_rows):
            known = spec.shape.is_fully_defined()
            shape = [0, *spec.shape[1:]] if rows else spec.shape if known else []
            variable.assign(tf.zeros(shape, spec.dtype))

    def add(self, tensors: list[Any]) -> None:
        """Add the results of one micro-batch, but for those that are `None`."""
        for variable, tensor, spec, rows in zip(
            self._variables, tensors, self._specs, self._is_rows
        ):
            if tensor is None:
                continue
            if rows:
                variable.assign(tf.concat([variable.read_value(), tensor], 0))
            elif spec.shape.is_fully_defined():
                add_to(variable, tensor)
            else:
                variable.assign(variable.read_value() + tensor)

    def values(self) -> list[Any]:
        """Return this replica's sums."""
        return [
            variable.read_value()
            if rows
            else tf.ensure_shape(variable.read_value(), spec.shape)
            for variable, spec, rows in zip(self._variables, self._specs, self._is_rows)
        ]


class PythonSums:
    """Sums of what micro-batches return that run eagerly: plain values, for each replica."""

    def __init__(self) -> None:
        self._leaves: dict[int, list[Any]] = {}
        self._structure: dict[int, Any] = {}

    def clear(self) -> None:
        """Start from nothing, on this replica."""
        self._leaves.pop(this_replica(), None)

    def add(self, results: Any) -> None:
        """Add the results of one micro-batch."""
        replica = this_replica()
        leaves = tf.nest.flatten(results)
        self._structure[replica] = tf.nest.map_structure(lambda _: 0, results)
        del results
        sums = self._leaves.setdefault(replica, [None] * len(leaves))
        for index in range(len(leaves)):
            # Popped, so that no gradient is in memory after it has been added.
            sums[index] = plus(sums[index], leaves.pop(0))

    def value(self) -> Any:
        """Return this replica's sums, or `None` if nothing was added."""
        replica = this_replica()
        if replica not in self._leaves:
            return None
        leaves = [
            joined(leaf) if isinstance(leaf, list) else leaf for leaf in self._leaves[replica]
        ]
        return tf.nest.pack_sequence_as(self._structure[replica], leaves)
