"""Where the dense gradients of a batch are added up while its micro-batches run."""

from __future__ import annotations

import itertools
from typing import Any, Iterable

import tensorflow as tf

from bigbatch.tf.buffers import ANY_SHAPE, add_to, local_variable
from bigbatch.tf.values import DENSE, LARGE, kind_of, widened, zeros

_NUMBERS = itertools.count()


class DenseSum:
    """A sum of tensors of one shape, on each replica its own.

    It can be added to inside a function, where a gradient is gone as soon as it is added:
    what a function returns is kept until everything the function does is done. It takes
    memory only from `open` to `close`.
    """

    def __init__(self, shape: Any, dtype: Any) -> None:
        self.shape = tf.TensorShape(shape)
        """Of what is added; the number of rows may change before anything is."""
        self.dtype = tf.as_dtype(dtype)
        self._number = next(_NUMBERS)
        self._sum = local_variable(self._nothing(), ANY_SHAPE)
        self._open_on: set[int | None] = set()  # replicas; run eagerly, each opens its own
        self.is_used = False
        """Whether anything has ever been added, or has been traced to be."""
        self.has_value = False
        """Whether anything is added in this batch, or has been traced to be."""

    @property
    def variable(self) -> Any:
        """The variable that holds it."""
        return self._sum

    @property
    def bytes(self) -> int:
        """What it takes while it is open."""
        return self.dtype.size * self.shape.num_elements()

    def open(self) -> None:
        """Start from zero."""
        if tf.executing_eagerly():
            self._open_on.add(_this_replica())
            self.has_value = False
        self._sum.assign(zeros(self.shape, self.dtype))

    def add(self, value: Any) -> None:
        """Add a tensor."""
        if not self._is_open_here():
            self.open()
        self.is_used = self.has_value = True
        add_to(self._sum, tf.cast(value, self.dtype))

    def value(self) -> Any:
        """Return this replica's sum."""
        if not self._is_open_here():  # no micro-batch of this replica had such a gradient
            return zeros(self.shape, self.dtype)
        return tf.ensure_shape(self._sum.read_value(), self.shape)

    def close(self) -> None:
        """Give the memory back; who has read the sum still has it."""
        self._open_on.clear()
        self._sum.assign(self._nothing())

    def _is_open_here(self) -> bool:
        """Whether this replica has opened it; a graph opens it before it runs anything."""
        return not tf.executing_eagerly() or _this_replica() in self._open_on

    def _nothing(self) -> Any:
        if not self.shape.rank:
            return tf.zeros([], self.dtype)
        # TensorFlow takes all that is assigned to a variable in a graph to have one shape, and
        # equal operations for one: were there no rows in sight, and the same for every
        # variable, it would mix up the shapes of gradients. So it must not see the number.
        number = tf.raw_ops.PlaceholderWithDefault(input=tf.constant(self._number), shape=[])
        return tf.zeros(tf.stack([number - self._number, *self.shape[1:]]), self.dtype)


def _this_replica() -> int | None:
    """Return the number of the replica that runs this eagerly; `None` outside of replicas."""
    context = tf.distribute.get_replica_context()
    return None if context is None else int(context.replica_id_in_sync_group)


class DenseSums:
    """The sums of the dense gradients of variables, on each replica its own.

    Small ones whose rows are of one kind stand below each other in one tensor: of many small
    ones it is the number of operations that takes time.

    Args:
        joins: whether they do. In eager code they should not: which variables have gradients
            may change with every micro-batch.
    """

    def __init__(self, *, joins: bool) -> None:
        self._joins = joins
        self._places: list[_Place] = []
        self._known: set[int] = set()

    def prepare(self, variables: Iterable[Any]) -> None:
        """Make places for variables that have none."""
        places: dict[Any, list[Any]] = {}
        for variable in variables:
            if id(variable) not in self._known:
                self._known.add(id(variable))
                key = _place_of(variable) if self._joins else id(variable)
                places.setdefault(key, []).append(variable)
        self._places += map(_Place, places.values())

    @property
    def all(self) -> list[DenseSum]:
        """All tensors there are, whether they take memory or not."""
        return [place.sum for place in self._places]

    @property
    def used(self) -> list[DenseSum]:
        """The tensors that take memory while a batch runs."""
        return [place.sum for place in self._places if place.sum.is_used]

    def open(self) -> None:
        """Start from zero, where anything is ever added."""
        for one in self.used:
            one.open()

    def close(self) -> None:
        """Give the memory back; who has read the sums still has them."""
        for one in self.used:
            one.close()

    def add(
        self, variables: list[Any], gradients: list[Any], weight: Any = None
    ) -> tuple[list[Any], list[Any]]:
        """Add up `weight * gradient` for those that can be: dense, of variables with a place.

        Returns:
            The gradients, as they are, with `None` for those added up; what was added up.
        """
        dense = {
            id(variable): gradient
            for variable, gradient in zip(variables, gradients)
            if kind_of(gradient) == DENSE
        }
        added = [place.take(dense, weight) for place in self._places]
        left = [
            gradient if kind_of(gradient) != DENSE or id(variable) in dense else None
            for variable, gradient in zip(variables, gradients)
        ]
        return left, [one for one in added if one is not None]

    def values(self) -> dict[int, Any]:
        """Return this replica's sums, by the identity of their variables."""
        values: dict[int, Any] = {}
        for place in self._places:
            values.update(place.values())
        return values

    def joined_values(self) -> tuple[list[Any], set[int]]:
        """Return this replica's sums, joined as they are; the identities of their variables."""
        places = [place for place in self._places if place.sum.has_value]
        known = {id(variable) for place in places for variable in place.variables}
        return [place.sum.value() for place in places], known


class _Place:
    """One tensor for the sums of one or more variables."""

    def __init__(self, variables: list[Any]) -> None:
        self.variables = variables
        """Whose gradients they are."""
        self.sum = DenseSum(variables[0].shape, widened(variables[0].dtype))
        """The tensor."""

    def take(self, gradients: dict[int, Any], weight: Any) -> Any:
        """Take the gradients of its variables and add them up; return what was added."""
        own = [one for one in self.variables if id(one) in gradients]
        if not own:
            return None
        if not self.sum.is_used:  # only now it is known which variables have gradients
            self.variables = own
            self.sum.shape = tf.TensorShape(own[0].shape)
            if len(own) > 1:
                self.sum.shape = tf.TensorShape([sum(self._rows), *own[0].shape[1:]])
        # Where another trace had a gradient and this one has none, it is zero.
        parts = [
            tf.cast(gradients.pop(id(one)), self.sum.dtype)
            if id(one) in gradients
            else zeros(one.shape, self.sum.dtype)
            for one in self.variables
        ]
        value = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
        value = value if weight is None else value * tf.cast(weight, value.dtype)
        self.sum.add(value)
        return value

    def values(self) -> dict[int, Any]:
        """Return this replica's sums, by the identity of their variables."""
        if not self.sum.has_value:
            return {}
        value = self.sum.value()
        parts = [value] if len(self.variables) == 1 else tf.split(value, self._rows)
        return {id(one): part for one, part in zip(self.variables, parts)}

    @property
    def _rows(self) -> list[int]:
        return [one.shape[0] for one in self.variables]


def _place_of(variable: Any) -> Any:
    """Return what variables have in common whose gradients are added up in one tensor."""
    shape = tf.TensorShape(variable.shape)
    if shape.rank in (1, 2) and (shape.num_elements() or LARGE) < LARGE:
        return widened(variable.dtype), tuple(shape[1:])
    return id(variable)
