"""Whether micro-batches give the update of the full batch: tried on samples of the first batch.

The real micro-batches run on a few samples, in one part and cut unequally, through the graphs
that training uses. What optimizers would get, what is logged and what is assigned is compared,
and all of it is undone.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any, Callable, Iterator

from bigbatch.backends.keras import backend_of, layers_of, metrics_of
from bigbatch.core.outcome import GRADIENT, LOG, Item, Outcome, differences, tolerance_of
from bigbatch.engine.batch_norm import batch_norms_of
from bigbatch.engine.cause import Call, Cause, Part, causes_of, text_of
from bigbatch.engine.phases import Phases
from bigbatch.errors import ArgumentError, DifferenceError, NotEqualWarning, explain

MODES = ("warn", "raise", "off")

_COUNT = 5
_CUTS = {_COUNT: 3, 3: 2}
"""How many samples are tried, and how many of them the first part has."""

_FLOORS = 16
"""How many times more than permuted ones samples must differ when cut: the rest is rounding."""

_WITH_DRAWS = 10
"""What tolerances are multiplied by where samples cannot be permuted."""

_NO_ROUNDING = 100
"""More than so many tolerances is never rounding."""


_NOT_CHECKED = "bigbatch: not checked whether updates equal the full batch"
_ONLY_TENSORFLOW = explain(
    received='check="raise" on a backend on which fit() cannot check itself yet',
    expected="Keras on TensorFlow or torch",
    fix="leave check out, and call bigbatch.verify(model, x, y, microbatch_size=...) before",
)


class NotCheckedError(Exception):
    """The check cannot be made, for a reason that is said."""


class SelfCheck:
    """Compares a few samples, whole and cut, once for each structure of the data.

    Args:
        model: a compiled Keras model.
        phases: what runs its micro-batches.
        mode: "warn", "raise" or "off", as for `accumulate`.
        say: called with what users may want to know.
        told: returns the loss or metrics of which users know already.
    """

    def __init__(
        self,
        model: Any,
        phases: Phases,
        mode: str,
        say: Callable[[str], None],
        told: Callable[[], set[str]],
    ) -> None:
        self._model = model
        self._backend = backend_of(model)
        self._phases = phases
        if mode != "off" and self._backend.few_samples is None:
            if mode == "raise":
                raise ArgumentError(_ONLY_TENSORFLOW)
            say(f"{_NOT_CHECKED}: it cannot be on this backend yet")
            mode = "off"
        self._mode = mode
        self._say = say
        self._told = told
        self._checked = 0
        self._norm = phases.microbatch.norm
        if mode != "off" and batch_norms_of(model) and not phases.is_exact:
            self._norm.switch = self._backend.switch(model)

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to check, as far as data has been seen."""
        return self._mode == "off" or self._checked == self._phases.structures

    @property
    def uses_phases(self) -> bool:
        """Whether a batch is to be trained on phase by phase, in the graphs that this uses."""
        is_graph = self._mode != "off" and not self._backend.runs_in_python(self._model)
        return is_graph and self._has_any_size()

    def _has_any_size(self) -> bool:
        """Say whether micro-batches may have any number of samples, and run once."""
        phases = self._phases
        is_one = not phases.needs_whole_batch and not phases.runs_again
        return is_one and phases.passes[0].runs.is_any_size

    def at(self, data: Any, size: int | None) -> None:
        """Check samples of a batch; warn or raise if they give something else when cut.

        Args:
            data: a batch that is about to be trained on, of a structure that is prepared.
            size: samples per micro-batch; `None` in window mode, where it is a micro-batch.
        """
        if self.is_done:
            return
        self._checked = self._phases.structures
        causes, reason = self.causes(data, size)
        if reason:
            self._say(f"{_NOT_CHECKED}: {reason}")
        for layer in self._norm.moved_by_each:
            self._say(
                f"bigbatch: the moving statistics of {layer.name} are moved by every "
                "micro-batch: it is called in a tf.function or a branch"
            )
        if causes:
            if self._mode == "raise":
                raise DifferenceError(text_of(causes))
            causes = [cause for cause in causes if cause.subject not in self._told()]
            if causes and self._backend.is_first_worker(self._model):
                warnings.warn(f"bigbatch: {text_of(causes)}", NotEqualWarning, stacklevel=2)

    def causes(self, data: Any, size: int | None) -> tuple[list[Cause], str | None]:
        """Return why samples give something else when cut, or why that cannot be known."""
        try:
            return self._found(data, size), None
        except NotCheckedError as error:
            return [], str(error)

    def _found(self, data: Any, size: int | None) -> list[Cause]:
        """Return why samples give something else when cut; nothing if they do not."""
        count = _COUNT if size is None or size >= _COUNT else 3
        samples, reason = None, self._obstacle()
        if reason is None:
            reason = "fewer than 3 samples"
            try:
                for fewer in (count, 3):
                    samples = self._backend.few_samples.picked(self._model, data, fewer)
                    if samples is not None:
                        count, reason = fewer, None
                        break
            except (TypeError, ValueError):
                reason = "samples of this kind, such as sparse ones, cannot be picked"
        self._agree(reason)
        trial = Trial(self._model, self._phases, samples, count, is_split=size is not None)
        with self._undone(trial):
            return self._compared(trial)

    def _compared(self, trial: Trial) -> list[Cause]:
        every = range(trial.count)
        whole = self._run(trial.outcome, every, trial.count)
        cut = self._run(trial.outcome, every, _CUTS[trial.count])
        tolerance = tolerance_of(_dtypes(self._model))
        has_draws = self._phases.passes[0].runs.draws_by_sample
        tolerance *= _WITH_DRAWS if has_draws else 1
        found = _above(differences(whole, cut), tolerance)
        if not found:
            return []
        again = self._run(trial.outcome, every, trial.count)
        if _above(differences(whole, again), tolerance):
            raise NotCheckedError("random draws that cannot be repeated, such as tf.random's")
        if not has_draws:
            permuted = self._run(trial.outcome, [*every][::-1], trial.count)
            floors = differences(whole, permuted)
            found = {
                item: size
                for item, size in found.items()
                if item.kind != GRADIENT
                or floors[item] > _NO_ROUNDING * tolerance
                or size > _FLOORS * floors[item]
            }
        return causes_of(self._model, trial, found, tolerance) if found else []

    def _obstacle(self) -> str | None:
        """Return why nothing can be tried, if so."""
        phases, model, backend = self._phases, self._model, self._backend
        if phases.is_exact:
            return "exact batch normalisation runs micro-batches in stages"
        if phases.full_batch_loss is not None:
            return "the loss is computed on the whole batch, by two passes"
        if phases.runs_again:
            return "train_step makes updates that depend on each other"
        if any(getattr(layer, "stateful", False) for layer in layers_of(model)):
            return "a stateful layer has a fixed number of samples"
        if not self._has_any_size():
            return "the model has a fixed batch size"
        effects = phases.passes[0].runs.effects()
        if effects:
            return f"train_step does what cannot be undone ({', '.join(sorted(effects))})"
        if not self._norm.can_be_switched():
            return "this BatchNormalization cannot be held still"
        return backend.few_samples.obstacle(model)

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run samples; if that fails on any worker, nothing is checked on all of them."""
        reason, result = None, None
        try:
            result = function(*arguments)
        except self._backend.OUT_OF_MEMORY:
            reason = "out of memory"
        except Exception as error:
            reason = f"a few samples do not run ({_first_line(error)})"
        # Outside the handler, whose traceback keeps tensors alive.
        self._agree(reason)
        return result

    def _agree(self, reason: str | None) -> None:
        """Raise if there is a reason not to check, on this or on another worker."""
        if self._backend.largest_of_all(self._model, int(reason is not None)):
            raise NotCheckedError(reason or "another worker could not be checked")

    @contextlib.contextmanager
    def _undone(self, trial: Trial) -> Iterator[None]:
        """Return a block after which nothing has happened; batch normalisation stands still."""
        switch = self._norm.switch

        def turn(value: bool) -> None:
            if switch is not None:
                self._backend.on_replicas(self._model, lambda: switch.assign(value))

        runs, undone = self._phases.passes[0].runs, self._backend.few_samples.undone
        with undone(self._model, runs, trial.count, trial.touched) as put_back:
            trial.put_back = put_back
            turn(True)
            try:
                yield
            finally:
                turn(False)
                self._phases.release()
                self._phases.rollback.forget()


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
        self.count = count
        """How many samples there are, on each replica."""
        self.put_back: Callable[[], None] = lambda: None
        """Undoes what a run has changed."""
        local = functools.partial(self._backend.local_results, model)
        native = self._backend.native
        metrics = [native(v) for one in metrics_of(model) for v in one.variables]
        state = [*self._backend.state_of(model), *phases.passes[0].runs.assigned()]
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
        names = _names(model)
        self._compared = {
            f"{names.get(id(part), part.name)}": part
            for key, part in parts.items()
            if key not in apart
        }

    def outcome(self, rows: Any, size: int) -> Outcome:
        """Return what samples give in parts of `size`; nothing has changed afterwards."""
        backend, phases, model = self._backend, self._phases, self._model
        whole = backend.few_samples.rows_on_replicas(model, self._samples, rows)
        cuts: list[Any] = [whole]
        length = None
        if self._is_split:
            length = size if backend.runs_in_python(model) else backend.data.integer(size)
        elif size < self.count:
            parts = (rows[:size], rows[size:])
            cuts = [
                backend.few_samples.rows_on_replicas(model, self._samples, part)
                for part in parts
            ]
        before = backend.few_samples.arrays(self._values())
        phases.begin()
        if phases.needs_counts:
            for part in cuts:
                phases.count(part, length)
            phases.use_counts()
        for part in cuts:
            phases.add(part, length, backend.ops.weight(len(cuts)))
        gradients, logs = phases.look(is_whole=self._is_split)
        gradients, logs = (
            backend.few_samples.arrays(gradients),
            backend.few_samples.arrays(logs),
        )
        after = backend.few_samples.arrays(self._values())
        self.put_back()
        names = _names(model)
        variables = [one.variables for one in phases.microbatch.captured]
        return Outcome(
            gradients=[
                [(names.get(id(v)) or str(v.name), g) for v, g in zip(some, values)]
                for some, values in zip(variables, gradients)
            ],
            logs=logs,
            variables={name: (before[name], after[name]) for name in before},
        )

    def run_by_python(self) -> list[Part]:
        """Return what is seen of all samples, and of the parts, one after the other."""
        backend, phases, model = self._backend, self._phases, self._model
        if backend.is_multi_worker(model):
            return []  # they would wait for each other
        whole = backend.few_samples.rows_on_replicas(model, self._samples, range(self.count))
        size = _CUTS[self.count]
        parts = []
        for first, last in ((0, self.count), (0, size), (size, self.count)):
            phases.begin()
            if phases.needs_counts:
                phases.count(whole, None if not self._is_split else self.count)
                phases.use_counts()
            data = backend.few_samples.rows_on_replicas(
                model, self._samples, range(first, last)
            )
            with backend.few_samples.watching_layers(model) as calls:
                gradients = self._gradients(data, first)
            calls = [Call(*call) for call in calls]
            parts.append(
                Part((last - first) / self.count, calls, backend.few_samples.arrays(gradients))
            )
            self.put_back()
        return parts

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


def _above(found: dict[Item, float], tolerance: float) -> dict[Item, float]:
    """Return the differences that are more than rounding."""
    # Keras keeps metrics in float32, whatever a model computes in.
    logged = max(tolerance, 1e-5)
    return {
        item: size
        for item, size in found.items()
        if size > (logged if item.kind == LOG else tolerance)
    }


def _first_line(error: Exception) -> str:
    """Return the line of a message that says something."""
    empty = ("Graph execution error:", "Detected at node", "File ", "<", "[[", "in user code")
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(empty)]
    return said[0] if said else type(error).__name__


def _dtypes(model: Any) -> set[str]:
    used = {str(layer.compute_dtype) for layer in (model, *layers_of(model))}
    return used | backend_of(model).few_samples.ALSO_COMPUTES_IN
