"""The model's own `train_step` on one micro-batch, without an update."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable

from bigbatch.backends.keras import Held, backend_of, metrics_of, optimizers_of
from bigbatch.core.passes import ALL_UPDATES, Order, Pass
from bigbatch.core.patching import replaced, suppressed_except
from bigbatch.core.sparse_gradients import SparseGradients
from bigbatch.engine.batch_logs import BatchLogs
from bigbatch.engine.batch_norm import BatchNorm
from bigbatch.engine.captured import CapturedGradients, Capturing
from bigbatch.engine.gathered_loss import loss_of_gathered_rows
from bigbatch.engine.loss_plan import LossPlan
from bigbatch.engine.loss_terms import (
    ONE,
    ONE_PER_REPLICA,
    OWN,
    SAMPLES,
    SharedDimensions,
    TermRecorder,
)
from bigbatch.engine.python_numbers import PythonNumbers
from bigbatch.engine.statistics import statistics_of
from bigbatch.engine.totals import BatchContext, LogTotals, StatisticTotals, Totals
from bigbatch.errors import ContextError, explain

_SEVERAL_UPDATES = explain(
    received="a train_step that applies gradients several times",
    expected="on this backend, one update per batch",
    fix="set KERAS_BACKEND=tensorflow, or add the losses up and apply their gradients once",
)
_ALMOST_NOTHING = 1e-20
"""Nothing beside any number that counts, in float32 too, but not zero."""


class CountsNeededError(Exception):
    """A micro-batch that runs eagerly shows only now that the batch has to be counted first."""


class MicroBatch:
    """Runs micro-batches of a model; the values that it returns add up.

    With n what a micro-batch counts for, its samples as a rule, `run` returns n·value, and for
    gradients n/nominal·∇loss.

    Args:
        model: a Keras model.
        batch_norm: what batch normalisation does; see `BatchNorm`.
        part: which updates of `train_step` have been made, and which give gradients.
        made: the results of updates, by number; those that `part` needs are there when it runs.
        plan: what has to be known of the batch, as far as others have found out.
        sparse: how sparse gradients are kept.
    """

    def __init__(
        self,
        model: Any,
        batch_norm: Any,
        part: Pass = ALL_UPDATES,
        made: dict[int, Any] | None = None,
        plan: LossPlan | None = None,
        sparse: SparseGradients | None = None,
    ) -> None:
        self.model = model
        """The Keras model."""
        self.part = part
        """Which updates of `train_step` have been made, and which give gradients."""
        self.made: dict[int, Any] = {} if made is None else made
        """The results of updates, by number."""
        self.backend = backend_of(model)
        """The backend of the model."""
        self._replicas = self.backend.replicas(model)
        self._sparse = sparse or SparseGradients()
        self.held = Held(model)
        """The optimizers and metrics that its attributes hold."""
        self._capturing = Capturing(model, self.held)
        self.norm = BatchNorm(model, batch_norm)
        self.logs = BatchLogs(model, self.held)
        self.statistics = statistics_of(model)
        self.lengths = SharedDimensions.SAME
        self.plan = plan or LossPlan()
        """What the parts of the loss do; complete when a micro-batch has been traced."""
        self.captured: list[CapturedGradients] = []
        """What each update was given; their variables are known after a trace."""
        self.order: Order | None = None
        """What depends on earlier updates; known when all updates have been traced."""
        self.numbers = PythonNumbers(model)
        """The numbers that Python code counts with, as a batch begins with them."""
        self.weighs_by_term = False
        """Whether micro-batches count for what their only term divides by, not for samples."""
        self.sums: dict[int, Any] = {}
        """Where gradients are added up, by the number of the update."""

    def prepare(self) -> None:
        """Make places to add up gradients in, before anything is traced."""
        apart = self.statistics is not None and self.statistics.with_noise
        first, stop = self.part.first, self.part.stop
        if stop is None:  # as many as there are optimizers, as a rule
            stop = len(optimizers_of(self.model))
        for number in range(first, stop):
            if number not in self.sums:
                sums = self.backend.gradient_sums(self.model, apart=apart)
                if sums is not None:
                    self.sums[number] = sums

    def makes_room(self) -> bool:
        """Make places for variables that tracing has made; say whether there are any."""
        before, self.sums = self.sums, {}
        self.prepare()
        if _places(self.sums) > _places(before):
            return True
        self.sums = before  # which have been traced to be used
        return False

    @property
    def buffer_bytes(self) -> int:
        """The bytes in which gradients are added up, once a micro-batch has been traced."""
        if not self.sums:  # Python adds up what micro-batches return
            return sum(self.backend.data.bytes_of(one.variables) for one in self.captured)
        return sum(one.bytes for sums in self.sums.values() for one in sums.used)

    def kept(self) -> list[Any]:
        """Return the variables that every micro-batch changes: metrics, sums of gradients."""
        metrics = [v for one in metrics_of(self.model) for v in one.variables]
        variables = [self.backend.native(variable) for variable in metrics]
        local = functools.partial(self.backend.local_results, self.model)
        parts = [part for variable in variables for part in local(variable)]
        return [*parts, *self._places()]

    def _places(self) -> list[Any]:
        """Return the variables in which gradients are added up, on each replica."""
        sums = [one.variable for sums in self.sums.values() for one in sums.all]
        return [part for one in sums for part in self.backend.local_results(self.model, one)]

    def run(self, vector: Any, data: Any) -> Totals:
        """Run `train_step` on a micro-batch.

        Args:
            vector: a `BatchContext`, as numbers.
            data: the micro-batch.
        """
        ops, backend, model = self.backend.ops, self.backend, self.model
        self.numbers.put_back()
        context = BatchContext.of(vector)
        samples = ops.weight(backend.data.sample_count(data))
        recorder = TermRecorder(
            backend,
            self.plan,
            functools.partial(self.correction, context, samples),
            self.lengths,
            replicas=self._replicas,
            can_weigh=self._can_weigh,
            is_odd=self.plan.is_odd,
        )

        def weight() -> Any:  # known when the loss is
            return self._loss_weight(recorder, samples) / context.nominal_samples

        def weigh(loss: Any) -> Any:
            return loss if self.norm.is_exact else ops.times(loss, weight())

        seen = _Updates(self, weight, samples / context.nominal_samples)
        with seen.leaving, backend.in_one_graph(model), contextlib.ExitStack() as stack:
            for number in range(self.part.first):
                self.made[number].undo()
            moments = stack.enter_context(self.norm.watching())
            if self.norm.is_exact:  # gradients of several micro-batches meet in its layers
                stack.enter_context(ops.weighted_gradients(weight))
            stack.enter_context(recorder.watching(model))
            if self.plan.is_gathered:
                stack.enter_context(loss_of_gathered_rows(model))
            metrics = stack.enter_context(self.logs.metrics.watching(self.plan))
            stack.enter_context(backend.losses_of_one_replica(model, self._replicas))
            stack.enter_context(backend.metrics_on_replicas(model))
            results = stack.enter_context(self.logs.watching())
            stack.enter_context(self._capturing.gradients(weigh, seen.take))
            for sums in self.sums.values():
                stack.enter_context(sums.adding())
            logs = backend.train_step_of(model)(data)
        self.weighs_by_term = recorder.loss_weight is not None
        self.captured = captured = seen.captured
        totals = Totals(
            gradients=[one.gradients for one in captured],
            samples=samples,
            loss_weight=self._loss_weight(recorder, samples),
            logs=LogTotals({}, [], [], []),
            moments=[],
            statistics=self.statistics and StatisticTotals(ops.ones(), seen.squared_norms),
        )
        if self.part.gives_logs:
            of_logs = self.logs.of_microbatch(
                recorder, results, logs, samples, totals.loss_weight, metrics, self.plan.logs
            )
            totals = totals._replace(logs=of_logs, moments=moments)
        if self.part is ALL_UPDATES:
            values = logs, [one.value for one in recorder.numbers], moments, metrics
            self._learn_order(list(zip(captured, seen.gradients)), values, vector)
        for one in captured:  # which stay here, and must not keep them in memory
            one.gradients = []
        return totals

    def _learn_order(self, given: list[Any], values: Any, vector: Any) -> None:
        """Note which updates depend on those before them, if the backend can tell."""
        backend, places = self.backend, self._places()
        order = backend.order_of_updates(self.model, given, values, places, vector)
        self.order = order or self.order
        is_known = self.order or backend.shows_order_later(self.model, vector)
        if not is_known and len(given) > 1:
            raise ContextError(_SEVERAL_UPDATES)

    def results(self) -> list[Any]:
        """Return the results that micro-batches are given of updates made before."""
        return [self.made[number] for number in range(self.part.first)]

    def keep(self, captured: CapturedGradients, weight: Any = None) -> list[Any]:
        """Weight gradients, and add those up that can be; return all of them, weighted."""
        ops, variables = self.backend.ops, captured.variables
        if captured.number in self.plan.updates:  # of a sum: parts add up as they are
            weight = 1 / weight if captured.is_weighted else None
        elif captured.is_weighted:
            weight = None
        gradients = self.backend.shaped(captured.gradients, variables)
        weighted = [ops.as_gradient_of(v, g, weight) for v, g in zip(variables, gradients)]
        sums = self.sums.get(captured.number)
        summed = self.backend.summed_rows(self._sparse, captured.optimizer, variables, weighted)
        if sums is not None:
            captured.gradients = sums.add(variables, weighted, summed)
        else:
            captured.gradients = [
                ops.dense(gradient) if is_summed else gradient
                for gradient, is_summed in zip(weighted, summed)
            ]
        return weighted

    def summed(self, captured: CapturedGradients, gradients: list[Any]) -> list[Any]:
        """Return the gradients of a batch, given the sum of those that have no place."""
        sums, ops = self.sums.get(captured.number), self.backend.ops
        return [
            ops.added(sums and sums.value(variable), gradient)
            for variable, gradient in zip(captured.variables, gradients)
        ]

    def open(self) -> None:
        """Begin to add up gradients, on this replica; a micro-batch has been traced."""
        self.held.begin()
        for sums in self.sums.values():
            for one in sums.used:
                one.open()

    def close(self) -> None:
        """Give the memory of the sums back, on this replica; who has read them has them."""
        for sums in self.sums.values():
            for one in sums.used:
                one.close()

    def _can_weigh(self) -> bool:
        """Say whether micro-batches may count for the denominator of a term of the loss.

        Then it need not be known before: of several replicas or processes, or where it takes a
        forward pass to count it, as nothing is traced. The loss must be that term and
        regularisers alone, and loss scaling, which needs gradients of the size they have in the
        full batch, off.
        """
        model, backend = self.model, self.backend
        is_traced = backend.is_traced(model)
        return (
            (is_traced if backend.shares_batches(model) else not is_traced)
            and not self.plan.needs_denominators  # which `count` returns: both must agree
            and not self.plan.is_gathered
            and not backend.has_custom_train_step(model)
            and not backend.uses_inputs_after_call(model)
            and backend.number_of_terms(model) == 1
            and not backend.losses_of_layers(model)
            and not backend.scales_loss(model.optimizer)
        )

    def _loss_weight(self, recorder: TermRecorder, samples: Any) -> Any:
        """Return what a micro-batch counts for."""
        if recorder.loss_weight is None:
            return samples
        # If all is masked, the gradients of regularisers are left, and are not lost.
        return self.backend.ops.weight(recorder.loss_weight) + _ALMOST_NOTHING * samples

    def correction(
        self, context: BatchContext, samples: Any, position: int, denominator: Any
    ) -> Any:
        """Return what a term is multiplied by, given its denominator in a micro-batch."""
        if denominator is OWN:
            return None
        replicas = self.backend.divides_by_replicas(self._replicas)
        is_term = position >= 0
        if self.plan.is_gathered and is_term and (denominator is OWN or denominator is ONE):
            return None  # it is that of the whole batch, on every replica
        if denominator is SAMPLES or (self.plan.is_gathered and is_term):
            return None if replicas == 1 else replicas
        self.plan.needs_samples = True
        if denominator is ONE:
            return context.samples / samples  # Keras does not divide sums by the replicas
        if denominator is ONE_PER_REPLICA:
            return context.samples / samples * replicas
        self.plan.needs_denominators = True
        if not self.backend.is_traced(self.model) and not self.plan.is_counted:
            raise CountsNeededError
        divided = self.backend.ops.divided
        # A custom step may compute its loss more than once.
        of_batch = context.denominators[position % self.backend.number_of_terms(self.model)]
        return divided(denominator * context.samples, of_batch * samples) * replicas

    def _note(self, position: int, denominator: Any) -> int:
        """Note what a term needs to know of the batch; correct nothing."""
        del position
        if not (denominator is OWN or denominator is SAMPLES):
            self.plan.needs_samples = True
            is_sum = denominator is ONE or denominator is ONE_PER_REPLICA
            self.plan.needs_denominators |= not is_sum
        return 1

    def count(self, vector: Any, data: Any) -> list[Any]:
        """Return the samples, and what the terms divide by, of one micro-batch.

        Of the forward pass only masks and shapes are computed. `vector` is `None` if this is
        tried to find out what has to be counted.
        """
        backend, model = self.backend, self.model
        samples = backend.ops.weight(backend.data.sample_count(data))
        is_custom, is_traced = backend.has_custom_train_step(model), backend.is_traced(model)
        needs_call = self.plan.needs_denominators or vector is None
        self.plan.is_counted = False
        if not needs_call and (is_custom or (not is_traced and self.plan.is_countable)):
            # Its data may be nothing that can be called, and Python would compute all of it.
            return [samples]
        x, y, sample_weight = backend.unpacked(data)
        # Eagerly this is a guess: in training layers may add losses.
        can_weigh = self._can_weigh if vector is None or is_traced else lambda: False
        recorder = TermRecorder(
            backend, self.plan, self._note, self.lengths, can_weigh=can_weigh
        )
        # The compiled loss alone: a custom compute_loss may change state, and must not twice.
        # Neither must metrics of layers.
        with contextlib.ExitStack() as stack:
            if not needs_call:  # in inference it may return something else, or nothing
                stack.enter_context(suppressed_except(backend.OUT_OF_MEMORY))
            stack.enter_context(backend.without_effects(model))
            for metric in model.metrics:
                stack.enter_context(replaced(metric, update_state=lambda *_, **__: None))
            stack.enter_context(recorder.watching(model))
            y_pred = backend.call(model, x, training=False)
            if backend.compile_loss_of(model) is not None:
                backend.compute_compiled_loss(model, y, y_pred, sample_weight)
            self.plan.is_counted = True
        return [samples, *(samples if isinstance(d, str) else d for d in recorder.denominators)]


class _Updates:
    """The updates that `train_step` asks for; a pass captures some of them.

    Args:
        microbatch: the micro-batch that runs.
        weight: returns what gradients are multiplied by, unless the loss has been.
        share: what gradients would be multiplied by if the loss were a mean over samples.
    """

    def __init__(self, microbatch: MicroBatch, weight: Callable[[], Any], share: Any) -> None:
        self._microbatch, self._weight, self._share = microbatch, weight, share
        self.captured: list[CapturedGradients] = []
        self.gradients: list[list[Any]] = []
        """Those that were captured, as `train_step` has given them."""
        self.squared_norms: list[Any] = []
        self.leaving = contextlib.ExitStack()
        """To be closed when `train_step` returns."""

    def take(self, one: CapturedGradients) -> bool:
        """Capture the gradients of an update, or make it again; say whether this was all."""
        microbatch = self._microbatch
        part, backend = microbatch.part, microbatch.backend
        if part.captures(one.number):
            self.captured.append(one)
            self.gradients.append(one.gradients)
            is_exact = microbatch.norm.is_exact  # then gradients have their weight already
            weighted = microbatch.keep(one, None if is_exact else self._weight())
            if microbatch.statistics is not None and microbatch.statistics.with_noise:
                # Divided by what they were weighted by, but for one factor of the samples.
                norm = backend.ops.divided(backend.ops.squared_norm(weighted), self._share)
                self.squared_norms.append(norm)
            backend.note_update(one)
        elif one.number < part.first:
            microbatch.made[one.number].assign()
        is_done = part.is_done_after(one.number)
        if is_done:
            changed = microbatch.made.values()
            self.leaving.enter_context(backend.discarding(microbatch.model, changed))
        return is_done


def _places(sums: dict[int, Any]) -> int:
    return sum(len(one.all) for one in sums.values())
