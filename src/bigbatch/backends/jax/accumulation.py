"""Run a function on the micro-batches of `fit`, and add up what it returns: call by call.

One compiled program runs a micro-batch and adds to the sums, which it is given to overwrite. It
is called from Python for each micro-batch: XLA on a CPU runs convolutions in a loop many times
slower. Rows are cut before the call, so that a program serves every micro-batch of its size.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterable, Iterator

import jax
import jax.numpy as jnp

from bigbatch.backends.jax import data as batches
from bigbatch.backends.jax.compat import number_of_terms, quickly, seeds_of
from bigbatch.backends.jax.dependence import is_added_to
from bigbatch.backends.jax.devices import Shards, alone, current_shards
from bigbatch.backends.jax.memory import note_bytes_of, noticing
from bigbatch.backends.jax.ops import Rows, widened
from bigbatch.backends.jax.shards import ShardedSums
from bigbatch.backends.jax.state import assign
from bigbatch.backends.jax.steps import UpdateResults
from bigbatch.backends.jax.traced import CHANGES_ITSELF, TracedMicrobatch
from bigbatch.errors import ContextError, explain


class Accumulation(TracedMicrobatch):
    """The sum of `compute` over the micro-batches of a batch.

    Args:
        model: a built and compiled Keras model.
        compute: called with a vector of numbers that are the same for the whole batch, and the
            data of a micro-batch; returns a nest of arrays, and may assign variables.
        before: returns the value that a variable had before the batch.
        made: returns the results of updates that micro-batches make again.
        is_eager: whether to compile nothing.
    """

    def __init__(
        self,
        model: Any,
        compute: Callable[[Any, Any], Any],
        before: Callable[[Any], Any],
        made: Callable[[], list[UpdateResults]],
        *,
        is_eager: bool,
    ) -> None:
        self._before, self._is_eager = before, is_eager
        super().__init__(model, compute, made)

    def prepare(self, types: Any, size: int | None) -> None:
        """Trace `compute` for data of such types: what it sums, draws, and assigns once."""
        shards = current_shards()
        if self._is_eager and shards is not None and shards.processes > 1:
            raise ContextError(_not_by_processes("micro-batches are not compiled"))
        if self._is_eager:  # seeds never depend on samples
            self.once.update((id(one), one) for one in seeds_of(self._model))
        try:
            traced = self._look_at(types, size)
        except ContextError:
            raise
        except Exception:
            if not self._is_eager:
                raise
            return  # what only runs eagerly tells nothing
        if self._sharded is None and not self.remarks:
            self._shard(*traced)

    def _shard(self, jaxpr: Any, arguments: tuple[Any, ...]) -> None:
        """Let each device add up what it runs, if there are several and nothing forbids it."""
        shards = current_shards()
        if shards is None or not hasattr(self._totals(self._shapes), "gradients"):
            return
        try:
            self._sharded = self._sums_on(shards, jaxpr, arguments)
        except Exception as error:  # whatever a `train_step` does that cannot be mapped
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            if shards.processes > 1:
                raise ContextError(_not_by_processes(reason)) from error
            self._shards = shards
            self.remarks.append(
                f"bigbatch: gradients are reduced in every micro-batch, not once: {reason}"
            )

    def _sums_on(self, shards: Shards, jaxpr: Any, arguments: tuple[Any, ...]) -> ShardedSums:
        if self._is_eager:
            raise NotImplementedError("micro-batches are not compiled")
        if self._given:
            raise NotImplementedError("train_step changes weights before an update")
        if any(self._is_rows):
            raise NotImplementedError("something is logged, or kept, for every sample")
        variables = self._changing()
        before = len(jax.tree.leaves(arguments[0]))
        outputs = self._changing_outputs(jaxpr).start
        for number, one in enumerate(variables):
            is_sum = is_added_to(jaxpr.jaxpr, outputs + number, before + number)
            if id(one) not in self.once and not (self._is_metric(one) and is_sum):
                raise NotImplementedError(f"{one.path!r} is not a sum over samples")
        is_same = [id(one) in self.once for one in variables]
        sharded = ShardedSums(shards, self.pure, self._shapes, is_same)
        data = arguments[-1]
        sharded.lowered(*self._abstract_arguments(data, batches.sample_count(data)))
        return sharded

    def _add(self, program: Callable[..., Any], sums: Any, *arguments: Any) -> Any:
        result, listed, changing, given, _ = program(*arguments)
        added = [one + other.astype(one.dtype) for one, other in zip(sums, result)]
        return added, listed, changing, given

    def start_anew(self, places: list[str | None] | None) -> None:
        super().start_anew(places)
        self._step: Any = jax.jit(functools.partial(self._add, self._program), donate_argnums=0)

    draws_several_rows = False
    """Whether a draw is known to have several rows for each sample: nothing tells."""

    def draw_in_blocks(self, is_so: bool) -> bool:
        """Say that the rows of a sample follow each other in every draw."""
        del is_so
        return False

    def forget(self) -> None:
        """Forget what was traced."""
        self._sharded: ShardedSums | None = None
        self._shards: Shards | None = None
        self.remarks: list[str] = []
        """What to say of how micro-batches run."""
        self.release()
        self._zeros: Any = None
        self._settle: Any = None
        super().forget()

    def clear(self) -> None:
        """Begin a batch."""
        self.release()
        self._samples = 0
        self._first = {id(v): v.value for v in self._changing()}

    def release(self) -> None:
        """Give back the memory of a sum that has been read."""
        self._sums = None
        self._own: list[Any] = []
        self._listed: list[list[Any]] = []
        if self._sharded is not None:
            self._sharded.held = None

    def add(self, context: Any, data: Any, size: int | None = None) -> None:
        """Run micro-batches of `size` samples, or one of all of them, and add them up."""
        count = batches.checked_count(data) if size else batches.sample_count(data)
        size = min(size or count, count)
        fixed, context = self._fixed_values(), self._padded(context)
        first, shards = self._samples, current_shards()
        if shards is not None:  # the parts of other processes are as large
            first = shards.processes * first + shards.process * count
        cuts = ((start, min(size, count - start)) for start in range(0, count, size))
        if self._sharded is not None:
            cuts = self._sharded.shards.cuts(count, size)
        for start, number in cuts:
            part = batches.rows(data, start, number)
            if self._shards is not None:  # and the compiler reduces
                part = self._shards.placed(part)
            self._run(fixed, context, first + start, part)
        self._samples += count

    def _fixed_values(self) -> list[Any]:
        """Return what micro-batches read, as it was before the batch, and results."""
        return [*map(self._before, self._fixed()), *self._results()]

    def _padded(self, context: Any) -> Any:
        """Return what is known of the batch, as long as it was traced."""
        # Without counts there are no denominators in it.
        missing = 2 + number_of_terms(self._model) - context.shape[0]
        return jnp.pad(context, (0, max(missing, 0)))

    def change_once(self, context: Any, data: Any, size: int | None = None) -> None:
        """Run one micro-batch, and keep nothing but what changes once per batch."""
        if self._settle is None:
            self._settle = self._settled if self._is_eager else jax.jit(self._settled)
        count = batches.sample_count(data)
        part = batches.rows(data, 0, min(size or count, count))
        variables = self._changing()
        changing = [self._before(v) if id(v) in self.once else v.value for v in variables]
        arguments = self._fixed_values(), changing, self._padded(context), jnp.uint32(0), part
        with noticing():
            values, left = self._settle(*arguments)
        assign([one for one in variables if id(one) in self.once], values)
        assign(self._left, left)

    def _settled(self, *arguments: Any) -> Any:
        """Return the values that change once per batch."""
        _, _, changing, _, left = self._program(*arguments)
        pairs = zip(self._changing(), changing)
        return [value for one, value in pairs if id(one) in self.once], left

    # For the few samples that are compared whole and cut.

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Return a block in which micro-batches are tried, and programs are not kept.

        They read the switch of batch normalisation when they are traced.
        """
        before = self._step, self._sharded, self._shards

        def try_samples(*arguments: Any) -> Any:
            return self._add(self.pure, *arguments)

        self._step = jax.jit(try_samples, donate_argnums=0, compiler_options=quickly())
        self._sharded = self._shards = None  # a few samples are not worth sharing
        try:
            with alone():
                yield
        finally:
            self._step, self._sharded, self._shards = before

    def note_bytes(self, data: Any, size: int) -> bool:
        """Let the compiler say what a micro-batch of `size` samples takes; run nothing."""
        if self._is_eager:
            return False
        part = batches.rows(data, 0, min(size, batches.sample_count(data)))
        types = jax.tree.map(batches.type_of, part)
        sums = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, widened(s.dtype)), self._shapes
        )
        arguments = self._abstract_arguments(types, batches.sample_count(types))
        if self._sharded is not None:
            lowered = self._sharded.lowered(*arguments)
        else:
            lowered = self._step.lower(sums, *arguments)
        note_bytes_of(lowered.compile(), batches.bytes_of([sums, types]))
        return True

    def _run(self, fixed: list[Any], context: Any, start: int, part: Any) -> None:
        variables = self._changing()
        values = [
            self._first[id(one)] if id(one) in self.once else one.value for one in variables
        ]
        arguments = fixed, values, context, jnp.uint32(start), part
        if self._is_eager:
            self._add_eagerly(arguments)
            return
        if self._sharded is not None:
            same = self._sharded.apart(variables)[1]
            assign(same, self._sharded.add(*arguments))
            return
        sums = self._begun() if self._sums is None else self._sums
        self._sums = None  # overwritten
        with noticing():
            self._sums, listed, values, self._own = self._step(sums, *arguments)
        self._listed.append(listed)
        assign(variables, values)

    def _add_eagerly(self, arguments: tuple[Any, ...]) -> None:
        result, listed, values, self._own, _ = self.pure(*arguments)
        if self._shapes is None and (self._given or self._left):
            raise ContextError(CHANGES_ITSELF)  # nobody knows of what
        result = [leaf.astype(widened(leaf.dtype)) for leaf in result]
        sums = self._sums
        self._sums = result if sums is None else [*map(jnp.add, sums, result)]
        self._listed.append(listed)
        assign(self._changing(), values)

    def _begun(self) -> Any:
        """Return sums of nothing."""
        if self._zeros is None:
            shapes = self._shapes

            def zeros() -> Any:
                return jax.tree.map(lambda s: jnp.zeros(s.shape, widened(s.dtype)), shapes)

            self._zeros = jax.jit(zeros)
        return self._zeros()

    def value(self) -> Any:
        """Return the sum of a batch, in the structure that `compute` returns."""
        for (_, variable), value in zip(self._given, self._own):
            variable.assign(value)  # before the update
        return self._reduced(lambda sums: sums, is_whole=True)

    def so_far(self) -> Any:
        """Return the sum so far of what is logged; gradients stay on their devices.

        It is that of this process.
        """
        return self._reduced(lambda sums: sums._replace(gradients=[]), is_whole=False)

    def _reduced(self, select: Callable[[Any], Any], *, is_whole: bool) -> Any:
        """Return what `select` leaves of the sum so far, over all devices."""
        sharded, shards = self._sharded, current_shards()
        if sharded is None or sharded.held is None:
            sums = select(self._totals(self._sums or ()))
            return sums if shards is None or not is_whole else shards.sum_of_processes(sums)
        sums, metrics = sharded.reduce(
            lambda sums: select(self._totals(sums)), is_whole=is_whole
        )
        assign(sharded.apart(self._changing())[0], metrics)
        return sums

    def _totals(self, sums: Iterable[Any]) -> Any:
        """Return sums, and rows that are listed, in the structure that `compute` returns."""
        sums = iter(sums)
        listed = (Rows(jnp.concatenate(parts)) for parts in zip(*self._listed))
        leaves = [next(listed, None) if rows else next(sums) for rows in self._is_rows]
        return jax.tree.unflatten(self._structure, leaves)


def _not_by_processes(reason: str) -> str:
    return explain(
        received=f"a model that several processes train, where {reason}",
        expected="micro-batches that each process can add up by itself until the update",
        fix="leave that out, or train in one process with all its devices",
    )
