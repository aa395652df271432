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
from bigbatch.backends.jax.dependence import independent_outputs, is_added_to
from bigbatch.backends.jax.draws import MicrobatchRows, drawing, places_of
from bigbatch.backends.jax.memory import note_bytes_of, noticing
from bigbatch.backends.jax.ops import Rows, weight_dtype, widened
from bigbatch.backends.jax.shards import ShardedSums, Shards, current_shards
from bigbatch.backends.jax.state import assign, scope_of, values_of, variables_of


class Accumulation:
    """The sum of `compute` over the micro-batches of a batch.

    Args:
        model: a built and compiled Keras model.
        compute: called with a vector of numbers that are the same for the whole batch, and the
            data of a micro-batch; returns a nest of arrays, and may assign variables.
        is_eager: whether to compile nothing.
    """

    def __init__(
        self, model: Any, compute: Callable[[Any, Any], Any], *, is_eager: bool
    ) -> None:
        self._model = model
        self._compute = compute
        self._is_eager = is_eager
        self.once: dict[int, Any] = {}
        """The variables that change once per batch: the same for any samples. By `id`."""
        self.changed: dict[int, Any] = {}
        """Those, and others, if updates are to be undone: never here."""
        self.forget()

    def prepare(self, types: Any, size: int | None) -> None:
        """Trace `compute` for data of such types: what it sums, draws, and assigns once."""
        if self._is_eager:
            # What only runs eagerly tells nothing; but seeds never depend on samples.
            self.once.update((id(one), one) for one in seeds_of(self._model))
            with contextlib.suppress(Exception):
                self._look_at(types, size)
            return
        self._look_at(types, size)

    def _look_at(self, types: Any, size: int | None) -> None:
        count = batches.sample_count(types)
        count = min(count, size) if size else count
        arguments = self._abstract_arguments(types, count)
        traced = self._program.trace(*arguments)
        drawn = self._drawn
        if drawn:
            other = self._abstract_arguments(types, count + 1)
            # A model may be made for one size only: then a draw of as many rows is theirs.
            with contextlib.suppress(Exception):
                jax.eval_shape(self._pure, *other)
            places = places_of(drawn, self._drawn, count)
            if places != self._places:
                self._start_anew(places)
                traced = self._program.trace(*arguments)
        self._shapes = traced.out_info[0]
        self._effects |= {type(one).__name__ for one in traced.jaxpr.effects}
        self._find_once(traced.jaxpr, arguments)
        if self._sharded is None and not self.remarks:
            self._shard(traced.jaxpr, arguments)

    def _shard(self, jaxpr: Any, arguments: tuple[Any, ...]) -> None:
        """Let each device add up what it runs, if there are several and nothing forbids it."""
        shards = current_shards()
        if shards is None or not hasattr(self._totals(self._shapes), "gradients"):
            return
        try:
            self._sharded = self._sums_on(shards, jaxpr, arguments)
        except Exception as error:  # whatever a `train_step` does that cannot be mapped
            self._shards = shards
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self.remarks.append(
                f"bigbatch: gradients are reduced in every micro-batch, not once: {reason}"
            )

    def _sums_on(self, shards: Shards, jaxpr: Any, arguments: tuple[Any, ...]) -> ShardedSums:
        if self._is_eager:
            raise NotImplementedError("micro-batches are not compiled")
        if any(self._is_rows):
            raise NotImplementedError("something is logged, or kept, for every sample")
        variables = self._changing()
        before = len(jax.tree.leaves(arguments[0]))
        outputs = len(jaxpr.jaxpr.outvars) - len(variables)
        for number, one in enumerate(variables):
            is_sum = is_added_to(jaxpr.jaxpr, outputs + number, before + number)
            if id(one) not in self.once and not (self._is_metric(one) and is_sum):
                raise NotImplementedError(f"{one.path!r} is not a sum over samples")
        is_same = [id(one) in self.once for one in variables]
        sharded = ShardedSums(shards, self._pure, self._shapes, is_same)
        data = arguments[-1]
        sharded.lowered(*self._abstract_arguments(data, batches.sample_count(data)))
        return sharded

    def _find_once(self, jaxpr: Any, arguments: tuple[Any, ...]) -> None:
        """Note which variables get a value that does not depend on samples."""
        sizes = [len(jax.tree.leaves(one)) for one in arguments]
        state_inputs = range(sizes[0], sizes[0] + sizes[1])
        sample_inputs = range(sum(sizes[:-1]), sum(sizes))
        outputs = range(len(jaxpr.jaxpr.outvars) - sizes[1], len(jaxpr.jaxpr.outvars))
        same = independent_outputs(jaxpr.jaxpr, sample_inputs, dict(zip(outputs, state_inputs)))
        for variable, output in zip(self._changing(), outputs):
            if output in same and not self._is_metric(variable):
                self.once[id(variable)] = variable
            else:
                self.once.pop(id(variable), None)

    def _is_metric(self, variable: Any) -> bool:
        return any(variable is one for one in self._model.metrics_variables)

    def _abstract_arguments(self, types: Any, count: int) -> tuple[Any, ...]:
        def micro(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype)

        numbers = 2 + number_of_terms(self._model)
        fixed, changing = map(values_of, (self._fixed(), self._changing()))
        context = jax.ShapeDtypeStruct((numbers,), weight_dtype())
        start = jax.ShapeDtypeStruct((), jnp.uint32)
        return fixed, changing, context, start, jax.tree.map(micro, types)

    def _fixed(self) -> list[Any]:
        """Return the variables that micro-batches read: weights, and those of optimizers."""
        trainable, _, optimizer, _ = variables_of(self._model)
        return [*trainable, *optimizer]

    def _changing(self) -> list[Any]:
        """Return the variables that micro-batches may change."""
        _, others, _, metrics = variables_of(self._model)
        return [*others, *metrics]

    def _pure(self, fixed: Any, changing: Any, context: Any, start: Any, data: Any) -> Any:
        """Return what is added up, rows that are listed, and values of what may change."""
        variables = self._changing()
        rows = MicrobatchRows(start, batches.sample_count(data), self._places)
        mapping = [*self._fixed(), *variables], [*fixed, *changing]
        with scope_of(*mapping) as current, drawing(rows):
            result = self._compute(context, data)
            values = current()
        self._drawn = rows.drawn
        leaves, self._structure = jax.tree.flatten(result, is_leaf=_is_rows)
        self._is_rows = [_is_rows(leaf) for leaf in leaves]
        added = [leaf for leaf in leaves if not _is_rows(leaf)]
        listed = [leaf.values for leaf in leaves if _is_rows(leaf)]
        return added, listed, values[len(fixed) :]

    def _add(self, program: Callable[..., Any], sums: Any, *arguments: Any) -> Any:
        result, listed, changing = program(*arguments)
        added = [one + other.astype(one.dtype) for one, other in zip(sums, result)]
        return added, listed, changing

    def _start_anew(self, places: list[str | None] | None) -> None:
        self._places = places
        # Methods, not closures of this call: of a lambda there would be a second trace.
        self._program: Any = jax.jit(self._pure_again())
        self._step: Any = jax.jit(functools.partial(self._add, self._program), donate_argnums=0)

    def _pure_again(self) -> Callable[..., Any]:
        """Return `_pure` as a function that nothing has been traced of."""
        return lambda *arguments: self._pure(*arguments)

    def can_run(self, types: Any) -> bool:
        """Say whether `compute` takes data of such types."""
        types = jax.tree.map(batches.type_of, types)
        with contextlib.suppress(Exception):
            count = batches.sample_count(types)
            jax.eval_shape(self._pure, *self._abstract_arguments(types, count))
            return True
        return False

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
        self._drawn: list[Any] = []
        self._effects: set[str] = set()
        self._is_rows: list[bool] = []
        self._structure: Any = None
        self._shapes: Any = None
        self.release()
        self._zeros: Any = None
        self._start_anew(None)

    def clear(self) -> None:
        """Begin a batch."""
        self.release()
        self._samples = 0
        self._first = {id(v): v.value for v in self._changing()}

    def release(self) -> None:
        """Give back the memory of a sum that has been read."""
        self._sums = None
        self._listed: list[list[Any]] = []
        if self._sharded is not None:
            self._sharded.held = None

    def add(self, context: Any, data: Any, size: int | None = None) -> None:
        """Run micro-batches of `size` samples, or one of all of them, and add them up."""
        count = batches.checked_count(data) if size else batches.sample_count(data)
        size = min(size or count, count)
        fixed = values_of(self._fixed())
        # As long as it was traced: without counts there are no denominators in it.
        missing = 2 + number_of_terms(self._model) - context.shape[0]
        context = jnp.pad(context, (0, max(missing, 0)))
        cuts = ((start, min(size, count - start)) for start in range(0, count, size))
        if self._sharded is not None:
            cuts = self._sharded.shards.cuts(count, size)
        for start, number in cuts:
            part = batches.rows(data, start, number)
            if self._shards is not None:  # and the compiler reduces
                part = self._shards.placed(part)
            self._run(fixed, context, self._samples + start, part)
        self._samples += count

    # For the few samples that are compared whole and cut.

    @property
    def is_any_size(self) -> bool:
        """Whether micro-batches may have any number of samples, as far as is declared."""
        inputs = getattr(self._model, "inputs", None) or ()
        return all(one.shape[:1] in ((), (None,)) for one in inputs)

    @property
    def draws_by_sample(self) -> bool:
        """Whether each sample has random numbers of its own, by its place in the batch."""
        return any(self._drawn if self._places is None else self._places)

    def assigned(self) -> list[Any]:
        """Return the variables that a micro-batch may change, metrics left out."""
        return [one for one in self._changing() if not self._is_metric(one)]

    def effects(self) -> set[str]:
        """Return what a micro-batch does outside of its program."""
        return self._effects

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Return a block in which micro-batches are tried, and programs are not kept.

        They read the switch of batch normalisation when they are traced.
        """
        before = self._step, self._sharded, self._shards

        def try_samples(*arguments: Any) -> Any:
            return self._add(self._pure, *arguments)

        self._step = jax.jit(try_samples, donate_argnums=0, compiler_options=quickly())
        self._sharded = self._shards = None  # a few samples are not worth sharing
        try:
            yield
        finally:
            self._step, self._sharded, self._shards = before

    def run_eagerly(self, context: Any, data: Any, start: int) -> Any:
        """Return what `compute` does for one micro-batch, run by Python, to be looked at."""
        variables = [*self._fixed(), *self._changing()]
        rows = MicrobatchRows(jnp.uint32(start), batches.sample_count(data), self._places)
        with scope_of(variables, values_of(variables)), drawing(rows):
            return self._compute(context, data)

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
            self._sums, listed, values = self._step(sums, *arguments)
        self._listed.append(listed)
        assign(variables, values)

    def _add_eagerly(self, arguments: tuple[Any, ...]) -> None:
        result, listed, values = self._pure(*arguments)
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
        """Return the sum so far, in the structure that `compute` returns."""
        return self._reduced(lambda sums: sums)

    def so_far(self) -> Any:
        """Return the sum so far of what is logged; gradients stay on their devices."""
        return self._reduced(lambda sums: sums._replace(gradients=[]))

    def _reduced(self, select: Callable[[Any], Any]) -> Any:
        """Return what `select` leaves of the sum so far, over all devices."""
        sharded = self._sharded
        if sharded is None or sharded.held is None:
            return select(self._totals(self._sums or ()))
        sums, metrics = sharded.held
        sums, metrics = sharded.reduce((select(self._totals(sums)), metrics))
        assign(sharded.apart(self._changing())[0], metrics)
        return sums

    def _totals(self, sums: Iterable[Any]) -> Any:
        """Return sums, and rows that are listed, in the structure that `compute` returns."""
        sums = iter(sums)
        listed = (Rows(jnp.concatenate(parts)) for parts in zip(*self._listed))
        leaves = [next(listed, None) if rows else next(sums) for rows in self._is_rows]
        return jax.tree.unflatten(self._structure, leaves)


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, Rows)
