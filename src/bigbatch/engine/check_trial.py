"""A few samples of a batch, run through the phases of training, and undone."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator

from bigbatch.backends.keras import backend_of, layers_of, metrics_of
from bigbatch.core.outcome import Outcome
from bigbatch.core.patching import contents_kept, replaced
from bigbatch.engine.difference import Call, Part
from bigbatch.engine.microbatch import CountsNeededError
from bigbatch.engine.phases import Phases
from bigbatch.engine.totals import BatchContext

CUTS = {5: 3, 3: 2}
"""How many samples are tried, and how many of them the first part has."""


class Trial:
    """A few samples of a batch, and what they give.

    Args:
        model: a Keras model.
        phases: what runs its micro-batches.
        samples: the samples, on each replica.
        count: how many there are on each.
        is_split: whether they are cut in the graph, not before.
    """

    def __init__(
        self, model: Any, phases: Phases, samples: Any, count: int, *, is_split: bool
    ) -> None:
        self._model = model
        self._backend = backend_of(model)
        self._phases = phases
        self._samples = samples
        self._is_split = is_split
        self.is_exact = phases.is_exact
        """Whether micro-batches run in stages, and not one by one."""
        self.count = count
        """How many samples there are, on each replica."""
        self.put_back: Callable[[], None] = lambda: None
        """Undoes what a run has changed."""
        local = functools.partial(self._backend.local_results, model)
        native = self._backend.native
        metrics = [native(v) for one in metrics_of(model) for v in one.variables]
        assigned = [v for one in phases.passes for v in one.runs.assigned()]
        state = [*self._backend.state_of(model), *assigned]
        self._assigned = {id(part) for variable in assigned for part in local(variable)}
        self.makes_two_passes = phases.full_batch_loss is not None
        """Whether the loss is computed on all samples, between two passes over parts."""
        is_traced = not (self._backend.runs_in_python(model) or self.makes_two_passes)
        if not is_traced:  # any variable may be assigned
            state += map(native, model.variables)
        parts = {id(part): part for v in (*state, *metrics) for part in local(v)}
        switch = phases.microbatch.norm.switch
        for part in [] if switch is None else local(switch):
            parts.pop(id(part), None)  # which is turned while samples run
        self.touched: list[Any] = list(parts.values())
        """The variables that a run may change."""
        apart = {id(part) for variable in metrics for part in local(variable)}
        for layer in layers_of(model):
            if self._backend.is_batch_norm(layer):  # which is said elsewhere
                values = [native(v) for v in layer.non_trainable_variables]
                apart |= {id(part) for variable in values for part in local(variable)}
        for one in phases.captured:
            # The gradients that move these are compared.
            values = [*one.variables, *self._backend.optimizer_variables(one.optimizer)]
            apart |= {id(part) for variable in values for part in local(native(variable))}
        names = _names(model)
        self._compared = {
            f"{names.get(id(part), part.name)}": part
            for key, part in parts.items()
            if key not in apart
        }

    def assigns(self, variable: Any) -> bool:
        """Say whether a micro-batch itself assigns a variable that optimizers change."""
        parts = self._backend.local_results(self._model, self._backend.native(variable))
        return variable.trainable and any(id(part) in self._assigned for part in parts)

    def outcome(self, rows: Any, size: int) -> Outcome:
        """Return what samples give in parts of `size`; nothing has changed afterwards."""
        with contents_kept((self._model, *layers_of(self._model))):
            return self._outcome(rows, size)

    def _outcome(self, rows: Any, size: int) -> Outcome:
        backend, phases, model = self._backend, self._phases, self._model
        whole = backend.few_samples.rows_on_replicas(model, self._samples, rows)
        cuts: list[Any] = [whole]
        length = None
        if self._is_split and not self.makes_two_passes:
            length = size if backend.runs_in_python(model) else backend.data.integer(size)
        elif size < len(rows) and not self.makes_two_passes:
            parts = (rows[:size], rows[size:])
            cuts = [
                backend.few_samples.rows_on_replicas(model, self._samples, part)
                for part in parts
            ]
        before = backend.few_samples.arrays(self._values())
        numbers = phases.microbatch.numbers
        numbers.keep()
        before.update(numbers.values())
        if phases.full_batch_loss is not None:
            length = size if backend.runs_in_python(model) else backend.data.integer(size)
            with phases.full_batch_loss.trying(self.count):
                of_pass, logs = phases.look_at_two_passes(whole, length)
            gradients = [*self._arrays_of(phases.microbatch, of_pass)]
        else:
            try:
                gradients, logs = self._of_micro_batches(cuts, length)
            except CountsNeededError:
                phases.begin_to_count(cuts[0])
                gradients, logs = self._of_micro_batches(cuts, length)
        logs = backend.few_samples.arrays(logs)
        after = {**backend.few_samples.arrays(self._values()), **numbers.values()}
        phases.rollback.restore()
        numbers.put_back()
        self.put_back()
        names = _names(model)
        return Outcome(
            gradients=[
                [(names.get(id(v)) or str(v.name), g) for v, g in zip(some, values)]
                for some, values in gradients
            ],
            logs=logs,
            variables={name: (before[name], after[name]) for name in before if name in after},
        )

    def _of_micro_batches(self, cuts: list[Any], length: Any) -> tuple[list[Any], Any]:
        """Return gradients and logs of samples that are in parts, or are cut at `length`."""
        backend, phases = self._backend, self._phases
        phases.begin()
        if phases.needs_counts:
            for part in cuts:
                phases.count(part, length)
            phases.use_counts()
        gradients, logs = [], {}
        for number, this in enumerate(phases.passes):
            if number:  # the gradients of a pass are those of the updates before it
                phases.finish(is_whole=self._is_split, number=number - 1)
                phases.begin_again(number)
            for part in cuts:
                phases.add(part, length, backend.ops.weight(len(cuts)), number)
            of_pass, logs = phases.look(is_whole=self._is_split, number=number)
            gradients += self._arrays_of(this.microbatch, of_pass)
        return gradients, logs

    def _arrays_of(self, microbatch: Any, gradients: Any) -> Iterator[tuple[Any, Any]]:
        """Return the variables of each update, with their gradients as arrays."""
        variables = [one.variables for one in microbatch.captured]
        return zip(variables, self._backend.few_samples.arrays(gradients))

    def run_by_python(self) -> list[Part]:
        """Return what is seen of all samples, and of the parts, one after the other."""
        backend, phases, model = self._backend, self._phases, self._model
        if backend.is_multi_worker(model):
            return []  # they would wait for each other
        whole = backend.few_samples.rows_on_replicas(model, self._samples, range(self.count))
        size = CUTS[self.count]
        parts = []
        for first, last in ((0, self.count), (0, size), (size, self.count)):
            phases.begin()
            if phases.needs_counts:
                phases.count(whole, None if not self._is_split else self.count)
                phases.use_counts()
            data = backend.few_samples.rows_on_replicas(
                model, self._samples, range(first, last)
            )
            kept = contents_kept((model, *layers_of(model)))
            with kept, backend.few_samples.watching_layers(model) as calls:
                gradients = self._gradients(data, first)
            calls = [Call(*call) for call in calls]
            parts.append(
                Part((last - first) / self.count, calls, backend.few_samples.arrays(gradients))
            )
            self.put_back()
        phases.microbatch.numbers.put_back()
        return parts

    def miscounted(self) -> float:
        """Return how far what `train_step` divides by is from what was counted before.

        Counted is what the data and the model say: a custom step may compute weights itself.
        """
        backend, phases, model = self._backend, self._phases, self._model
        is_custom = backend.has_custom_train_step(model)
        has_terms = backend.compile_loss_of(model) is not None and phases.needs_counts
        if not is_custom or not has_terms or backend.replicas(model) > 1:
            return 0.0
        microbatch, pairs, sizes = phases.passes[0].microbatch, [], [0.0]
        correction, terms = microbatch.correction, backend.number_of_terms(model)

        def note(context: BatchContext, samples: Any, position: int, divisor: Any) -> Any:
            if not isinstance(divisor, str):
                pairs.append((divisor, context.denominators[position % terms]))
            return correction(context, samples, position, divisor)

        data = backend.few_samples.rows_on_replicas(model, self._samples, range(self.count))
        with contextlib.suppress(Exception), contents_kept((model, *layers_of(model))):
            phases.begin()
            phases.count(data, self.count if self._is_split else None)
            phases.use_counts()
            with replaced(microbatch, correction=note):
                self._gradients(data, 0)
            for one, counted in backend.few_samples.arrays(pairs):
                sizes.append(abs(float(one) / float(counted) - 1) if counted else 0.0)
        microbatch.numbers.put_back()
        self.put_back()
        return max(sizes)

    def _gradients(self, data: Any, start: int) -> list[Any]:
        """Run a micro-batch without a graph; return its gradients on the first replica."""
        phases, backend, model = self._phases, self._backend, self._model

        def local(data: Any) -> list[Any]:
            context = backend.ops.stack([self.count * backend.replicas(model)] * 2)
            if phases.needs_counts:
                context = phases.context.read_value()
            microbatch, runs = phases.microbatch, phases.passes[0].runs
            totals = runs.run_eagerly(context, data, start)
            gradients = map(microbatch.summed, microbatch.captured, totals.gradients)
            return [backend.ops.dense(one) for some in gradients for one in some]

        results = backend.on_replicas(model, local, data)
        return [backend.local_results(model, one)[0] for one in results]

    def _values(self) -> dict[str, Any]:
        return {name: self._backend.ops.tensor(one) for name, one in self._compared.items()}


def _names(model: Any) -> dict[int, str]:
    """Return the names of variables, by `id`, of Keras' variables and those inside."""
    backend = backend_of(model)
    names: dict[int, str] = {}
    for variable in model.variables:
        name = getattr(variable, "path", None) or variable.name
        native = backend.native(variable)
        parts = [variable, native, *backend.local_results(model, native)]
        names.update((id(part), name) for part in parts)
    return names
