"""How the loss of a batch is put together, decided with samples of the first batch."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Callable, NamedTuple

from bigbatch.backends.keras import backend_of
from bigbatch.core.memory import readable
from bigbatch.engine.batch_norm import BatchNorm
from bigbatch.engine.difference import LOSS
from bigbatch.engine.full_batch_loss import mixes_samples
from bigbatch.engine.loss_plan import Kind, LossPlan
from bigbatch.engine.loss_trial import ENOUGH, FEWEST, ROWS, LossTrial
from bigbatch.engine.phases import Phases
from bigbatch.errors import ArgumentError, NotEqualWarning

COUPLED = (True, False, "auto")
"""Whether the loss is that of the whole batch: always, never, or if a trial says so."""

_ALWAYS_HELD = 64 * 2**20
"""How many bytes of outputs are held for a batch, even if the weights of a model are fewer."""


class Obstacle(NamedTuple):
    """Why something is not computed on the whole batch."""

    reason: str
    """A sentence, or several."""
    fix: str
    """What to do about it."""


class Planning:
    """Tries the loss of a model on samples of the first batch, and says how it is computed.

    Args:
        model: a Keras model.
        phases: what a batch goes through; told the plan, and whether to make two passes.
        coupled: one of `COUPLED`.
        batch_norm: as for `accumulate`.
        can_wait: whether the replicas of a batch may wait for each other in the middle of it.
        say: called with what users may want to know.
    """

    def __init__(
        self,
        model: Any,
        phases: Phases,
        *,
        coupled: bool | str,
        batch_norm: Any,
        can_wait: bool,
        say: Callable[[str], None],
    ) -> None:
        self._model = model
        self._backend = backend_of(model)
        self._phases = phases
        self._coupled = coupled
        self._batch_norm = batch_norm
        self._can_wait = can_wait
        self._say = say
        self._seen: list[Any] = []
        self._samples = 0
        self._rows = ROWS
        self.is_done = False
        """Whether it is decided."""
        self.sample: Any = None
        """The samples that were tried."""
        self.told: set[str] = set()
        """What was said not to be that of the full batch: `LOSS`, metrics by name."""

    def at(self, data: Any, rows: int = ROWS, batches: int = 1) -> None:
        """Decide with samples of a batch, and of those before if they were too few.

        Args:
            data: a batch as `fit` hands it over.
            rows: how many samples a micro-batch has.
            batches: how many such batches make an update.
        """
        if self.is_done:
            return
        backend, model = self._backend, self._model
        data = backend.data.as_tensors(backend.data.without_optionals(data))
        if not backend.data.can_be_cut(model, data):
            # A few rows of each tensor would not belong together.
            self._phases.microbatch.plan.is_odd = True
            self.conclude()
            return
        is_built = backend.build(model, data)
        if backend.has_custom_train_step(model) and not (is_built and model.built):
            self.conclude()  # its data may be nothing that can be called
            return
        try:
            sample = backend.sample(model, data, min(ROWS, max(ENOUGH, rows)))
        except Exception:  # data without single samples trains all the same
            self.conclude()
            return
        self._seen.append(sample)
        self._rows = rows
        count = backend.data.largest_count(model, data) * backend.replicas(model)
        self._samples = count * backend.processes(model) * batches
        if sum(one.count for one in self._seen) >= min(ENOUGH, self._samples):
            self.conclude()

    def conclude(self) -> None:
        """Decide with the samples there are; if there are too few, each part is a mean."""
        if self.is_done:
            return
        self.is_done = True
        if self._seen:
            first, *others = self._seen
            with contextlib.suppress(Exception):  # batches of different lengths
                self.sample = first.with_others(others)
            self._seen = []
            self._decide(self._samples)

    def _decide(self, samples: int) -> None:
        """Make the plan for batches of so many samples."""
        plan, trial = self._tried()
        plan = self._agreed(plan)
        self._phases.microbatch.plan = plan
        if self._coupled is True and self._phases.is_exact:
            self._phases.use_full_batch_loss()
        elif self._coupled is True:
            self._refuse_mixing_layers()
        elif trial is not None:
            if plan.needs_whole_batch:
                self._take_whole_batch(trial, samples)
            self._hold_metrics(plan, trial, samples)

    def _tried(self) -> tuple[LossPlan, LossTrial | None]:
        """Return the plan that samples show, and the trial; what cannot be tried is a mean."""
        if self.sample is None or self.sample.count < FEWEST:
            return LossPlan(), None
        trial = LossTrial(self._model, self.sample)
        with contextlib.suppress(Exception):
            with contextlib.suppress(self._backend.OUT_OF_MEMORY):
                return trial.plan(), trial
            # Fewer may not tell labels apart, but a micro-batch fits.
            self.sample = self.sample.first(max(FEWEST, self._rows))
            trial = LossTrial(self._model, self.sample)
            return trial.plan(), trial
        return LossPlan(), trial

    def _agreed(self, plan: LossPlan) -> LossPlan:
        """Return a plan that all workers have: one may have seen what others have not."""
        if self._backend.is_multi_worker(self._model):
            order = list(Kind)
            kinds = [*plan.terms, plan.compute_loss]
            *terms, compute_loss = (
                order[self._backend.largest_of_all(self._model, order.index(kind))]
                for kind in kinds
            )
            plan.terms, plan.compute_loss = terms, compute_loss
        return plan

    def _take_whole_batch(self, trial: LossTrial, samples: int) -> None:
        """Compute the loss on the whole batch if that is possible; say so, or why not."""
        name = self._backend.name_of_loss(self._model)
        held = 2 * trial.bytes_of_outputs * samples
        obstacle = self._obstacle(trial, held)
        if obstacle is None:
            self._phases.use_full_batch_loss()
            how = "by two passes: one more forward pass, and"
            if self._phases.is_exact:
                how = "whose outputs are gathered:"
            self._say(
                f"bigbatch: the loss {name} is computed on the whole batch, {how} "
                f"{readable(held)} for outputs and their gradients"
            )
            return
        self.told.add(LOSS)
        _warn(
            f"the loss {name} is neither a mean nor a sum over samples, and "
            "adding up micro-batches does not give the update of the full batch. "
            f"{obstacle.reason} Training continues with micro-batches weighted by their "
            "samples.",
            obstacle,
        )

    def _obstacle(self, trial: LossTrial, held: int) -> Obstacle | None:
        """Return why two passes are not made, and what to do; nothing if they can be."""
        model, backend = self._model, self._backend
        if not self._coupled:
            reason = "It is not computed on the whole batch: coupled=False."
            return Obstacle(reason, "leave coupled out")
        is_exact = self._phases.is_exact
        if not self._can_wait and not is_exact:
            return Obstacle(
                'Two passes are not made with "auto" on several workers.',
                'pass the size that "auto" finds on one worker',
            )
        if backend.processes(model) > 1:
            reason = "No process has the whole batch."
            return Obstacle(reason, "train in one process with all its devices")
        if backend.has_custom_train_step(model) and not is_exact:
            return Obstacle(
                "In a custom train_step the forward pass and the loss cannot be told apart.",
                "write the loss in compute_loss() or compile(loss=...), without a train_step",
            )
        if trial.reads_call:
            return Obstacle(
                "compute_loss() reads values that call() has stored in the last micro-batch.",
                "let call() return them",
            )
        if not trial.has_rows:
            reason = "An output does not have one row per sample."
            return Obstacle(reason, "return one row per sample")
        if held > self._most_bytes():
            return Obstacle(
                f"Outputs and their gradients for a batch would take {readable(held)}, more "
                f"than {readable(self._most_bytes())}.",
                "pass coupled=True to hold them anyway, or use smaller batches; for a mean "
                "over tokens pass a Keras loss with "
                'reduction="mean_with_sample_weight", and sample weights of zero for padding, '
                "which holds nothing",
            )
        layers = [] if is_exact else self._mixing_layers()
        if layers:
            return Obstacle(
                f"The layer {layers[0].name!r} mixes samples, too.",
                "compute every sample separately in it",
            )
        return None

    def _most_bytes(self) -> int:
        """Return how many bytes of outputs may be held for a batch."""
        return max(_ALWAYS_HELD, self._backend.data.bytes_of(self._model.trainable_variables))

    def _mixing_layers(self) -> list[Any]:
        """Return layers that mix samples, but for BatchNormalization."""
        layers: list[Any] = []
        with contextlib.suppress(Exception):
            norm = BatchNorm(self._model, self._batch_norm)
            layers = self.sample.mixing_layers(norm.watching())
        return [layer for layer in layers if not self._backend.is_batch_norm(layer)]

    def _hold_metrics(self, plan: LossPlan, trial: LossTrial, samples: int) -> None:
        """Drop metrics from the plan whose outputs and labels would take too much memory."""
        names = {id(one): one.name for one in self._backend.compiled_metrics(self._model)}
        for metric, kind in list(plan.metrics.items()):
            held = trial.bytes_of_metrics[metric] * samples
            if kind is Kind.WHOLE and held > self._most_bytes():
                del plan.metrics[metric]
                self.told.add(names[metric])
                obstacle = Obstacle(
                    f"Its outputs and labels for a batch would take {readable(held)}, more "
                    f"than {readable(self._most_bytes())}: its mean over micro-batches is "
                    "logged.",
                    "use a metric whose state adds up, a subclass of keras.metrics.Metric",
                )
                _warn(
                    f"the metric {names[metric]!r} is one number for a batch, and neither a "
                    f"mean nor a sum over samples. {obstacle.reason}",
                    obstacle,
                )

    def _refuse_mixing_layers(self) -> None:
        """Raise if layers mix samples before the loss: two passes are not exact then."""
        layers = self._mixing_layers()
        if layers:
            raise ArgumentError(mixes_samples(layers[0]))


def _warn(text: str, obstacle: Obstacle) -> None:
    message = f"bigbatch: {text} Fix: {obstacle.fix}."
    warnings.warn(message, NotEqualWarning, stacklevel=3)
