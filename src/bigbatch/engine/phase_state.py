"""What is known of a model before its batches, and between their phases."""

from __future__ import annotations

from typing import Any, Callable

from bigbatch.backends.keras import backend_of
from bigbatch.core.sparse_gradients import SparseGradients
from bigbatch.engine.full_batch_loss import FullBatchLoss, check_two_passes
from bigbatch.engine.loss_plan import Kind
from bigbatch.engine.loss_terms import SharedDimensions
from bigbatch.engine.microbatch import MicroBatch
from bigbatch.engine.passes import Passes, PassRun
from bigbatch.errors import ContextError, explain

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
    "look",
    "finish",
    "settle",
    "run_two_passes",
    "finish_two_passes",
)


NOT_COUNTED = explain(
    received="a train_step whose loss divides by a mask or the sum of sample weights",
    expected="a batch (x, y, sample_weight) that the model can be called with, to count these "
    "before the first micro-batch runs",
    fix="leave run_eagerly=True out, pass x, y and sample_weight to fit(), and call "
    "self.compute_loss(x, y, y_pred, sample_weight) with these",
)


class PhaseState:
    """What the phases of a batch share: passes, counts, copies, and the graphs of the phases.

    Args:
        model: a compiled Keras model.
        batch_norm: as for `accumulate`.
        coupled: whether the loss is that of the whole batch, by two passes.
        sparse: how sparse gradients are kept.
        say: called with what users may want to know.
    """

    def __init__(
        self,
        model: Any,
        *,
        batch_norm: Any,
        coupled: bool,
        sparse: SparseGradients,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._backend = backend = backend_of(model)
        self._ops = backend.ops
        self._replicas = backend.replicas(model)
        self._passes = Passes(model, batch_norm, sparse, say)
        self.sparse = sparse
        """How sparse gradients are kept until the update."""
        self.full_batch_loss: FullBatchLoss | None = None
        """What computes the loss of the whole batch by two passes, if it is `coupled`."""
        storage = self._passes.storage
        self.is_exact = storage is not None
        """Whether micro-batches run in stages, with sums over them all between."""
        if coupled:
            if not self.is_exact:
                check_two_passes(model, batch_norm)
            self.use_full_batch_loss()
        first = self._passes.all_updates.microbatch
        before = self._passes.before
        self._counts = backend.accumulation(
            model, first.count, first.kept, before, **({"exact": storage} if storage else {})
        )
        self.context = backend.replica_vector(model)
        """What micro-batches know of their batch, on each replica: a `BatchContext`."""
        self._updates: dict[int, Any] = {}
        self._is_known = False
        self._samples_of_all: int | None = None
        self._is_ready = False
        self._last: Any = None
        self._known_size: int | None = None
        self._known: list[list[Any]] = []
        self._types: Any = None
        self.two_passes_fit_any_size = True
        """Whether two passes take any number of samples, known when they have been traced."""
        self.effects_of_two_passes: set[str] = set()
        """What they do that cannot be undone; known likewise."""
        self._needed_counts = False
        self.needs_counts = False
        """Whether all micro-batches are counted before one can run; known when prepared."""

    def use_full_batch_loss(self) -> None:
        """Compute the loss on whole batches; called before the first of them.

        By two passes, or of rows that the stages of micro-batches gather.
        """
        if self.is_exact:
            self.microbatch.plan.is_gathered = True
            return
        self.full_batch_loss = FullBatchLoss(
            self._model, self.microbatch, self._passes.say_each
        )

    @property
    def needs_whole_batch(self) -> bool:
        """Whether all micro-batches of a batch must be there before one can run."""
        return self.is_exact or self.full_batch_loss is not None

    @property
    def microbatch(self) -> MicroBatch:
        """What runs micro-batches in the last pass, which gives the logs."""
        return self.passes[-1].microbatch

    @property
    def passes(self) -> list[PassRun]:
        """What runs all micro-batches of a batch, one after the other; known when prepared."""
        return self._passes.each

    @property
    def captured(self) -> list[Any]:
        """The updates of a batch, in order; known when a micro-batch has been traced or run."""
        return self._passes.all_updates.microbatch.captured

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

    @property
    def structures(self) -> int:
        """How many structures of data this is prepared for."""
        return len(self._known)

    def _shape_of_graphs(self) -> tuple[Any, ...]:
        """Return what the graphs of the phases depend on, beside the data."""
        return self.needs_counts, self._passes.shape_of_graphs, self.buffer_bytes

    def _compile(self) -> None:
        """Make graphs of the phases, for what is known of a micro-batch now."""
        self._passes.make_rollback()
        self._updates = {}
        reading, logs = self._backend.reading_function, self.microbatch.logs
        self._so_far = reading(self._model, logs.so_far)
        self._divided = reading(self._model, logs.divided)
        for name in _GRAPHS:
            method = getattr(type(self), name).__get__(self)
            # Stages are many operations, which take long to optimise, and run no faster for it.
            is_optimised = not self.is_exact
            compiled = self._backend.compiled(self._model, method, is_optimised=is_optimised)
            setattr(self, name, compiled)

    def draw_in_blocks(self, is_so: bool) -> bool:
        """Say whether draws of several rows for each sample can be in blocks, or not again.

        The rows of one block are then those of all samples. It takes another trace.
        """
        passes = [self._passes.all_updates, *self.passes]
        can_be = [one.runs.draw_in_blocks(is_so) for one in passes]
        return any(can_be)

    def learn(self, data: Any, size: Any) -> None:
        """Find out, if a model runs eagerly, which passes a batch takes."""
        if not self.is_planned:
            self._passes.learn(data, size)
            self._count_for_draws()

    def store_all(self) -> bool:
        """Store all between stages, which takes the least time; say whether that is open."""
        storage = self._passes.storage
        is_open = storage is not None and storage.take_all()
        if is_open:
            self._store_otherwise()
        return is_open

    def store_less(self) -> bool:
        """Store less between stages from now on; say whether there was less to store."""
        storage = self._passes.storage
        is_less = storage is not None and storage.take_less()
        if is_less:
            self._store_otherwise()
        return is_less

    def _store_otherwise(self) -> None:
        self._compile()
        self._passes.say_remarks()

    def _must_count(self, data: Any, *, is_whole: bool, is_built: bool) -> bool:
        """Say whether the terms of the loss need numbers of the whole batch first."""
        backend, model, plan = self._backend, self._model, self.microbatch.plan
        is_known = is_whole and not backend.shares_batches(model)
        is_for_draws = self._draws_by_total() and not is_known
        if backend.is_traced(model):
            needs_samples = plan.needs_samples and not is_known
            return is_for_draws or plan.needs_denominators or needs_samples
        # Without a graph nothing is known before it happens, but a trial may tell; unless a
        # custom step is the one to build the model.
        is_custom = backend.has_custom_train_step(model)
        plan.is_countable = (is_built or not is_custom) and self._counts.can_run(data)
        if plan.is_countable:
            needs_samples = plan.needs_samples or plan.compute_loss is Kind.SUM
            return is_for_draws or plan.needs_denominators or (needs_samples and not is_known)
        has_targets = backend.unpacked(data)[1] is not None  # or the loss has others
        has_terms = has_targets and backend.compile_loss_of(model) is not None
        return is_for_draws or (has_terms and not is_custom)

    def _draws_by_total(self) -> bool:
        """Say whether random numbers depend on how many samples the batch has."""
        passes = [self._passes.all_updates, *self.passes]
        return any(self._backend.draws_by_total(one.runs) for one in passes)

    def _count_for_draws(self) -> None:
        """Count batches from now on, if random numbers need it, as is known only now."""
        is_whole = self.microbatch.lengths is SharedDimensions.SAME
        if self._draws_by_total() and not is_whole and not self.needs_counts:
            self.needs_counts = True
            self._counts.prepare(self._types, self._known_size)

    def knows_bytes(self, data: Any, size: int) -> bool:
        """Note what micro-batches of `size` samples take, if that needs no run of them."""
        if self.full_batch_loss is not None:
            return False
        return self._backend.knows_bytes(self.passes[0].runs, data, size)

    def begin_to_count(self, data: Any, *, is_open: bool = False) -> None:
        """Count batches from now on; that of `data` has shown that it must be, eagerly.

        `is_open` says whether other micro-batches of its batch have run already.
        """
        self.rollback.restore()
        if is_open or self.microbatch.plan.is_counted or not self._counts.can_run(data):
            raise ContextError(NOT_COUNTED)
        self.needs_counts = True
