"""Whether micro-batches give the update of the full batch: tried on samples of the first batch.

The real micro-batches run on a few samples, in one part and cut unequally, through the graphs
that training uses. What optimizers would get, what is logged and what is assigned is compared,
and all of it is undone.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Callable, Iterator

from bigbatch.backends.keras import backend_of, layers_of
from bigbatch.core.outcome import (
    LOG,
    Item,
    Outcome,
    differences,
    sums_among,
    tolerance_of,
)
from bigbatch.engine.batch_norm import batch_norms_of
from bigbatch.engine.cause import causes_of, of_summed_rows, with_equalizing
from bigbatch.engine.check_trial import CUTS, Trial
from bigbatch.engine.difference import Cause, text_of
from bigbatch.engine.phases import Phases
from bigbatch.engine.train_step_cause import of_counts
from bigbatch.errors import DifferenceError, NotEqualWarning

MODES = ("warn", "raise", "off")

_COUNT = max(CUTS)
_FLOORS = 16
"""How many times more than permuted ones samples must differ when cut: the rest is rounding."""

_WITH_DRAWS = 10
"""What tolerances are multiplied by where samples cannot be permuted."""

_AFTER_UPDATES = 10
"""What tolerances are multiplied by where updates depend on others before them."""

_SAME_LOGS = 2e-6
"""Logged values that differ by no more are the same: Keras keeps metrics in float32.

Losses of new weights are about the same for every sample, and so are their wrong means.
"""

_NO_ROUNDING = 100
"""More than so many tolerances is never rounding."""

_OF_FLOAT32 = 1e-5
"""What may be rounding in a float64 model, too: some layers compute a part in float32."""

_NOT_CHECKED = "bigbatch: not checked whether updates equal the full batch"


class NotCheckedError(Exception):
    """The check cannot be made, for a reason that is said."""


class SelfCheck:
    """Compares a few samples, whole and cut, once for each structure of the data.

    Args:
        model: a compiled Keras model.
        phases: what runs its micro-batches.
        mode: "warn", "raise" or "off", as for `accumulate`.
        say: called with what users may want to know.
        told: returns the loss or metrics that users have been told about.
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
        self._mode = mode
        self._say = say
        self._told = told
        self._checked = 0
        self._is_traced_again = False
        self._has_said_draws = False
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
        return is_graph and self._phases.full_batch_loss is None and self._has_any_size()

    def _has_any_size(self) -> bool:
        """Say whether micro-batches may have any number of samples, and run once."""
        phases = self._phases
        if phases.full_batch_loss is not None:
            return phases.two_passes_fit_any_size
        return all(one.runs.is_any_size for one in phases.passes)

    def at(self, data: Any, size: int | None) -> bool:
        """Check samples of a batch; warn or raise if they give something else when cut.

        Args:
            data: a batch that is about to be trained on, of a structure that is prepared.
            size: samples per micro-batch; `None` in window mode, where it is a micro-batch.

        Returns:
            Whether micro-batches were traced once more, as something was found out.
        """
        if self._mode == "off":
            self._say_of_draws()
        if self.is_done:
            return False
        self._checked = self._phases.structures
        self._is_traced_again = False
        causes, reason = self.causes(data, size)
        if reason:
            self._say(f"{_NOT_CHECKED}: {reason}")
        for layer in self._norm.moved_by_each:
            self._say(
                f"bigbatch: every micro-batch moves the moving statistics of {layer.name}, "
                "because it is called in a tf.function or a branch"
            )
        if causes:
            if self._mode == "raise":
                raise DifferenceError(text_of(causes))
            causes = [cause for cause in causes if cause.subject not in self._told()]
            if causes and self._backend.is_first_worker(self._model):
                warnings.warn(f"bigbatch: {text_of(causes)}", NotEqualWarning, stacklevel=2)
        return self._is_traced_again

    def _say_of_draws(self) -> None:
        """Say which rows draws of several for each sample are taken to be, if nothing tries."""
        if any(one.runs.draws_several_rows for one in self._phases.passes):
            if self._has_said_draws:
                return
            self._has_said_draws = True
            self._say(
                "bigbatch: random draws may differ from the full batch: some have several rows "
                "for each sample, which are assumed to follow each other. The check would find "
                "out whether they do"
            )

    def causes(self, data: Any, size: int | None) -> tuple[list[Cause], str | None]:
        """Return why samples give something else when cut, or why that cannot be known."""
        found, reason = [], None
        try:
            found = self._found(data, size)
        except NotCheckedError as error:
            reason = str(error)
        found = with_equalizing(self._model, found)
        return [*found, *of_summed_rows(self._model, self._phases)], reason

    def _found(self, data: Any, size: int | None) -> list[Cause]:
        """Return why samples give something else when cut; nothing if they do not."""
        count = _COUNT if size is None or size >= _COUNT else 3
        if self._phases.full_batch_loss is not None:
            self._phases.trace_two_passes(self._backend.data.types_of_any_count(data))
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
        is_split = size is not None or self._phases.is_exact
        causes, has_sums = self._tried(samples, count, is_split=is_split)
        if has_sums:
            self._trace_again()
            causes, _ = self._tried(samples, count, is_split=is_split)
        is_one_pass = self._phases.full_batch_loss is None
        if causes and is_one_pass and self._phases.draw_in_blocks(True):
            # Of real and fake samples that are concatenated the first rows are all real.
            self._trace_again()
            with contextlib.suppress(NotCheckedError):
                if not self._tried(samples, count, is_split=is_split)[0]:
                    return []
            self._phases.draw_in_blocks(False)
            self._trace_again()
        return causes

    def _trace_again(self) -> None:
        self._phases.trace_again()
        self._is_traced_again = True

    def _tried(self, samples: Any, count: int, *, is_split: bool) -> tuple[list[Cause], bool]:
        """Return why samples differ when cut; or whether the plan has changed, as it was wrong.

        A custom `train_step` may compute sums, which nothing shows before.
        """
        trial = Trial(self._model, self._phases, samples, count, is_split=is_split)
        with self._undone(trial):
            return self._compared(trial)

    def _compared(self, trial: Trial) -> tuple[list[Cause], bool]:
        every = range(trial.count)
        whole = self._run(trial.outcome, every, trial.count)
        cut = self._run(trial.outcome, every, CUTS[trial.count])
        tolerance = tolerance_of(_dtypes(self._model))
        miscounted = trial.miscounted()
        if miscounted > tolerance:
            return [of_counts(self._model, miscounted)], False
        has_draws = any(one.runs.draws_by_sample for one in self._phases.passes)
        if trial.makes_two_passes:  # of which nothing is traced here
            has_draws = any(map(self._backend.has_seeds, layers_of(self._model)))
        tolerance *= _WITH_DRAWS if has_draws else 1
        # A gradient that is nothing but rounding moves weights as far as others, with Adam.
        tolerance *= _AFTER_UPDATES if self._phases.runs_again else 1
        every_item = differences(whole, cut)
        found = _above(every_item, tolerance)
        if not found:
            return [], False
        again = self._run(trial.outcome, every, trial.count)
        if _above(differences(whole, again), tolerance):
            raise NotCheckedError("random draws that cannot be repeated, such as tf.random's")
        if not has_draws:
            permuted = self._run(trial.outcome, [*every][::-1], trial.count)
            floors = differences(whole, permuted)
            found = {
                item: size
                for item, size in found.items()
                if floors[item] > max(_NO_ROUNDING * tolerance, _OF_FLOAT32)
                or size > _FLOORS * floors[item]
            }
        if not found:
            return [], False
        if self._finds_sums(trial, whole, cut, found):
            return [], True
        logs = [size for item, size in every_item.items() if item.kind == LOG]
        rounding = max(_SAME_LOGS, tolerance_of(_dtypes(self._model)) / 50)
        logs_agree = max(logs, default=0.0) <= rounding
        return causes_of(self._model, trial, found, tolerance, logs_agree=logs_agree), False

    def _finds_sums(self, trial: Trial, whole: Outcome, cut: Outcome, found: Any) -> bool:
        """Note which updates and logs of a custom `train_step` are sums; say if any is."""
        plan = self._phases.microbatch.plan
        if plan.updates or plan.logs or not self._backend.has_custom_train_step(self._model):
            return False
        size = CUTS[trial.count]
        first = self._run(trial.outcome, range(size), size)
        tolerance = _FLOORS * tolerance_of(_dtypes(self._model))
        sums = sums_among(found, whole, cut, first, size / trial.count, tolerance)
        plan.updates, plan.logs = sums
        return any(sums)

    def _obstacle(self) -> str | None:
        """Return why nothing can be tried, if so."""
        phases, model, backend = self._phases, self._model, self._backend
        if any(getattr(layer, "stateful", False) for layer in layers_of(model)):
            return "a stateful layer has a fixed number of samples"
        if not self._has_any_size():
            return "the model has a fixed batch size"
        effects = {name for one in phases.passes for name in one.runs.effects()}
        effects |= phases.effects_of_two_passes
        if effects:
            return f"train_step's effects cannot be undone ({', '.join(sorted(effects))})"
        if not self._norm.can_be_switched():
            return "a BatchNormalization layer cannot be frozen for the check"
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

        runs = [one.runs for one in self._phases.passes]
        undone = self._backend.few_samples.undone
        with undone(self._model, runs, trial.count, trial.touched) as put_back:
            trial.put_back = put_back
            turn(True)
            try:
                yield
            finally:
                turn(False)
                for number in range(len(self._phases.passes)):
                    self._phases.release(number)
                self._phases.rollback.restore()


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
