"""Where the micro-batches of a batch are added up, on each replica by itself."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, Iterable

import tensorflow as tf

from bigbatch.backends.tensorflow.compat import undistributed_variable
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

    def add_rows(self, slices: Any) -> None:
        """Add the rows of `IndexedSlices`, in place."""
        self.is_used = True
        tf.raw_ops.ResourceScatterAdd(
            resource=self.variable.handle,
            indices=slices.indices,
            updates=tf.cast(slices.values, self.dtype),
        )

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
            everything else; so are sparse ones, but for those that are to be summed.
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

    def add(self, variables: list[Any], gradients: list[Any], summed: list[bool]) -> list[Any]:
        """Add up gradients that have a place, in a graph; return the others, and `None`.

        `summed` says which of them have rows that are added here, too.
        """
        left = []
        for variable, gradient, is_summed in zip(variables, gradients, summed):
            place = self._sums.get(id(variable))
            if place is not None and not tf.executing_eagerly():
                if kind_of(gradient) == DENSE:
                    place.add(gradient)
                    gradient = None
                elif is_summed:
                    place.add_rows(gradient)
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
            # A list of tensors, concatenated once: not a tensor that is copied to grow.
            _RowLists(spec)
            if rows
            # A number is added to tensors of every shape.
            else local_variable(tf.zeros([], spec.dtype), ANY_SHAPE)
            for spec, rows in zip(specs, is_rows)
        ]

    def release(self) -> None:
        """Forget rows, which take memory, on this replica."""
        for variable, spec, rows in zip(self._variables, self._specs, self._is_rows):
            if rows:
                variable.assign(_no_tensors(spec))

    def clear(self) -> None:
        """Start from nothing, on this replica."""
        for variable, spec, rows in zip(self._variables, self._specs, self._is_rows):
            known = spec.shape.is_fully_defined()
            nothing = _no_tensors if rows else lambda one: tf.zeros(one.shape, one.dtype)
            variable.assign(nothing(spec) if rows or known else tf.zeros([], spec.dtype))

    def add(self, tensors: list[Any]) -> None:
        """Add the results of one micro-batch, but for those that are `None`."""
        for variable, tensor, spec, rows in zip(
            self._variables, tensors, self._specs, self._is_rows
        ):
            if tensor is None:
                continue
            if rows:
                variable.assign(
                    tf.raw_ops.TensorListPushBack(
                        input_handle=variable.read_value(), tensor=tensor
                    )
                )
            elif spec.shape.is_fully_defined():
                add_to(variable, tensor)
            else:
                variable.assign(variable.read_value() + tensor)

    def values(self) -> list[Any]:
        """Return this replica's sums."""
        return [
            _rows_of(variable.read_value(), spec)
            if rows
            else tf.ensure_shape(variable.read_value(), spec.shape)
            for variable, spec, rows in zip(self._variables, self._specs, self._is_rows)
        ]


class _RowLists:
    """A list of tensors on each replica.

    A variable of a strategy would not do: the first worker sends its value to the others, which
    a list cannot be.
    """

    def __init__(self, spec: tf.TensorSpec) -> None:
        strategy = tf.distribute.get_strategy()
        several = strategy.num_replicas_in_sync > 1
        devices = strategy.extended.worker_devices if several else [None]
        self._lists = []
        for device in devices:
            with tf.device(device):
                self._lists.append(undistributed_variable(_no_tensors(spec)))

    def assign(self, tensors: Any) -> None:
        """Let the list of this replica be another."""
        self._of_this_replica().assign(tensors)

    def read_value(self) -> Any:
        """Return the list of this replica."""
        return self._of_this_replica().read_value()

    def _of_this_replica(self) -> Any:
        return self._lists[this_replica() % len(self._lists)]


def _no_tensors(spec: tf.TensorSpec) -> Any:
    """Return an empty list of tensors that have rows like `spec`."""
    return tf.raw_ops.EmptyTensorList(
        element_shape=_rows_like(spec), max_num_elements=-1, element_dtype=spec.dtype
    )


def _rows_of(tensors: Any, spec: tf.TensorSpec) -> Any:
    """Return the rows of all tensors of a list, one after another."""
    rows = tf.raw_ops.TensorListConcatV2(
        input_handle=tensors,
        element_dtype=spec.dtype,
        element_shape=_rows_like(spec),
        leading_dims=tf.zeros([0], tf.int64),
    ).tensor
    return tf.ensure_shape(rows, [None, *spec.shape[1:]])


def _rows_like(spec: tf.TensorSpec) -> Any:
    shape: Any = [-1, *spec.shape[1:]]
    return tf.constant(shape, tf.int32)


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
