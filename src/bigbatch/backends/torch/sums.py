"""Where the micro-batches of a batch are added up."""

from __future__ import annotations

import contextlib
from typing import Any

from bigbatch.backends.torch.ops import flatten, map_structure, pack, widened
from bigbatch.core.patching import replaced
from bigbatch.errors import ContextError, explain

_NOT_CLEARED = explain(
    received="a train_step that adds to gradients of an earlier batch: it does not clear them",
    expected="gradients of the batch alone",
    fix="call self.zero_grad() in train_step, before loss.backward()",
)


class GradientSum:
    """The sum of the gradients of one variable.

    It is the `.grad` of the variable itself, to which `loss.backward()` adds, if micro-batches
    leave it alone and its type has enough digits; else a tensor beside it.

    Args:
        variable: a variable of Keras.
        in_grad: whether micro-batches add to `.grad`, and do not clear it.
    """

    def __init__(self, variable: Any, *, in_grad: bool) -> None:
        self._variable = variable
        self._dtype = widened(variable.value.dtype)
        self._in_grad = in_grad and self._dtype is variable.value.dtype
        self._keeps_grad = in_grad
        self.value: Any = None
        """The sum so far, or `None`."""

    @property
    def bytes(self) -> int:
        """What it takes while it is open."""
        return self._dtype.itemsize * self._variable.value.numel()

    def open(self) -> None:
        """Start from nothing."""
        self.value = None

    def close(self) -> None:
        """Give the memory back; who has read the sum still has it."""
        self.value = None

    def add(self, gradient: Any) -> None:
        """Add the gradient of one micro-batch."""
        parameter = self._variable.value
        if self._in_grad and gradient is parameter.grad:
            self.value = gradient
            return
        if self.value is not None:
            self.value.add_(gradient)
        else:
            # A copy: the step may change what it has handed over.
            self.value = gradient.detach().to(self._dtype, copy=True)
        if self._keeps_grad:
            parameter.grad = None


class GradientSums:
    """The sums of the gradients of one optimizer.

    Args:
        model: a Keras model.
        in_grad: whether `.grad` is the place: the model's `train_step` is that of Keras, which
            weights its loss before the backward pass, and nobody looks at single micro-batches.
    """

    def __init__(self, model: Any, *, in_grad: bool) -> None:
        self._model, self._in_grad = model, in_grad
        self._sums: dict[int, GradientSum] = {}
        self._left: dict[int, Any] = {}

    @property
    def all(self) -> list[GradientSum]:
        """Sums that a trace has to know of: there is none."""
        return []

    @property
    def used(self) -> list[GradientSum]:
        """The sums that take memory while a batch runs."""
        return list(self._sums.values())

    def adding(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which a micro-batch runs whose gradients are added here.

        `zero_grad` clears what an earlier batch has left, but not what has been added up.
        """
        if not self._in_grad:
            clear = self._model.zero_grad

            def zero_grad(*args: Any, **kwargs: Any) -> None:
                self._left.clear()
                clear(*args, **kwargs)

            return replaced(self._model, zero_grad=zero_grad)
        if all(one.value is None for one in self._sums.values()):
            return contextlib.nullcontext()
        return replaced(self._model, zero_grad=lambda *_, **__: None)

    def add(self, variables: list[Any], gradients: list[Any], summed: list[bool]) -> list[Any]:
        """Add up gradients; return what has no place here: nothing."""
        del summed  # all of them are dense
        for variable, gradient in zip(variables, gradients):
            if gradient is None:
                continue
            if id(variable) not in self._sums:
                self._sums[id(variable)] = GradientSum(variable, in_grad=self._in_grad)
            parameter = variable.value
            if not self._in_grad and parameter.grad is not None:
                if self._left.get(id(variable)) is parameter.grad:
                    raise ContextError(_NOT_CLEARED)
                self._left[id(variable)] = parameter.grad
            self._sums[id(variable)].add(gradient)
        return [None] * len(variables)

    def value(self, variable: Any) -> Any:
        """Return the sum for a variable, or `None`."""
        place = self._sums.get(id(variable))
        return None if place is None else place.value


class PythonSums:
    """Sums of the other results of micro-batches."""

    def __init__(self) -> None:
        self._sums: list[Any] | None = None
        self._structure: Any = None

    def clear(self) -> None:
        """Start from nothing."""
        self._sums = None

    def add(self, results: Any) -> None:
        """Add the results of one micro-batch."""
        leaves = [None if leaf is None else leaf.detach() for leaf in flatten(results)]
        self._structure = map_structure(lambda _: 0, results)
        if self._sums is None:
            self._sums = leaves
            return
        for index, leaf in enumerate(leaves):
            if leaf is not None:
                so_far = self._sums[index]
                self._sums[index] = leaf if so_far is None else so_far + leaf

    def value(self) -> Any:
        """Return the sums."""
        return pack(self._structure, list(self._sums or ()))
