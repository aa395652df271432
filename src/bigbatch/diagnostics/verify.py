"""`verify`: compare accumulation with the full batch on a user's model."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import replace
from typing import Any, Callable, Iterator, Literal

import numpy as np

from bigbatch.backends.keras import (
    backend_of,
    check_compiled,
    check_keras_3,
    check_model,
    layers_of,
    optimizers_of,
)
from bigbatch.core.arguments import positive_integer
from bigbatch.core.exact import ExactBatchNorm
from bigbatch.core.patching import replaced
from bigbatch.core.report import progress
from bigbatch.diagnostics.update import Update, differences_of, observed, relative
from bigbatch.diagnostics.verification import Difference, Hazard, Verification
from bigbatch.engine.batch_norm import BatchNorm
from bigbatch.engine.loss_terms import SharedDimensions
from bigbatch.engine.loss_trial import LossTrial
from bigbatch.engine.settings import Setting
from bigbatch.engine.trial import unchanged
from bigbatch.errors import ArgumentError, explain

_TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 5e-2, "bfloat16": 5e-2}
"""What rounding makes of gradients that are added up in another order, with room to spare."""

_ROWS = 16
"""How many samples are tried layer by layer."""


def verify(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    microbatch_size: int,
    batch_norm: Literal["pooled", "exact", "microbatch", "frozen"] | ExactBatchNorm = "pooled",
    coupled: bool | Literal["auto"] = "auto",
    verbose: bool = True,
) -> Verification:
    """Compare one update of the full batch with one from micro-batches, on this model.

    Both updates are made as `fit` makes them, from the same weights, and undone: the model, its
    optimizer and its random state are as before (and built, if they were not). `verify` finds
    the causes of a difference by trying: layers that draw random numbers, layers that mix
    samples, and losses that compare samples.

    Args:
        model: a compiled Keras 3 model (on TensorFlow, JAX or torch), on one device.
        x: the inputs of one batch: arrays or tensors, in any nest; or a data set (`tf.data`,
            `keras.utils.PyDataset`), whose first batch is used.
        y: the targets, if there are any.
        sample_weight: weights of the samples, if there are any.
        microbatch_size: samples per micro-batch, as for `accumulate`.
        batch_norm: as for `accumulate`.
        coupled: as for `accumulate`.
        verbose: whether to show progress.

    Returns:
        The result: `print` it, or see `Verification`.

    Example:
        >>> import keras
        >>> import bigbatch
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> x, y = np.random.rand(50, 4), np.random.rand(50, 1)
        >>> bigbatch.verify(model, x, y, microbatch_size=16, verbose=False).ok
        True
    """
    check_model(model)
    check_keras_3(model, "verify")
    check_compiled(model)
    positive_integer(microbatch_size, "microbatch_size")
    setting = Setting(
        microbatch_size=microbatch_size, batch_norm=batch_norm, coupled=coupled, check="off"
    )
    _check(model)
    backend = backend_of(model)
    data = backend.data.first_batch(x) if y is None and sample_weight is None else None
    data = backend.packed(x, y, sample_weight) if data is None else data
    data = backend.data.as_fit_has_them(data if isinstance(data, tuple) else (data,))
    with progress(verbose, "bigbatch: verifying") as say:
        return _Comparison(model, setting, data, say).verification()


def _check(model: Any) -> None:
    backend = backend_of(model)
    replicas = backend.replicas(model) * backend.processes(model)
    if replicas > 1:
        raise ArgumentError(
            explain(
                received=f"a model on {replicas} replicas",
                expected="a model on one device, which runs the full batch in one piece",
                fix="build and compile the same model outside strategy.scope(), in one process",
            )
        )


class _Comparison:
    """Runs both updates and compares them."""

    def __init__(
        self, model: Any, setting: Setting, data: Any, say: Callable[[str], None]
    ) -> None:
        self._model = model
        self._backend = backend_of(model)
        self._setting = setting
        self._data = data
        self._say = say
        self._hazards: list[Hazard] = []
        self._notes: list[str] = []

    def verification(self) -> Verification:
        model, count = self._model, int(self._backend.data.sample_count(self._data))
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(model, train_function=None, steps_per_execution=1))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # what there is to say is a hazard here
            self._backend.build(model, self._data)
            if self._accumulates_itself():
                return self._result(0, None, None)
            if not all(one.built for one in optimizers_of(model)):
                self._build_optimizers()
            stack.enter_context(unchanged(model))
            self._say("what could differ")
            sample = self._backend.sample(model, self._data, _ROWS)
            random = self._tried(sample.random_layers)
            changing: list[Any] = []
            with self._without_draws(random):
                if sample.is_enough:
                    changing = self._tried(sample.changing_layers)
                    self._look_for_mixing(sample)
            result = self._compare(count)
            if result.is_equal or not result.samples:
                return result
            for layer in changing:
                self._name_changing(layer)
            if random:
                result = self._compare_without_draws(sample, random, count)
            if not result.ok and not self._hazards:
                self._hazards += self._causes()
            return replace(result, hazards=tuple(self._hazards))

    def _compare_without_draws(
        self, sample: Any, random: list[Any], count: int
    ) -> Verification:
        """Compare once more, and name layers that draw if the difference is theirs.

        Uniform and normal draws equal the full batch, others cannot.
        """
        notes = list(self._notes)
        with self._without_draws(random):
            still = self._tried(sample.random_layers)
            without = self._compare(count)
        if without.is_equal or still:
            for layer in random:
                self._name_drawing(layer)
        note = "Compared with random draws switched off."
        if still:
            names = ", ".join(map(_name, still))
            note = f"Random draws of {names} cannot be switched off."
        self._notes = [*notes, note]
        return replace(without, hazards=tuple(self._hazards), notes=tuple(self._notes))

    def _causes(self) -> list[Hazard]:
        """Return what the check that `fit` makes finds, on a few of the samples."""
        checked = replace(self._setting, check="warn")
        trainer, size = checked.trainer(self._model, lambda _: None), checked.microbatch_size
        assert isinstance(size, int)
        trainer.planning.at(self._data, size)
        trainer.planning.conclude()
        trainer.phases.prepare(self._data, SharedDimensions.SAME, size)
        causes, reason = trainer.self_check.causes(self._data, size)
        if reason:
            self._notes.append(f"Samples could not be tried one by one: {reason}.")
        return [Hazard(one.where, one.what, f"Fix: {one.fix}.") for one in causes]

    def _name_drawing(self, layer: Any) -> None:
        self._hazards.append(
            Hazard(
                _name(layer),
                "it draws random numbers that cannot equal the full batch",
                "Nothing to do if other numbers of the same distribution will do. To have the "
                "same, draw uniform or normal numbers by keras.random and a SeedGenerator.",
            )
        )

    def _name_changing(self, layer: Any) -> None:
        self._hazards.append(
            Hazard(
                _name(layer),
                "its weights change with every call, so with every micro-batch",
                "Let them change in train_step or in a callback, once per update.",
            )
        )

    def _build_optimizers(self) -> None:
        """Make the variables of optimizers that Keras does not know of, with no update yet."""
        model = self._model
        eagerly, model.run_eagerly = model.run_eagerly, False
        try:
            trainer = self._setting.trainer_of_slices(model)
            trainer.phases.prepare(self._data, SharedDimensions.SAME, None)
            trainer.trace(self._data)
        finally:
            model.run_eagerly = eagerly
        missing = [one for one in optimizers_of(model) if not one.built]
        if missing:
            names = [repr(self._backend.name_of(one)) for one in missing]
            raise ArgumentError(
                explain(
                    received=f"optimizers that have no variables yet: {', '.join(names)}",
                    expected="optimizers whose state can be put back",
                    fix="call build() of each with the variables that train_step updates by it",
                )
            )

    def _compare(self, count: int) -> Verification:
        for rows in _halves(count):
            data = self._backend.data.first_rows(self._data, rows)
            size = self._setting.microbatch_size
            assert isinstance(size, int)
            if rows < count and rows > 1:  # or all of them would be in one micro-batch
                size = min(size, rows // 2)
                self._setting = replace(self._setting, microbatch_size=size)
            with contextlib.suppress(self._backend.OUT_OF_MEMORY):
                self._say(f"the full batch of {rows} samples")
                full = observed(self._model, self._full_batch, data)
                self._say(f"micro-batches of {size} samples")
                accumulated = observed(self._model, self._micro_batches, data)
                if rows < count:
                    self._notes.append(
                        f"The full batch of {count} samples does not fit the device: {rows} of "
                        f"them were compared, in micro-batches of {size}."
                    )
                if rows <= size:
                    self._notes.append("All samples are in one micro-batch.")
                return self._result(rows, full, accumulated)
        self._notes.append("Not even one sample fits the device: nothing was compared.")
        return self._result(0, None, None)

    def _result(
        self, samples: int, full: Update | None, accumulated: Update | None
    ) -> Verification:
        tolerance = self._tolerance()
        differences: tuple[Difference, ...] = ()
        logs: dict[str, float] = {}
        if full is not None and accumulated is not None:
            differences = differences_of(full, accumulated)
            logs = {
                name: relative(value - accumulated.logs.get(name, np.nan), value)
                for name, value in full.logs.items()
            }
        result = Verification(
            ok=False,
            samples=samples,
            microbatch_size=self._setting.microbatch_size,  # pyright: ignore[reportArgumentType]
            tolerance=tolerance,
            differences=differences,
            logs=logs,
            full=full and full.cost,
            accumulated=accumulated and accumulated.cost,
            hazards=tuple(self._hazards),
            notes=tuple(self._notes),
        )
        return replace(result, ok=result.is_equal and not self._hazards)

    def _tolerance(self) -> float:
        layers = (self._model, *layers_of(self._model))
        dtypes = {layer.compute_dtype for layer in layers} & _TOLERANCES.keys()
        return max((_TOLERANCES[dtype] for dtype in dtypes), default=_TOLERANCES["float32"])

    def _accumulates_itself(self) -> bool:
        for optimizer in optimizers_of(self._model):
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            if inner.gradient_accumulation_steps:
                steps = inner.gradient_accumulation_steps
                self._hazards.append(
                    Hazard(
                        f"optimizer {inner.name!r}",
                        f"it has gradient_accumulation_steps={steps}, and would accumulate "
                        "what is accumulated already",
                        "Remove gradient_accumulation_steps.",
                    )
                )
        return bool(self._hazards)

    @contextlib.contextmanager
    def _without_draws(self, random: list[Any]) -> Iterator[None]:
        """Return a block in which layers that draw random numbers do as in inference."""
        with contextlib.ExitStack() as stack:
            for layer in random:
                if not layers_of(layer):  # or what is inside would change, too
                    stack.enter_context(self._backend.without_training(layer))
            yield

    def _tried(self, look: Callable[..., list[Any]], *args: Any) -> list[Any]:
        """Return what looking for hazards finds; what cannot be tried is still compared."""
        try:
            return look(*args)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._notes.append(f"Layers could not be tried one by one: {reason}")
            return []

    def _look_for_mixing(self, sample: Any) -> None:
        norm = BatchNorm(self._model, self._setting.batch_norm)
        # Layers that mix samples by `cross_microbatch_sum` are exact with exact statistics.
        mixing = [] if norm.is_exact else self._tried(sample.mixing_layers, norm.watching())
        for layer in mixing:
            is_norm = self._backend.is_batch_norm(layer)
            self._hazards.append(
                Hazard(
                    _name(layer),
                    "it mixes samples, and a micro-batch has fewer of them than the batch",
                    'Pass batch_norm="exact" (Keras 3 on TensorFlow or JAX), or use '
                    "LayerNormalization or GroupNormalization."
                    if is_norm
                    else "Compute every sample by itself, or mix samples by "
                    'bigbatch.cross_microbatch_sum and pass batch_norm="exact".',
                )
            )
        name = None
        if not self._backend.has_custom_train_step(self._model):
            # What cannot be tried is compared all the same.
            with contextlib.suppress(Exception):
                if LossTrial(self._model, sample).plan().needs_whole_batch:
                    name = self._backend.name_of_loss(self._model)
        if name and not self._setting.coupled:
            self._hazards.append(
                Hazard(
                    f"loss {name}",
                    "it is neither a mean nor a sum over samples",
                    'Pass coupled="auto", the default, to accumulate() and here.',
                )
            )

    def _full_batch(self) -> Callable[[Any], Any]:
        """Return what Keras itself trains with."""
        return self._backend.plain_train_function(self._model)

    def _micro_batches(self) -> Callable[[Any], Any]:
        trainer = self._setting.trainer(self._model, lambda _: None)
        return lambda data: trainer.train([data])


def _name(layer: Any) -> str:
    return f"layer {layer.name!r} ({type(layer).__name__})"


def _halves(count: int) -> Iterator[int]:
    while count:
        yield count
        count //= 2
