"""The phases of a batch, each a graph unless the model runs eagerly.

`begin` copies what a batch changes; `add` runs micro-batches and adds them up, replica by
replica; `finish` makes one reduction and one update. A batch that is there as a whole goes
through all of them in one graph, `train_batch`.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any, Callable

from bigbatch.backends.keras import backend_of
from bigbatch.engine.full_batch_loss import FullBatchLoss, check_two_passes
from bigbatch.engine.loss_terms import Lengths
from bigbatch.engine.microbatch import MicroBatch
from bigbatch.engine.passes import Passes, PassRun
from bigbatch.engine.totals import ReplicaTotals

_GRAPHS = (
    "train_batch",
    "train_next",
    "begin",
    "begin_again",
    "count",
    "use_counts",
    "add",
    "add_next",
    "train_window",
    "logs_so_far",
    "finish",
    "settle",
)


class Phases:
    """What a batch goes through.

    Args:
        model: a compiled Keras model.
        batch_norm: as for `accumulate`.
        coupled: whether the loss is that of the whole batch, by two passes.
        say: called with what users may want to know.
    """

    def __init__(
        self,
        model: Any,
        *,
        batch_norm: str,
        coupled: bool,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._backend = backend = backend_of(model)
        self._ops = backend.ops
        self._replicas = backend.replicas(model)
        self._passes = Passes(model, batch_norm, say)
        self.full_batch_loss: FullBatchLoss | None = None
        """What computes the loss of the whole batch, if it is `coupled`."""
        if coupled:
            check_two_passes(model, batch_norm)
            self.use_full_batch_loss()
        first = self._passes.all_updates.microbatch
        before = self._passes.before
        self._counts = backend.accumulation(model, first.count, first.kept, before)
        self._context = backend.replica_vector(model)
        self._updates: dict[int, Any] = {}
        self._is_known = False
        self._is_ready = False
        self._last: Any = None
        self._known_size: int | None = None
        self._known: list[list[Any]] = []
        self.needs_counts = False
        """Whether all micro-batches are counted before one can run; known when prepared."""

    def use_full_batch_loss(self) -> None:
        """Compute the loss on whole batches, by two passes; called before the first of them."""
        self.full_batch_loss = FullBatchLoss(self._model, self.microbatch)

    @property
    def microbatch(self) -> MicroBatch:
        """What runs micro-batches in the last pass, which gives the logs."""
        return self.passes[-1].microbatch

    @property
    def passes(self) -> list[PassRun]:
        """What runs all micro-batches of a batch, one after the other; known when prepared."""
        return self._passes.each

    @property
    def runs_again(self) -> bool:
        """Whether micro-batches run more than once; known when prepared."""
        return self._passes.runs_again

    @property
    def settles(self) -> bool:
        """Whether `settle` comes after the last update; known when prepared."""
        return self._passes.settling is not None

    @property
    def is_planned(self) -> bool:
        """Whether it is known, when prepared, which passes a batch takes."""
        return self.full_batch_loss is not None or self._passes.is_known

    @property
    def rollback(self) -> Any:
        """The copies of what a batch changes; there when this is prepared."""
        return self._passes.rollback

    @property
    def buffer_bytes(self) -> int:
        """The bytes in which gradients are added up, once a micro-batch has been traced."""
        return max(one.microbatch.buffer_bytes for one in self.passes)

    def prepare(self, data: Any, lengths: Lengths, size: int | None) -> bool:
        """Get ready for data, or types of data: trace a micro-batch, once for each structure.

        Args:
            data: a batch, or its types.
            lengths: what the micro-batches of a batch have in common.
            size: samples per micro-batch, for a model that must know them.

        Returns:
            Whether such data is new.
        """
        if data is self._last and self._is_ready:
            return False
        backend, model = self._backend, self._model
        self._last, data = data, backend.data.without_optionals(data)
        types = self._ops.flatten(backend.data.types_of_any_count(data))
        if self._is_ready and any(backend.data.includes(one, types) for one in self._known):
            return False
        self._known.append(types)
        is_first = self.rollback is None
        is_built = backend.build(model, data)
        first, self._known_size = self._passes.all_updates.microbatch, size
        first.lengths = lengths
        first.prepare()
        before = self._shape_of_graphs()
        if self.full_batch_loss is None:
            types = self._ops.map_structure(backend.data.type_of, data)
            self._passes.prepare(types, size, may_grow=not is_built and is_first)
            self.needs_counts |= self._must_count(data, is_whole=lengths is Lengths.SAME)
            if self.needs_counts:
                self._counts.prepare(types, size)
        # What only training can build is built in its first trace, and protected from then on.
        is_traced = self.full_batch_loss is None and backend.is_traced(model)
        self._is_ready = is_built or is_traced or not is_first
        if not self._is_ready or is_first or before != self._shape_of_graphs():
            self._compile()
        return True

    def _shape_of_graphs(self) -> tuple[Any, ...]:
        """Return what the graphs of the phases depend on, beside the data."""
        return self.needs_counts, self._passes.shape_of_graphs, self.buffer_bytes

    def _compile(self) -> None:
        """Make graphs of the phases, for what is known of a micro-batch now."""
        self._passes.make_rollback()
        self._updates = {}
        for name in _GRAPHS:
            method = getattr(type(self), name).__get__(self)
            setattr(self, name, self._backend.compiled(self._model, method))

    def learn(self, data: Any, size: Any) -> None:
        """Find out, if a model runs eagerly, which passes a batch takes."""
        if not self.is_planned:
            self._passes.learn(data, size)

    def _must_count(self, data: Any, *, is_whole: bool) -> bool:
        """Say whether the terms of the loss need numbers of the whole batch first."""
        backend, model, plan = self._backend, self._model, self.microbatch.plan
        if backend.is_traced(model):
            is_known = is_whole and self._replicas == 1
            return plan.needs_denominators or (plan.needs_samples and not is_known)
        # Without a graph nothing is known before it happens.
        if backend.compile_loss_of(model) is None:
            return False
        if not backend.has_custom_train_step(model):
            return True
        return self._counts.can_run(data)  # a custom step may do anything with its data

    def knows_bytes(self, data: Any, size: int) -> bool:
        """Note what micro-batches of `size` samples take, if that needs no run of them."""
        if self.full_batch_loss is not None:
            return False
        return self._backend.knows_bytes(self.passes[0].runs, data, size)

    def train_next(self, iterator: Any, count: Any, size: Any) -> dict[str, Any]:
        """Make one update from each of the next batches; return the logs of the last."""
        if isinstance(count, int) and count == 1:
            return self.train_batch(self._backend.data.next_of(iterator), size)

        def train(data: Any) -> dict[str, Any]:
            return self.train_batch(data, size)

        return self._backend.data.on_next(iterator, train, count)[1]

    def train_batch(self, data: Any, size: Any) -> dict[str, Any]:
        """Make one update from a batch that is all there; return the logs."""
        backend, model, full = self._backend, self._model, self.full_batch_loss
        data = backend.data.without_optionals(data)
        self.learn(data, size)
        if full is not None:
            with self.rollback.taken():
                totals = backend.reduce(model, self._run_full_batch, data, size)
            with self.rollback.final(self._ops.flatten(totals)):
                return self._updated(full, totals)
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

    def _run_full_batch(self, data: Any, size: Any) -> Any:
        assert self.full_batch_loss is not None
        is_known = isinstance(self._backend.data.sample_count(data), int)
        return self.full_batch_loss.local(data, (is_known and self._known_size) or size)

    def begin(self) -> None:
        """Begin a batch."""
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
        self._context.assign(self._ops.stack([0, 0]))

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
            self._context.assign(self._ops.stack([nominal, samples, *denominators]))

        self._backend.on_replicas(self._model, local)

    def _nominal(self, samples: Any) -> Any:
        """Return what gradients are divided by, given the samples of this replica."""
        return self._ops.maximum(samples, 1) * self._replicas

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

        def local(data: Any, size: Any, length: Any) -> None:
            count = self._backend.data.sample_count(data)
            self._is_known = isinstance(count, int)
            context = self._context.read_value()
            if not self.needs_counts:
                samples = ops.maximum(ops.weight(count), 1) * length
                is_new = context[0] == 0  # the first micro-batch tells how large the others are
                nominal = ops.where(is_new, self._nominal(samples), context[0])
                context = ops.stack([nominal, samples])
                self._context.assign(context)
            self.passes[number].runs.add(context, data, size)

        self._backend.on_replicas(self._model, local, data, size, length)
        return self._ops.ones()  # there when this is done

    def logs_so_far(self) -> dict[str, Any]:
        """Return the logs of the replicas in this process: nothing is communicated yet."""
        ops = self._ops

        def logs() -> tuple[Any, Any]:
            totals = self.passes[-1].runs.value()
            return self.microbatch.logs.so_far(totals.logs, totals.samples), totals.samples

        replicas = self._backend.on_replicas(self._model, logs)
        results = self._backend.local_results(self._model, replicas)
        values, samples = ops.map_structure(lambda *parts: sum(parts), *results)
        return {name: ops.divided(value, samples) for name, value in values.items()}

    def finish(self, *, is_whole: bool, number: int = 0) -> dict[str, Any]:
        """Make the updates of a pass; return the logs, if it is the last.

        `is_whole` says whether the batch was all there when its micro-batches ran.
        """
        backend, model, this = self._backend, self._model, self.passes[number]

        def local() -> ReplicaTotals:
            return this.update.local(
                this.runs.value(),
                self._context.read_value()[0],
                # Of one batch in one graph the samples are known before micro-batches run.
                is_nominal=is_whole and self._replicas == 1,
                is_known=self._is_known if is_whole else backend.runs_in_python(model),
            )

        totals = backend.reduce(model, local)
        is_last = this is self.passes[-1]
        final = self.rollback.final(self._ops.flatten(totals)) if is_last else nullcontext()
        with final:
            logs = self._updated(this.update, totals)
        self.release(number)
        return logs

    def _updated(self, update: Any, totals: Any) -> dict[str, Any]:
        """Make an update from what `reduce` returned; return the logs."""
        if id(update) not in self._updates:
            statistics = self.microbatch.statistics
            others = statistics.variables if statistics else []
            make = self._backend.update_function
            self._updates[id(update)] = make(self._model, update.apply, others)
        return self._updates[id(update)](totals)

    def settle(self, data: Any, size: Any) -> None:
        """Make assignments that are the same for all samples, after the updates before them.

        Any micro-batch will do: here it is the first.
        """
        assert self._passes.settling is not None
        runs = self._passes.settling.runs

        def local(data: Any, size: Any) -> None:
            runs.change_once(self._context.read_value(), data, size)

        self._backend.on_replicas(self._model, local, data, size)

    def release(self, number: int = 0) -> None:
        """Give back the memory of the sums."""
        self._backend.on_replicas(self._model, self.passes[number].runs.release)
        self._backend.on_replicas(self._model, self.passes[number].microbatch.close)
