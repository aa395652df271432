"""`verify`: whether accumulation gives the update of the full batch on a user's own model."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from bigbatch.core.arguments import positive_integer
from bigbatch.core.report import progress
from bigbatch.diagnostics.verification import Cost, Difference, Hazard, Verification
from bigbatch.errors import ArgumentError, explain
from bigbatch.keras import compat
from bigbatch.keras.accumulate import check_model
from bigbatch.keras.collector import optimizers_of
from bigbatch.keras.coupling import Sample
from bigbatch.keras.data import as_fit_has_it
from bigbatch.keras.patching import replaced
from bigbatch.keras.setting import Setting
from bigbatch.keras.trial import memory_of, unchanged
from bigbatch.tf.batch import sample_count
from bigbatch.tf.compat import variables_of

_TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 5e-2, "bfloat16": 5e-2}
"""What rounding makes of gradients that are added up in another order, with room to spare."""

_NEGLIGIBLE = 1e-3
"""Gradients this small, relative to the largest, may be nothing but rounding."""

_UPDATES = 3
"""How many updates are timed."""


def verify(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    microbatch_size: int,
    batch_norm: str = "pooled",
    coupled: bool = False,
    verbose: bool = True,
) -> Verification:
    """Compare one update of the full batch with one from micro-batches, on this model.

    Both are made as `fit` makes them, from the same weights, and undone: the model, its
    optimizer and its random state are as before (and built, if they were not). Whatever could
    make them differ is looked for by trying: which layer draws random numbers, in which the
    samples of a batch meet, whether they meet in the loss.

    Args:
        model: a compiled Keras 3 model (TensorFlow backend), on one device.
        x: the inputs of one batch: arrays or tensors, in any nest.
        y: the targets, if there are any.
        sample_weight: weights of the samples, if there are any.
        microbatch_size: samples per micro-batch, as for `accumulate`.
        batch_norm: as for `accumulate`.
        coupled: as for `accumulate`.
        verbose: whether to show progress.

    Returns:
        The result: `print` it, or see `Verification`.

    Example:
        >>> import bigbatch
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> x, y = np.random.rand(50, 4), np.random.rand(50, 1)
        >>> bigbatch.verify(model, x, y, microbatch_size=16, verbose=False).ok
        True
    """
    check_model(model)
    positive_integer(microbatch_size, "microbatch_size")
    setting = Setting(microbatch_size=microbatch_size, batch_norm=batch_norm, coupled=coupled)
    _check(model)
    data = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
    data = tf.nest.map_structure(as_fit_has_it, data if isinstance(data, tuple) else (data,))
    with progress(verbose, "bigbatch: verifying") as say:
        return _Comparison(model, setting, data, say).verification()


def _check(model: Any) -> None:
    if not getattr(model, "compiled", False):
        raise ArgumentError(
            explain(
                received="a model that has not been compiled",
                expected="a model with a loss and an optimizer",
                fix="call model.compile(...) first",
            )
        )
    replicas = compat.strategy_of(model).num_replicas_in_sync
    if replicas > 1:
        raise ArgumentError(
            explain(
                received=f"a model on {replicas} replicas",
                expected="a model on one device: there the full batch is what it is",
                fix="build and compile the same model outside strategy.scope()",
            )
        )


@dataclass(frozen=True)
class _Update:
    """What one update did."""

    names: list[str]
    gradients: list[np.ndarray | None]
    """What optimizers were given for each weight; `None` for those that got nothing."""
    before: list[np.ndarray]
    steps: list[np.ndarray]
    """How far each weight moved."""
    logs: dict[str, float]
    cost: Cost


class _Comparison:
    """Runs both updates and compares them."""

    def __init__(
        self, model: Any, setting: Setting, data: Any, say: Callable[[str], None]
    ) -> None:
        self._model = model
        self._setting = setting
        self._data = data
        self._say = say
        self._hazards: list[Hazard] = []
        self._notes: list[str] = []

    def verification(self) -> Verification:
        model, count = self._model, int(sample_count(self._data))
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(model, train_function=None, steps_per_execution=1))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # what there is to say is a hazard here
            compat.build(model, self._data)
            if self._accumulates_itself():
                return self._result(0, None, None)
            if not all(one.built for one in optimizers_of(model)):
                self._build_optimizers()
            stack.enter_context(unchanged(model))
            self._say("what could differ")
            sample = Sample(model, self._data)
            stack.enter_context(self._without_draws(sample))
            self._look_for_meetings(sample)
            return self._compare(count)

    def _build_optimizers(self) -> None:
        """Make the variables of optimizers that Keras does not know of, with no update yet."""
        model = self._model
        eagerly, model.run_eagerly = model.run_eagerly, False
        try:
            engine = self._setting.make_split_engine(model)
            engine.prepare(self._data)
            engine.trace(self._data)
        finally:
            model.run_eagerly = eagerly

    def _compare(self, count: int) -> Verification:
        for rows in _halves(count):
            data = tf.nest.map_structure(_first(rows), self._data)
            size = self._setting.microbatch_size
            assert isinstance(size, int)
            if rows < count and rows > 1:  # or all of them would be in one micro-batch
                size = min(size, rows // 2)
                self._setting = replace(self._setting, microbatch_size=size)
            with contextlib.suppress(tf.errors.ResourceExhaustedError):
                self._say(f"the full batch of {rows} samples")
                full = self._update(self._full_batch, data)
                self._say(f"micro-batches of {size} samples")
                accumulated = self._update(self._micro_batches, data)
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
        self, samples: int, full: _Update | None, accumulated: _Update | None
    ) -> Verification:
        tolerance = self._tolerance()
        differences: tuple[Difference, ...] = ()
        logs: dict[str, float] = {}
        if full is not None and accumulated is not None:
            differences = _differences(full, accumulated)
            logs = {
                name: _relative(value - accumulated.logs.get(name, np.nan), value)
                for name, value in full.logs.items()
            }
        largest = [max(one.gradient, one.weight / 10) for one in differences]
        is_same = all(value <= tolerance for value in (*largest, *logs.values()))
        return Verification(
            ok=bool(differences) and is_same,
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

    def _tolerance(self) -> float:
        layers = (self._model, *compat.layers_of(self._model))
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
    def _without_draws(self, sample: Sample) -> Iterator[None]:
        """Return a block in which layers that draw random numbers do as in inference."""
        random = self._tried(sample.random_layers)
        for layer in random:
            self._hazards.append(
                Hazard(
                    _name(layer),
                    "it draws random numbers, others for micro-batches than for the full batch",
                    "Nothing to do: they come from the same distribution.",
                )
            )
        with contextlib.ExitStack() as stack:
            for layer in random:
                if not compat.layers_of(layer):  # or what is inside would change, too
                    stack.enter_context(compat.without_training(layer))
            still = self._tried(sample.random_layers) if random else []
            if still:
                names = ", ".join(map(_name, still))
                self._notes.append(
                    f"Random draws of {names} cannot be switched off: they are part of the "
                    "difference."
                )
            elif random:
                self._notes.append("Compared with random draws switched off.")
            yield

    def _tried(self, look: Callable[..., list[Any]], *args: Any) -> list[Any]:
        """Return what looking for hazards finds; what cannot be tried is still compared."""
        try:
            return look(*args)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._notes.append(f"Layers could not be tried one by one: {reason}")
            return []

    def _look_for_meetings(self, sample: Sample) -> None:
        if not sample.is_enough:
            return
        for layer in self._tried(sample.changing_layers):
            self._hazards.append(
                Hazard(
                    _name(layer),
                    "its weights change with every call, so with every micro-batch",
                    "Let them change in train_step or in a callback, once per update.",
                )
            )
        for layer in self._tried(sample.mixing_layers, self._setting.batch_norm):
            is_norm = isinstance(layer, keras.layers.BatchNormalization)
            self._hazards.append(
                Hazard(
                    _name(layer),
                    "the samples of a batch meet in it, and those of a micro-batch are fewer",
                    "Use LayerNormalization or GroupNormalization, larger micro-batches, or "
                    'batch_norm="frozen".'
                    if is_norm
                    else "Let every sample be computed by itself.",
                )
            )
        name = None
        if not compat.has_own_train_step(self._model):
            # What cannot be tried is compared all the same.
            with contextlib.suppress(Exception):
                name = sample.coupled_loss()
        if name and not self._setting.coupled:
            self._hazards.append(
                Hazard(
                    f"loss {name}",
                    "the samples of a batch meet in it",
                    "Pass coupled=True, to accumulate() and here.",
                )
            )

    def _full_batch(self) -> Callable[[Any], Any]:
        """Return what Keras itself trains with."""
        train = type(self._model).make_train_function(self._model, force=True)
        train = train or self._model.train_function
        return lambda data: train(iter([data]))

    def _micro_batches(self) -> Callable[[Any], Any]:
        engine = self._setting.make_engine(self._model, lambda _: None)
        return lambda data: engine.train([data])

    def _update(self, make: Callable[[], Callable[[Any], Any]], data: Any) -> _Update:
        """Make one update and look at it, then some more to see what they take; undo them."""
        model = self._model
        with unchanged(model) as put_back:
            weights = [*model.trainable_weights, *model.non_trainable_weights]
            before = [weight.numpy() for weight in weights]
            model.reset_metrics()
            with _gradients_of(model) as noted:
                logs = {k: float(np.mean(v)) for k, v in make()(data).items()}
            steps = [weight.numpy() - old for weight, old in zip(weights, before)]
            places = [noted.pop(id(weight), None) for weight in weights]
            gradients = [None if place is None else place.numpy() for place in places]
            del noted, places  # which take memory
            put_back()
            cost = _cost(model, make(), data)
        return _Update([one.path for one in weights], gradients, before, steps, logs, cost)


@contextlib.contextmanager
def _gradients_of(model: Any) -> Iterator[dict[int, Any]]:
    """Return a block in which the gradients that optimizers are given are noted."""
    noted: dict[int, Any] = {}
    variables = model.trainable_variables
    places = {id(one): tf.Variable(tf.zeros(one.shape, one.dtype)) for one in variables}

    def noting(optimizer: Any) -> Callable[..., Any]:
        apply = optimizer.apply

        def apply_and_note(grads: Any, trainable_variables: Any = None) -> Any:
            grads = list(grads)
            variables = trainable_variables or variables_of(optimizer)
            scale = optimizer.scale_loss(tf.ones([]))  # of the loss: of gradients too
            for variable, gradient in zip(variables, grads):
                if gradient is not None and id(variable) in places:
                    place = noted[id(variable)] = places[id(variable)]
                    value = tf.convert_to_tensor(gradient)
                    place.assign(value / tf.cast(scale, value.dtype))
            return apply(grads, trainable_variables)

        return apply_and_note

    with contextlib.ExitStack() as stack:
        for optimizer in optimizers_of(model):
            stack.enter_context(replaced(optimizer, apply=noting(optimizer)))
        yield noted


def _cost(model: Any, train: Callable[[Any], Any], data: Any) -> Cost:
    train(data)  # traces
    memory, peak = memory_of(model), None
    if memory.is_hard:
        memory.reset_peak()
    seconds = []
    for _ in range(_UPDATES):
        start = time.perf_counter()
        tf.nest.map_structure(np.asarray, train(data))  # or a GPU may not be done
        seconds.append(time.perf_counter() - start)
    if memory.is_hard:
        peak = memory.peak()
    return Cost(statistics.median(seconds), peak)


def _differences(full: _Update, accumulated: _Update) -> tuple[Difference, ...]:
    found = []
    largest = max((_size(g) for g in full.gradients if g is not None), default=0.0)
    for index, name in enumerate(full.names):
        gradient, other = full.gradients[index], accumulated.gradients[index]
        step, before = full.steps[index], full.before[index]
        of_step = step - accumulated.steps[index]
        # A step is known no better than the weight it was taken from.
        of_step = np.where(np.abs(of_step) <= 4 * _eps(before) * np.abs(before), 0, of_step)
        if gradient is None or other is None:
            of_gradient = 0.0 if gradient is other else float("inf")
        else:
            # Some gradients are zero but for rounding, such as that of a bias before a softmax.
            scale = max(_size(gradient), _NEGLIGIBLE * largest)
            of_gradient = _relative(gradient - other, scale)
            of_step = np.where(np.abs(gradient) > _NEGLIGIBLE * scale, of_step, 0)
        found.append(Difference(name, of_gradient, _relative(of_step, step)))
    return tuple(found)


def _eps(values: np.ndarray) -> float:
    is_float = np.issubdtype(values.dtype, np.floating)
    return float(np.finfo(values.dtype).eps) if is_float else 2.0**-8


def _name(layer: Any) -> str:
    return f"layer {layer.name!r} ({type(layer).__name__})"


def _relative(difference: Any, to: Any) -> float:
    """Return the largest difference relative to the largest value; NaN is infinite."""
    largest, scale = _size(difference), _size(to)
    if largest == 0:
        return 0.0
    return largest / scale if np.isfinite(largest) and scale > 0 else float("inf")


def _size(values: Any) -> float:
    return float(np.max(np.abs(values), initial=0))


def _halves(count: int) -> Iterator[int]:
    while count:
        yield count
        count //= 2


def _first(rows: int) -> Callable[[Any], Any]:
    return lambda leaf: None if leaf is None else leaf[:rows]
