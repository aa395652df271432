"""Is the update that of the full batch? Ours, Keras' own, and the loop everybody copies."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Callable

import keras
import numpy as np
import tensorflow as tf

import bigbatch
from benchmarks.measuring import Settings, table, write

BATCH, MICROBATCH, K = 24, 8, 3
WHOLE, RAGGED = 48, 52
SAME = 5e-6
"""Float32 rounding over a few updates of weights of the order of one."""
layers, optimizers = keras.layers, keras.optimizers


def dense() -> Any:
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(2)])


def masked() -> Any:
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(9, 4, mask_zero=True),
            layers.Dense(8, "tanh"),
            layers.Dense(2),
        ]
    )


def normed() -> Any:
    return keras.Sequential([keras.Input((6,)), layers.BatchNormalization(), layers.Dense(2)])


def moving_statistics(model: Any) -> list[Any]:
    """Return the statistics of the first layer: the weights cannot be the same."""
    return [np.array(weight) for weight in model.layers[0].non_trainable_weights]


@dataclass(frozen=True)
class Case:
    """What is trained, and what is compared."""

    name: str
    make_model: Callable[[], Any] = dense
    samples: int = WHOLE
    optimizer: Callable[..., Any] = lambda **options: optimizers.Adam(0.01, **options)
    loss: Callable[[], Any] = keras.losses.MeanSquaredError
    compared: Callable[[Any], list[Any]] = lambda model: model.get_weights()
    replicas: bool = False

    def data(self) -> tuple[Any, Any]:
        """Return inputs and targets."""
        generator = np.random.default_rng(0)
        if self.make_model is masked:
            x = generator.integers(1, 9, (self.samples, 6))
            lengths = generator.integers(1, 7, (self.samples, 1))
            return x * (np.arange(6) < lengths), generator.normal(size=(self.samples, 6, 2))
        x = generator.normal(size=(self.samples, 6))
        return x, x[:, :2] ** 2 + generator.normal(size=(self.samples, 2))


def schedule(**options: Any) -> Any:
    return optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 1, 0.7), **options)


CASES = (
    Case("equal micro-batches"),
    Case("a short last batch", samples=RAGGED),
    Case(
        "masked tokens, mean over the valid ones",
        masked,
        optimizer=lambda **o: optimizers.SGD(0.1, **o),
        loss=lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    ),
    Case("a learning-rate schedule", optimizer=schedule),
    Case(
        "moving averages of the weights (EMA)",
        optimizer=lambda **o: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5, **o),
    ),
    Case(
        "clipping by the global norm",
        optimizer=lambda **o: optimizers.SGD(0.1, global_clipnorm=0.1, **o),
    ),
    Case("an epoch shorter than the window", samples=MICROBATCH * 2),
    Case("moving statistics of BatchNormalization", normed, compared=moving_statistics),
    Case("MirroredStrategy, two replicas", replicas=True),
)


def compiled(case: Case, **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = case.make_model()
    model.compile(case.optimizer(**options), case.loss())
    return model


def fitted(case: Case, model: Any, batch_size: int) -> list[Any]:
    model.fit(*case.data(), batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return case.compared(model)


def full_batch(case: Case) -> list[Any]:
    return fitted(case, compiled(case), BATCH)


def ours(case: Case) -> list[Any]:
    return fitted(case, bigbatch.accumulate(compiled(case), microbatch_size=MICROBATCH), BATCH)


def keras_own(case: Case) -> list[Any]:
    return fitted(case, compiled(case, gradient_accumulation_steps=K), MICROBATCH)


def by_hand(case: Case) -> list[Any]:
    """Train with the loop that tutorials show: losses divided by k, an update after k."""
    model = compiled(case)
    variables, loss_fn = model.trainable_variables, case.loss()
    sums = [tf.Variable(tf.zeros(variable.shape)) for variable in variables]
    seen = 0
    x, y = case.data()
    for _ in range(2):
        for start in range(0, len(x), MICROBATCH):
            rows = slice(start, start + MICROBATCH)
            with tf.GradientTape() as tape:
                loss = loss_fn(y[rows], model(x[rows], training=True)) / K
            for total, gradient in zip(sums, tape.gradient(loss, variables)):
                total.assign_add(tf.convert_to_tensor(gradient))
            seen += 1
            if seen % K == 0:
                model.optimizer.apply_gradients(zip([s.read_value() for s in sums], variables))
                for total in sums:
                    total.assign(tf.zeros_like(total))
    model.optimizer.finalize_variable_values(variables)  # as `fit` does, for averages
    return case.compared(model)


def verdict(
    train: Callable[[Case], list[Any]], case: Case, expected: list[Any], scope: Any
) -> str:
    """Return whether a candidate gives what the full batch gives, or by how much not."""
    try:
        with scope:
            found = train(case)
    except Exception as error:
        return f"fails ({type(error).__name__})"
    difference = max(float(np.abs(a - b).max()) for a, b in zip(found, expected))
    return "equal" if difference < SAME else f"off by {difference:.0e}"


def run(settings: Settings) -> None:
    """Compare, and write `equality.md`."""
    cpus = tf.config.list_physical_devices("CPU")
    strategy = None
    with contextlib.suppress(RuntimeError):  # devices are set before TensorFlow starts
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpus[0], two)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    rows = []
    for case in settings.some(CASES, 2):
        expected = full_batch(case)
        cells = []
        for train in (ours, keras_own, by_hand):
            if case.replicas and (train is by_hand or strategy is None):
                cells.append("–")
                continue
            scope = strategy.scope() if case.replicas and strategy else contextlib.nullcontext()
            cells.append(verdict(train, case, expected, scope))
        rows.append([case.name, *cells])
        print("  ".join(rows[-1]), flush=True)
    headings = ("against the full batch", "bigbatch", "Keras' own", "a loop by hand")
    notes = [
        f"Batches of {BATCH} as {K} micro-batches of {MICROBATCH}, two epochs, float32: the "
        "largest difference of a weight (of BatchNormalization: of a moving statistic). Equal: "
        f"below {SAME:.0e}, which is rounding."
    ]
    write(
        settings, "equality", "The same update as the full batch?", table(headings, rows), notes
    )
