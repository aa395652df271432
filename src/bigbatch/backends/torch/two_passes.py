"""Two passes over the micro-batches of a batch, the second just as the first.

A loss that compares the samples of a batch needs the outputs of the whole batch before the
gradient of any of them is known: the first pass gives outputs, the second gradients.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, NamedTuple

import torch

from bigbatch.backends.torch import data as batches
from bigbatch.backends.torch.ops import added, as_gradient_of, flatten, pack
from bigbatch.backends.torch.rollback import Copies
from bigbatch.backends.torch.sums import PythonSums


class LossOfBatch(NamedTuple):
    """The loss of a whole batch, and its gradients as far as it is a function of outputs."""

    result: Any
    """Whatever the loss returns besides."""
    variables: Any
    """What to differentiate by."""
    in_loss: Any
    """The gradients of those variables that stand in the loss itself, such as a temperature."""
    of_rows: list[Any]
    """The gradients of what `forward` returned; `None` for none."""
    of_means: list[Any]
    """The gradients of the means that `forward` returned."""


class Batch:
    """A batch as it is."""

    def __init__(self, nest: Any) -> None:
        self._nest = nest
        self.leaves = flatten(nest)
        self.count = batches.checked_count(nest)

    def arguments(self, leaves: list[Any]) -> Any:
        """Return leaves in the structure of the batch."""
        return pack(self._nest, leaves)


class ReplicaRows:
    """The rows of one replica, which is the only one."""

    replicas = 1

    def __init__(self, count: int) -> None:
        self.total = count

    def whole(self, nest: Any) -> Any:
        """Return tensors as they are for the batch of all replicas."""
        return nest


class Passes(NamedTuple):
    """What makes two passes over the batches of a model."""

    same: Any
    """What every micro-batch starts from."""
    state: Callable[[], list[Any]]
    """Returns the tensors that a micro-batch may change."""

    def with_other_draws(self) -> list[str]:
        """Name what may draw other numbers than the full batch."""
        return self.same.with_other_draws()

    def __call__(self, nest: Any, size: int) -> TwoPasses:
        """Return two passes over a batch, `size` samples at a time."""
        if not self.same.is_prepared:
            self.same.prepare(batches.types_of_any_count(nest[0]))
        return TwoPasses(nest, size, self.state, self.same)


class TwoPasses:
    """Two passes over the micro-batches of a batch, with a loss of the whole between them.

    What a micro-batch changes, such as the state of random layers, has in the second pass the
    values it had in the first, and afterwards those it had before the second.

    Args:
        nest: the samples.
        size: samples per micro-batch; the last one may be smaller.
        state: returns the tensors that a micro-batch may change.
        same: what every micro-batch starts from.
    """

    loss_of_batch = LossOfBatch

    def __init__(self, nest: Any, size: int, state: Callable[[], list[Any]], same: Any) -> None:
        self._nest, self._size, self._state, self._same = nest, size, state, same
        self.batch = Batch(nest)
        self.replica_rows = ReplicaRows(self.batch.count)
        self.sums: Any = None
        """The sum over micro-batches of what adds up, after the first pass."""

    @staticmethod
    def unconverted(function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function as it is."""
        return function

    def _parts(self) -> Iterator[tuple[int, int, Any]]:
        """Run the micro-batches: where each begins, its samples, and its data."""
        self._same.begin()
        for start in range(0, self.batch.count, self._size):
            count = min(self._size, self.batch.count - start)
            with self._same.running(count, self.batch.count):
                yield start, count, batches.rows(self._nest, start, count)

    def run(
        self,
        forward: Callable[..., tuple[list[Any], list[Any], list[Any]]],
        loss: Callable[[list[Any], list[Any]], LossOfBatch],
        keep: Callable[[Any], Any],
        begin: Callable[[], None],
    ) -> tuple[LossOfBatch, Any]:
        """Return the loss, and what `keep` returned last: sums have their places.

        Args:
            forward: called with a micro-batch; returns tensors with one row per sample (or
                `None`), numbers that are means over samples, and a nest that adds up.
            loss: called with the same for the batch.
            keep: called with the gradients of all micro-batches so far.
            begin: called before the second pass.
        """
        with self._same.repeated():
            return self._run(forward, loss, keep, begin)

    def _run(
        self,
        forward: Callable[..., Any],
        loss: Callable[[list[Any], list[Any]], LossOfBatch],
        keep: Callable[[Any], Any],
        begin: Callable[[], None],
    ) -> tuple[LossOfBatch, Any]:
        total = self.batch.count
        before = Copies(self._state())
        rows, means = self._first(forward)
        result = loss(rows, means)
        after = Copies(self._state())
        before.put_back()
        for variable in result.variables:
            variable.value.grad = None  # what it is has been taken by the loss
        begin()
        left: Any = None
        for start, count, part in self._parts():
            outputs, numbers, _ = forward(*part)
            seeds = [None if u is None else u[start : start + count] for u in result.of_rows]
            seeds += [None if u is None else u * (count / total) for u in result.of_means]
            pairs = [
                (output, seed)
                for output, seed in zip([*outputs, *numbers], seeds)
                if seed is not None and output.requires_grad
            ]
            if pairs:
                tensors, their_seeds = ([pair[at] for pair in pairs] for at in (0, 1))
                torch.autograd.backward(tensors, their_seeds)
            left = keep([variable.value.grad for variable in result.variables])
        after.put_back()
        return result, left

    def _first(self, forward: Callable[..., Any]) -> tuple[list[Any], list[Any]]:
        """Return the rows of the whole batch, and means over it, to be differentiated by."""
        parts, sums, others = [], [], PythonSums()
        with torch.no_grad():
            for _, count, part in self._parts():
                outputs, means, added_up = forward(*part)
                others.add(added_up)
                parts.append(outputs)
                sums.append([mean * (count / self.batch.count) for mean in means])
        rows = [None if some[0] is None else torch.cat(some) for some in zip(*parts)]
        del parts
        self.sums = others.value()
        means = [torch.stack(some).sum(0) for some in zip(*sums)]
        for leaf in (*rows, *means):
            if leaf is not None and leaf.is_floating_point():
                leaf.requires_grad_()
        return rows, means

    def with_those_in_loss(self, result: LossOfBatch, gradients: Any) -> Any:
        """Return the gradients of a batch, given those by way of outputs."""
        return [
            added(as_gradient_of(variable, through_outputs), as_gradient_of(variable, in_loss))
            for variable, through_outputs, in_loss in zip(
                result.variables, gradients, result.in_loss
            )
        ]

    def recording(self, watched: list[Any]) -> _Recording:
        """Return a block in which a function of tensors is recorded, to be differentiated."""
        return _Recording(watched)


class _Recording:
    """Tensors whose gradients are there when the `train_step` has run its backward pass."""

    def __init__(self, watched: list[Any]) -> None:
        self._watched = watched

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass

    def gradients(self, of: Any, seed: Any) -> list[Any]:
        """Return the gradients of the loss, with its scale, by what was watched."""
        del of, seed
        return [None if one is None else one.grad for one in self._watched]
