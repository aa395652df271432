"""What runs the passes over the micro-batches of a batch; see `bigbatch.core.passes`."""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple

from bigbatch.backends.keras import backend_of, layers_of, metrics_of
from bigbatch.core.exact import Storage, exact_choice
from bigbatch.core.memory import readable
from bigbatch.core.passes import ALL_UPDATES, Pass, Plan, plan_of
from bigbatch.core.patching import contents_kept
from bigbatch.core.sparse_gradients import SparseGradients, Table
from bigbatch.engine.captured import CapturedGradients
from bigbatch.engine.loss_plan import LossPlan
from bigbatch.engine.loss_terms import SharedDimensions
from bigbatch.engine.microbatch import MicroBatch
from bigbatch.engine.python_numbers import PythonNumbers
from bigbatch.engine.update import Update
from bigbatch.errors import ContextError, explain

_CONTEXT = 64
"""More numbers than what is known of a batch has, to try a micro-batch with."""
_SAID = "passes over each batch: updates of train_step depend on those before them"
_OTHER_UPDATES = explain(
    received="a train_step that makes different updates for data of a different structure",
    expected="the same calls of optimizer.apply, in the same order, for all data",
    fix="call accumulate once more before training on other data",
)


class PassRun(NamedTuple):
    """What runs all micro-batches of a batch once."""

    microbatch: MicroBatch
    runs: Any
    """Adds them up: see `Accumulation`."""
    update: Update


class Passes:
    """The passes of a model, which are known when a micro-batch has been traced.

    Args:
        model: a compiled Keras model.
        batch_norm: as for `accumulate`.
        sparse: how sparse gradients are kept.
        say: called with what users may want to know.
    """

    def __init__(
        self,
        model: Any,
        batch_norm: Any,
        sparse: SparseGradients,
        say: Callable[[str], None],
    ) -> None:
        self._model, self._batch_norm, self._say = model, batch_norm, say
        self._sparse = sparse
        exact = exact_choice(batch_norm)
        self.storage = None if exact is None else Storage(exact)
        """What is stored between stages, if micro-batches run in stages."""
        self._backend = backend_of(model)
        self._made: dict[int, Any] = {}
        self._plan: Plan | None = None
        self._said: list[str] = []
        self.numbers = PythonNumbers(model)
        """The numbers that Python code counts with, as a batch begins with them."""
        self.all_updates = self._pass(ALL_UPDATES)
        """What captures all updates, which shows what they depend on."""
        self.each = [self.all_updates]
        """One after the other."""
        self.settling: PassRun | None = None
        """What assigns, after the last update, what is the same for all samples."""
        self.rollback: Any = None
        """The copies of what a batch changes."""

    def before(self, variable: Any) -> Any:
        """Return the value that a variable of one replica had before the batch."""
        return self.rollback.before(variable)

    def _pass(self, part: Pass, plan: LossPlan | None = None) -> PassRun:
        model = self._model
        microbatch = MicroBatch(model, self._batch_norm, part, self._made, plan, self._sparse)
        microbatch.numbers = self.numbers
        if plan is not None:  # the check of `fit` lets batch normalisation stand still in all
            microbatch.norm.switch = self.all_updates.microbatch.norm.switch
        choice = {"exact": self.storage} if self.storage else {}
        kept = microbatch.kept
        runs = self._backend.accumulation(
            model, microbatch.run, kept, self.before, made=microbatch.results, **choice
        )
        return PassRun(microbatch, runs, Update(model, microbatch))

    @property
    def runs_again(self) -> bool:
        """Whether micro-batches run more than once."""
        return self._plan is not None and self._plan.runs_again

    @property
    def is_known(self) -> bool:
        """Whether the passes are known, or sure to be when a micro-batch has been traced."""
        is_custom = self._backend.has_custom_train_step(self._model)
        is_shown = self._backend.is_traced(self._model) or not is_custom
        return self._plan is not None or is_shown or not self._backend.TELLS_ORDER

    @property
    def shape_of_graphs(self) -> tuple[Any, ...]:
        """What the graphs that run them depend on, beside the data."""
        runs = [one.runs for one in (self.all_updates, *self._others())]
        return tuple((len(one.once), len(one.changed)) for one in runs)

    def _others(self) -> list[PassRun]:
        settling = [] if self.settling is None else [self.settling]
        return [one for one in (*self.each, *settling) if one is not self.all_updates]

    def prepare(self, types: Any, size: int | None) -> None:
        """Trace what runs in the passes, when `all_updates` has been traced.

        Args:
            types: the types of a batch.
            size: samples per micro-batch, for a model that must know them.
        """
        microbatch, runs = self.all_updates.microbatch, self.all_updates.runs
        microbatch.order = self._backend.order_of_trace(runs) or microbatch.order
        self._make(microbatch.lengths)
        for one in self._others():
            one.runs.prepare(types, size)
        self.say_remarks()

    def say_remarks(self) -> None:
        """Say what there is to know of how micro-batches run, once."""
        remarks = self._backend.remarks(self.all_updates.runs)
        self.say_each([*remarks, *map(self._of_rows, self._sparse.larger_than_sums)])

    def say_each(self, remarks: list[str]) -> None:
        """Say what has not been said before."""
        for remark in remarks:
            if remark not in self._said:
                self._said.append(remark)
                self._say(remark)

    def _of_rows(self, table: Table) -> str:
        """Say that the rows of a table take more memory than their dense sum would."""
        rows = self._sparse.rows_of(table)
        return (
            f"bigbatch: the rows of {table.name} take {readable(rows * table.row_bytes)} until "
            f"the update, their dense sum {readable(table.rows * table.row_bytes)}: "
            'sparse_gradients="dense" takes less memory'
            + ("" if table.adds_up else f", and gives another update with {table.optimizer}")
        )

    def trace_again(self, types: Any, size: int | None) -> None:
        """Trace once more what has been traced, as a micro-batch is to do something else."""
        for one in (self.all_updates, *self._others()):
            one.runs.forget()
            one.runs.prepare(types, size)

    def make_rollback(self) -> None:
        """Copy from now on what all passes change."""
        if self.runs_again:
            for one in (self.all_updates, *self._others()):
                self.rollback.include(one.runs.changed.values())
        else:
            once = self.all_updates.runs.once.values()
            self.rollback = self._backend.rollback(self._model, once)

    def learn(self, data: Any, size: Any) -> None:
        """Find out, if a model runs eagerly, which passes a batch takes: try a micro-batch."""
        backend, model, first = self._backend, self._model, self.all_updates.microbatch
        if self.is_known:
            return

        def local(data: Any) -> None:
            count = backend.data.sample_count(data)
            part = data if size is None else backend.data.first_rows(data, count=size)
            if count:
                first.plan.is_counted = True  # any numbers will do
                run = functools.partial(first.run, backend.ops.stack([1] * _CONTEXT))
                of_step = backend.try_step(model, run, part, put_back)
                # A trace tells more of the order, if there can be one.
                told.append(of_step or self.all_updates.runs.look_at(part))

        told: list[Any] = []
        variables = [backend.native(one) for one in model.variables]
        variables += [*map(backend.native, backend.metrics_variables(model))]
        variables += backend.state_of(model)
        known = set(map(id, variables))
        local_results = functools.partial(backend.local_results, model)
        parts = [part for variable in variables for part in local_results(variable)]
        self.numbers.keep()
        kept = contents_kept((model, *layers_of(model)))
        with kept, backend.unchanged(parts) as put_back:
            backend.on_replicas(model, local, data)
        self.numbers.put_back()
        for metric in metrics_of(model):  # which the trial may have built
            if not {id(backend.native(one)) for one in metric.variables} <= known:
                metric.reset_state()
        self._make(first.lengths)
        for one in (self.all_updates, *self._others()):
            for what in told:
                one.runs.learn(what)
        self.say_remarks()
        self.rollback.include(
            variables if self.runs_again else self.all_updates.runs.once.values()
        )

    def _make(self, lengths: SharedDimensions) -> None:
        """Make what runs the passes, if the updates of `train_step` are known."""
        first = self.all_updates.microbatch
        if first.order is None:
            return
        plan = plan_of(first.order)
        if self._plan not in (None, plan):
            raise ContextError(_OTHER_UPDATES)
        if self._plan is None and plan.runs_again:
            self._make_room(first.captured, first.order.changed)
            if len(plan.passes) > 1:
                self.each = [self._pass(part, first.plan) for part in plan.passes]
                self._say(f"bigbatch: {len(plan.passes)} {_SAID}")
            if plan.settles:
                count = len(first.captured)
                self.settling = self._pass(Pass(count, count, gives_logs=False), first.plan)
            for one in self._others():
                one.microbatch.prepare()
        self._plan = plan
        for one in self._others():
            one.microbatch.lengths = lengths

    def _make_room(self, captured: list[CapturedGradients], changed: Any) -> None:
        """Make room for weights before the batch, and for the results of updates."""
        backend, model = self._backend, self._model
        backend.build_optimizers(model, captured)
        weights = {}
        for one in captured:
            variables = [*one.variables, *backend.optimizer_variables(one.optimizer)]
            weights.update((id(variable), variable) for variable in variables)
        self.rollback = backend.rollback(model, (), weights.values())
        for number, variables in enumerate(changed):
            self._made[number] = backend.update_results(model, variables, self.before)
