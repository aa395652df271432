"""The phases of a batch, each a graph unless the model runs eagerly.

`begin` copies what a batch changes; `add` runs micro-batches and adds them up, replica by
replica; `finish` makes one reduction and one update. A batch that is there as a whole goes
through all of them in one graph, `train_batch`.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

from bigbatch.engine.loss_terms import SharedDimensions
from bigbatch.engine.microbatch import CountsNeededError
from bigbatch.engine.phase_state import NOT_COUNTED, PhaseState
from bigbatch.engine.totals import ReplicaTotals
from bigbatch.errors import ContextError


class Phases(PhaseState):
    """What a batch goes through."""

    def prepare(
        self, data: Any, lengths: SharedDimensions, size: int | None, *, is_open: bool = False
    ) -> bool:
        """Get ready for data, or types of data: trace a micro-batch, once for each structure.

        Args:
            data: a batch, or its types.
            lengths: what the micro-batches of a batch have in common.
            size: samples per micro-batch, for a model that must know them.
            is_open: whether micro-batches of this batch have run already.

        Returns:
            Whether such data is new.
        """
        backend, model = self._backend, self._model
        is_same = data is self._last and self._is_ready
        if is_same or (is_open and not backend.is_traced(model)):
            return False  # eagerly there is nothing to trace, and copies have been taken
        self._last, data = data, backend.data.without_optionals(data)
        types = self._ops.flatten(backend.data.types_of_any_count(data))
        if self._is_ready and any(backend.data.includes(one, types) for one in self._known):
            return False
        if not any(backend.data.includes(one, types) for one in self._known):
            self._known.append(types)
        if not is_open:
            self._passes.numbers.keep()  # a trace runs Python code, which begins with them
        is_first = self.rollback is None
        is_built = backend.build(model, data)
        first, self._known_size = self._passes.all_updates.microbatch, size
        first.lengths = lengths
        first.prepare()
        before = self._shape_of_graphs()
        if self.full_batch_loss is None:
            self._types = types = self._ops.map_structure(backend.data.type_of, data)
            runs = self._passes.all_updates.runs
            runs.prepare(types, size)
            if not is_built and is_first and first.makes_room():
                runs.forget()  # only now there are variables to make room for
                runs.prepare(types, size)
            self._passes.prepare(types, size)
            self.needs_counts |= self._must_count(
                data, is_whole=lengths is SharedDimensions.SAME, is_built=is_built
            )
            self._needed_counts = self.needs_counts
            if self.needs_counts:
                self._prepare_counts(types, size)
        # What only training can build is built in its first trace, and protected from then on.
        is_traced = self.full_batch_loss is None and backend.is_traced(model)
        self._is_ready = is_built or is_traced or not is_first
        if not self._is_ready or is_first or before != self._shape_of_graphs():
            self._compile()
        return True

    def _prepare_counts(self, types: Any, size: Any) -> None:
        try:
            self._counts.prepare(types, size)
        except Exception as error:
            if not self._backend.has_custom_train_step(self._model):
                raise
            raise ContextError(NOT_COUNTED) from error

    def trace_again(self) -> None:
        """Trace micro-batches once more, as the plan of the loss has changed."""
        self._passes.trace_again(self._types, self._known_size)
        self.needs_counts = self._needed_counts
        self._count_for_draws()
        self._compile()

    def train_next(self, iterator: Any, count: Any, size: Any) -> dict[str, Any]:
        """Make one update from each of the next batches; return the logs of the last."""
        if isinstance(count, int) and count == 1:
            return self.train_batch(self._backend.data.next_of(iterator), size)

        def train(data: Any) -> dict[str, Any]:
            return self.train_batch(data, size)

        return self._backend.data.on_next(iterator, train, count)[1]

    def train_batch(self, data: Any, size: Any) -> dict[str, Any]:
        """Make one update from a batch that is all there; return the logs."""
        try:
            return self._train_batch(data, size)
        except CountsNeededError:
            self.begin_to_count(data)
            return self._train_batch(data, size)

    def _train_batch(self, data: Any, size: Any) -> dict[str, Any]:
        backend, model = self._backend, self._model
        data = backend.data.without_optionals(data)
        self.learn(data, size)
        self._passes.numbers.keep()
        with self.rollback.taken():
            backend.on_replicas(model, self._open)
            if self.needs_counts:
                Phases.count(self, data, size)
                Phases.use_counts(self)
            Phases.add(self, data, size, self._ops.ones())
        logs = Phases.finish(self, is_whole=True)
        for number in range(1, len(self.passes)):
            Phases.begin_again(self, number)
            Phases.add(self, data, size, self._ops.ones(), number)
            logs = Phases.finish(self, is_whole=True, number=number)
        if self.settles:
            Phases.settle(self, data, size)
        return logs

    def train_by_phases(self, data: Any, size: Any, *, is_known: bool) -> dict[str, Any]:
        """Do what `train_batch` does, phase by phase.

        `is_known` says whether every batch has the same number of samples.
        """
        self.begin()
        if self.needs_counts:
            self.count(data, size)
            self.use_counts()
        self.add(data, size, self._ops.ones())
        logs = self.finish(is_whole=True, is_known=is_known)
        for number in range(1, len(self.passes)):
            self.begin_again(number)
            self.add(data, size, self._ops.ones(), number)
            logs = self.finish(is_whole=True, number=number, is_known=is_known)
        if self.settles:
            self.settle(data, size)
        return logs

    def _run_full_batch(self, data: Any, size: Any) -> Any:
        assert self.full_batch_loss is not None
        is_known = isinstance(self._backend.data.sample_count(data), int)
        must_know = is_known and not self.two_passes_fit_any_size
        return self.full_batch_loss.local(data, (must_know and self._known_size) or size)

    def trace_two_passes(self, types: Any) -> None:
        """Trace two passes for batches of any number of samples, or if need be of the known."""
        if self._backend.runs_in_python(self._model):
            return
        backend, functions = self._backend, self._backend.data
        trace, size = self.run_two_passes.get_concrete_function, functions.INTEGER
        graph = None
        if self.two_passes_fit_any_size:
            try:
                graph = trace(functions.types_of_any_count(types), size)
            except Exception:  # which training raises, too, unless the number is known
                self.two_passes_fit_any_size = False
        if graph is None and functions.has_known_count(types):
            graph = trace(types, size)
        if graph is not None:
            self.effects_of_two_passes = backend.effects_of(graph)
            backend.build_optimizers(self._model, self.microbatch.captured)

    def train_by_two_passes(self, data: Any, size: Any) -> dict[str, Any]:
        """Make one update from a batch, with a loss that is computed on all of it."""
        self.learn(data, size)
        return self.finish_two_passes(self.run_two_passes(data, size))

    def run_two_passes(self, data: Any, size: Any) -> Any:
        """Return what two passes over a batch give, summed over replicas."""
        self._passes.numbers.keep()
        with self.rollback.taken():
            return self._backend.reduce(self._model, self._run_full_batch, data, size)

    def finish_two_passes(self, totals: Any) -> dict[str, Any]:
        """Make the update of two passes; return the logs."""
        with self.rollback.final(self._ops.flatten(totals)):
            return self._updated(self.full_batch_loss, totals)

    def look_at_two_passes(
        self, data: Any, size: Any
    ) -> tuple[list[list[Any]], dict[str, Any]]:
        """Return the gradients that the optimizer would get from two passes, and the logs."""
        totals = self.run_two_passes(data, size)
        self._backend.on_replicas(self._model, self.microbatch.close)
        (captured,) = self.microbatch.captured
        gradients = map(self._ops.as_gradient_of, captured.variables, totals.gradients)
        return [list(gradients)], totals.logs

    def begin(self) -> None:
        """Begin a batch."""
        self._passes.numbers.keep()
        with self.rollback.taken():
            self._backend.on_replicas(self._model, self._open)

    def begin_again(self, number: int) -> None:
        """Begin another pass over the micro-batches of the batch."""
        self.rollback.begin_again()
        open_pass = functools.partial(self._open_pass, number)
        self._backend.on_replicas(self._model, open_pass)

    def _open_pass(self, number: int) -> None:
        self.passes[number].microbatch.open()
        self.passes[number].runs.clear()

    def _open(self) -> None:
        self._open_pass(0)
        if self.needs_counts:
            self._counts.clear()
        self.context.assign(self._ops.stack([0, 0]))

    def count(self, data: Any, size: Any) -> None:
        """Count micro-batches of `size` samples, or one of all of them."""
        add = functools.partial(self._counts.add, self._ops.stack([0, 0]))
        self._backend.on_replicas(self._model, add, data, size)

    def use_counts(self) -> None:
        """Let the micro-batches that run from now on know what was counted."""

        def local() -> None:
            samples, *denominators = counts = self._counts.value()
            nominal = self._nominal(samples)
            if self._replicas > 1:
                samples, *denominators = self._backend.sum_over_replicas(counts)
            self.context.assign(self._ops.stack([nominal, samples, *denominators]))

        self._backend.on_replicas(self._model, local)

    def _nominal(self, samples: Any) -> Any:
        """Return what gradients are divided by, given the samples of this replica."""
        return self._ops.maximum(samples, 1) * self._replicas

    def _about(self, samples: Any) -> Any:
        """Return about how many samples such a part of a batch has, over all processes.

        All are to divide by the same number, whatever their part has.
        """
        processes = self._backend.processes(self._model)
        if processes == 1:
            return samples
        if self._samples_of_all is None:
            largest = self._backend.largest_of_all(self._model, int(samples))
            self._samples_of_all = largest * processes
        return self._samples_of_all

    def add_next(self, iterator: Any, count: Any, length: Any) -> Any:
        """Run the next batches as micro-batches; return how many there were."""

        def add(data: Any) -> Any:
            return self.add(self._backend.data.without_optionals(data), None, length)

        return self._backend.data.on_next(iterator, add, count, result=self._ops.ones())[0]

    def train_window(self, iterator: Any, count: Any, length: Any) -> tuple[Any, Any]:
        """Make one update from the next batches; return how many there were, and the logs."""
        Phases.begin(self)
        done = Phases.add_next(self, iterator, count, length)
        return done, Phases.finish(self, is_whole=False)

    def add(self, data: Any, size: Any, length: Any, number: int = 0) -> Any:
        """Run micro-batches of `size` samples, or one of all of them, and add them up.

        `length` is about how many such calls a batch has, `number` that of the pass.
        """
        ops = self._ops

        self.microbatch.plan.is_counted &= self.needs_counts

        def local(data: Any, size: Any, length: Any) -> None:
            count = self._backend.data.sample_count(data)
            self._is_known = isinstance(count, int)
            context = self.context.read_value()
            if not self.needs_counts:
                samples = ops.maximum(ops.weight(self._about(count)), 1) * length
                is_new = context[0] == 0  # the first micro-batch tells how large the others are
                nominal = ops.where(is_new, self._nominal(samples), context[0])
                context = ops.stack([nominal, samples])
                self.context.assign(context)
            self.passes[number].runs.add(context, data, size)

        self._backend.on_replicas(self._model, local, data, size, length)
        return self._ops.ones()  # there when this is done

    def logs_so_far(self) -> dict[str, Any]:
        """Return the logs of the replicas in this process: nothing is communicated yet."""
        ops = self._ops

        def logs() -> tuple[Any, Any]:
            totals = self._backend.totals_so_far(self.passes[-1].runs)
            return self._so_far(totals.logs, totals.samples), totals.samples

        replicas = self._backend.on_replicas(self._model, logs)
        results = self._backend.local_results(self._model, replicas)
        add = functools.partial(functools.reduce, ops.added)
        values, samples = ops.map_structure(lambda *parts: add(parts), *results)
        return self._divided(values, samples)

    def finish(
        self, *, is_whole: bool, number: int = 0, is_known: bool | None = None
    ) -> dict[str, Any]:
        """Make the updates of a pass; return the logs, if it is the last.

        Args:
            is_whole: whether the batch was all there when its micro-batches ran.
            number: which pass it is.
            is_known: whether its samples were known when it was traced, if that is certain.
        """
        this = self.passes[number]
        totals = self._totals(this, is_whole, is_known)
        is_last = this is self.passes[-1]
        final = self.rollback.final(self._ops.flatten(totals)) if is_last else nullcontext()
        with final:
            logs = self._updated(this.update, totals)
        self.release(number)
        return logs

    def look(
        self, *, is_whole: bool, number: int = 0
    ) -> tuple[list[list[Any]], dict[str, Any]]:
        """Return the gradients that optimizers would get in a pass, and the logs."""
        this = self.passes[number]
        return this.update.looked_at(self._totals(this, is_whole, None))

    def _totals(self, this: Any, is_whole: bool, is_known: bool | None) -> ReplicaTotals:
        """Return the sums of all replicas in a pass."""
        backend, model = self._backend, self._model
        if is_known is None:
            is_known = self._is_known if is_whole else backend.runs_in_python(model)

        def local() -> ReplicaTotals:
            return this.update.local(
                this.runs.value(),
                self.context.read_value()[0],
                # Of one batch in one graph the samples are known before micro-batches run.
                is_nominal=is_whole and not self._backend.shares_batches(model),
                is_known=bool(is_known),
            )

        return self._backend.reduce(model, local)

    def _updated(self, update: Any, totals: Any) -> dict[str, Any]:
        """Make an update from what `reduce` returned; return the logs."""
        if id(update) not in self._updates:
            statistics = self.microbatch.statistics
            others = statistics.variables if statistics else []
            make = self._backend.update_function
            self._updates[id(update)] = make(
                self._model, update.apply, others, overwrites=not self.runs_again
            )
        return self._updates[id(update)](totals)

    def settle(self, data: Any, size: Any) -> None:
        """Make assignments that are the same for all samples, after the updates before them.

        Any micro-batch will do: here it is the first.
        """
        assert self._passes.settling is not None
        runs = self._passes.settling.runs

        def local(data: Any, size: Any) -> None:
            runs.change_once(self.context.read_value(), data, size)

        self._backend.on_replicas(self._model, local, data, size)

    def release(self, number: int = 0) -> None:
        """Give back the memory of the sums."""
        self._backend.on_replicas(self._model, self.passes[number].runs.release)
        self._backend.on_replicas(self._model, self.passes[number].microbatch.close)
