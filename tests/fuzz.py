"""Random models, data and settings, each against the full batch.

    python tests/fuzz.py --minutes 10 --seed 1

goes on for as long as asked and prints the number of every model that differs: `check(number)`
makes it again. `test_fuzz.py` runs some of them.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import bigbatch
from comparison import paired

layers = keras.layers
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
"""Float64 rounds to 1e-16; Adam divides by gradients that may be as small as 1e-7."""
RUNS = {2: "graph", 6: "graph", 9: "replicas", 12: "graph", 16: "graph"}
MODES = ("split", "window", "split, coupled")
"""How models run, of every twenty numbers (the others eagerly), and how they accumulate."""
PARTS = {"eager": 1, "graph": 10, "replicas": 5}
"""Cases of a model, each with other data, cut in other ways; what is traced serves them all."""
REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum")
LOSSES = (
    keras.losses.MeanSquaredError,
    keras.losses.MeanAbsoluteError,
    keras.losses.Huber,
    keras.losses.LogCosh,
)


class AddsLoss(layers.Layer):
    """Adds to the loss a mean over the samples it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_masking = True

    def call(self, x: Any) -> Any:
        """Return the inputs."""
        self.add_loss(0.1 * tf.reduce_mean(tf.square(x)))
        return x


@dataclass
class Case:
    """One case of a model; everything in it follows from the two numbers."""

    number: int
    part: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = random.Random(self.number)
        self.options = options = {
            "tokens": draw.random() < 0.5,
            "masked": draw.random() < 0.7,
            "sequence": draw.random() < 0.5,
            # Recurrent layers, the last two, take long where Python runs them.
            "blocks": draw.choices(range(6), (4, 4, 4, 4, 1, 1), k=draw.choice((1, 2, 2, 3))),
            "adds_loss": draw.random() < 0.3,
            "regularised": draw.random() < 0.3,
            "losses": [draw.randrange(len(LOSSES)) for _ in range(draw.choice((1, 1, 2)))],
            "reduction": draw.choice(REDUCTIONS),
            "weighted": draw.random() < 0.4,
            "loss_weights": draw.random() < 0.5,
            "dtype": draw.choices(("float64", "float32"), (3, 1))[0],
            "run": RUNS.get(self.number % 20, "eager"),
            "mode": MODES[self.number % len(MODES)],
            "microbatch": draw.randint(1, 6),
            "window": draw.choice((1, 2, 2, 3, 3, 4, 4, 5)),
        }
        # In float32 no optimizer that divides by gradients, however small they are.
        is_exact = options["dtype"] == "float64"
        options["optimizer"] = draw.choice(range(5) if is_exact else (0, 4))
        if options["run"] == "replicas" and draw.random() < 0.6:
            # What divides by something else than samples, and need not be known before.
            options.update(
                masked=True,
                tokens=draw.random() < 0.7,
                sequence=True,
                adds_loss=False,
                losses=options["losses"][:1],
                reduction=draw.choice(REDUCTIONS[:3]),
                blocks=[block for block in options["blocks"] if block != 3],
                mode=draw.choice(("split", "window")),
            )
        options.update(self._sizes(random.Random(f"{self.number}, {self.part}")))

    def _sizes(self, draw: random.Random) -> dict[str, Any]:
        """Return the batches of `fit`, the samples of an update and of an epoch."""
        options = self.options
        few = 2 if options["run"] == "graph" else 1  # Python takes long
        if options["mode"] == "window":
            batch = draw.randint(1, 6)
            update = batch * options["window"]
        else:
            size = options["microbatch"]
            update = batch = draw.randint(1 + size // 2, (2 + 2 * few) * size)
        samples = draw.randint(2 + update // 2, 2 * few * update)  # most have a short update
        return {
            "batch": batch,
            "update": update,
            "samples": samples,
            "epochs": draw.choice((1, 1, 2)),
        }

    def make_model(self) -> Any:
        """Return the model."""
        options = self.options
        shape = (5,) if options["sequence"] or options["tokens"] else (3,)
        if options["tokens"]:
            x = inputs = keras.Input(shape, dtype="int32")
            x = layers.Embedding(7, 4, mask_zero=options["masked"])(x)
        elif options["sequence"]:
            x = inputs = keras.Input((*shape, 3))
            x = layers.Masking(0.0)(x) if options["masked"] else x
        else:
            x = inputs = keras.Input(shape)
        regulariser = "l2" if options["regularised"] else None
        for block in options["blocks"]:
            x = self._block(block, x, regulariser)
        if options["adds_loss"]:
            x = AddsLoss()(x)
        outputs = [
            layers.Dense(2, name=f"output{index}")(x) for index in range(len(options["losses"]))
        ]
        return keras.Model(inputs, outputs if len(outputs) > 1 else outputs[0])

    @staticmethod
    def _block(block: int, x: Any, regulariser: Any) -> Any:
        is_sequence = len(x.shape) == 3
        if block == 0:
            return layers.Dense(4, "tanh", kernel_regularizer=regulariser)(x)
        if block == 1:
            return layers.LayerNormalization()(x)
        if block == 2:
            y = layers.Dense(x.shape[-1], "gelu", bias_regularizer=regulariser)(x)
            return layers.Add()([x, y])
        if block == 3:
            return layers.Dense(3, activity_regularizer="l2")(x)
        if block == 4 and is_sequence:
            return layers.GRU(3, return_sequences=True)(x)
        if block == 5 and is_sequence:
            return layers.LSTM(3, return_sequences=True)(x)
        return layers.Dense(4, "elu")(x)

    def data(self, model: Any) -> tuple[Any, Any, Any]:
        """Return inputs, targets, sample weights or `None`."""
        generator = np.random.default_rng([self.number, self.part])
        options, count = self.options, self.options["samples"]
        if options["tokens"]:
            x = generator.integers(0, 7, (count, 5))
        else:
            x = generator.normal(size=(count, *model.input_shape[1:]))
            if options["sequence"]:
                x[generator.random((count, 5)) < 0.3] = 0
        shapes = model.output_shape
        shapes = shapes if isinstance(shapes, list) else [shapes]
        y = [generator.normal(size=(count, *shape[1:])) for shape in shapes]
        weights = None
        if options["weighted"]:
            # Keras wants a weight for every element of the loss.
            weights = [
                generator.random(values.shape[:-1])
                * (generator.random(values.shape[:-1]) < 0.8)
                + 0.01
                for values in y
            ]
        if len(y) == 1:
            return x, y[0], weights and weights[0]
        return x, y, weights

    def compile(self, model: Any) -> None:
        """Compile it."""
        options = self.options
        optimizers = keras.optimizers
        # A sum has large gradients: with a large rate, rounding would grow at every update.
        fast = 0.0005 if options["reduction"] == "sum" else 0.05
        rate = optimizers.schedules.ExponentialDecay(fast, 2, 0.7)
        optimizer = (
            lambda: optimizers.SGD(fast, momentum=0.9),
            lambda: optimizers.Adam(rate, global_clipnorm=0.5),
            lambda: optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True),
            lambda: optimizers.RMSprop(0.01, clipvalue=0.1),
            lambda: optimizers.SGD(rate, clipnorm=0.2, nesterov=True, momentum=0.5),
        )[options["optimizer"]]()
        losses = [LOSSES[index](reduction=options["reduction"]) for index in options["losses"]]
        several = len(losses) > 1
        model.compile(
            optimizer,
            losses if several else losses[0],
            loss_weights=[0.3, 1.7][: len(losses)] if options["loss_weights"] else None,
            metrics=[["mae"]] * len(losses) if several else ["mae"],
            run_eagerly=options["run"] == "eager",
        )

    def build(self, strategy: Any) -> Any:
        """Return the model, compiled, always with the same weights."""
        keras.utils.set_random_seed(self.number % 2**31)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            model = self.make_model()
            self.compile(model)
            model.optimizer.build(model.trainable_variables)
        return model

    def accumulate(self, model: Any) -> None:
        """Let the model accumulate."""
        options = self.options
        if options["mode"] == "window":
            bigbatch.accumulate(model, accumulation_steps=options["window"])
        else:
            coupled = options["mode"] == "split, coupled"
            bigbatch.accumulate(model, microbatch_size=options["microbatch"], coupled=coupled)

    def fit(self, model: Any, batch_size: int) -> dict[str, Any]:
        """Train the model; return its history."""
        x, y, weights = self.data(model)
        return model.fit(
            x,
            y,
            sample_weight=weights,
            batch_size=batch_size,
            epochs=self.options["epochs"],
            shuffle=False,
            verbose=0,
        ).history


def check(number: int, strategy: Any = None) -> None:
    """Raise if a case of the model of this number differs from the full batch.

    `strategy` is what models on several replicas run on; without it they run on one.
    """
    case = Case(number)
    options = case.options
    on = strategy if options["run"] == "replicas" else None
    _use(options["dtype"])
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="bigbatch")
            full, model = case.build(None), case.build(on)
            start = [variable.numpy() for variable in _state(full)]
            case.accumulate(model)
            for part in range(PARTS[options["run"]]):
                case = Case(number, part)
                for variables in (_state(full), _state(model)):
                    for variable, value in paired(variables, start):
                        variable.assign(value)
                expected = case.fit(full, case.options["update"])
                found = case.fit(model, case.options["batch"])
                _compare_training(case, (model, found), (full, expected))
    finally:
        _use("float32")


def _state(model: Any) -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


def _compare_training(case: Case, found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """Compare two models and the histories of their training."""
    tolerance = TOLERANCE[case.options["dtype"]]
    updates = [int(model.optimizer.iterations.numpy()) for model, _ in (found, expected)]
    assert updates[0] == updates[1], case
    for one, two in paired(found[0].get_weights(), expected[0].get_weights()):
        np.testing.assert_allclose(one, two, rtol=0, atol=tolerance, err_msg=str(case))
    assert found[1].keys() == expected[1].keys(), case
    for name, values in expected[1].items():
        np.testing.assert_allclose(
            found[1][name],
            values,
            rtol=max(1e-6, tolerance),
            atol=tolerance,
            err_msg=f"{name}: {case}",
        )


class _Recorder:
    """An optimizer that only keeps what it is given."""

    gradients: Any = None

    def apply_gradients(self, pairs: Any) -> None:
        """Keep the gradients."""
        self.gradients = [gradient for gradient, _ in pairs]


def check_loop(number: int) -> None:
    """Raise if a loss and gradients in a loop, eagerly, differ from those of the full batch.

    A table, of which rows are taken, and some layers; a loss that is a mean over samples, or a
    sum with its weight; micro-batches of any sizes.
    """
    draw, generator = random.Random(number), np.random.default_rng(number)
    samples, width = draw.randint(1, 30), draw.randint(1, 5)
    dtype = draw.choice((tf.float64, tf.float32))
    table = tf.Variable(generator.normal(size=(6, width)), dtype=dtype)
    weights = [
        tf.Variable(generator.normal(size=(width, width)), dtype=dtype)
        for _ in range(draw.randint(1, 3))
    ]
    unused = tf.Variable(tf.zeros([2], dtype))
    variables = [table, *weights, unused]
    activations = [draw.choice((tf.tanh, tf.nn.softplus, tf.identity)) for _ in weights]
    is_sum, is_nested = draw.random() < 0.5, draw.random() < 0.5
    ids = tf.constant(generator.integers(0, 6, (samples, 3)))
    mask = generator.random((samples, 3)) < 0.7
    mask[0, 0] = True
    mask = tf.constant(mask, dtype)
    y = tf.constant(generator.normal(size=(samples, 3, width)), dtype)

    def loss_fn(ids: Any, y: Any, mask: Any) -> Any:
        hidden = tf.gather(table, ids)
        for weight, activation in zip(weights, activations):
            hidden = activation(tf.einsum("ntw,wv->ntv", hidden, weight))
        error = tf.reduce_mean(tf.square(hidden - y), -1)
        if is_sum:
            return tf.reduce_sum(error * mask), tf.reduce_sum(mask)
        return tf.reduce_mean(error)

    def mean(*batch: Any) -> Any:
        loss = loss_fn(*batch)
        return loss[0] / loss[1] if is_sum else loss

    with tf.GradientTape() as tape:
        expected = mean(ids, y, mask)
    gradients = tape.gradient(expected, variables)
    batch = (ids, y, mask)
    function: Any = loss_fn
    if is_nested:
        batch = ({"ids": ids, "rest": [y, mask]},)
        function = lambda part: loss_fn(part["ids"], *part["rest"])  # noqa: E731
    size = draw.randint(1, samples)
    value, found = bigbatch.value_and_gradients(
        function, variables, batch, microbatch_size=size
    )
    tolerance = 1e-12 if dtype == tf.float64 else 2e-5  # of numbers of the order of one
    np.testing.assert_allclose(value, expected, rtol=tolerance, err_msg=str(number))
    _compare(found, gradients, tolerance, number)

    recorder = _Recorder()
    accumulator = bigbatch.GradientAccumulator(recorder, variables)
    start = 0
    while start < samples:
        rows = slice(start, start + draw.randint(1, samples))
        start = rows.stop
        with tf.GradientTape() as tape:
            loss = loss_fn(ids[rows], y[rows], mask[rows])
            weight = loss[1] if is_sum else tf.shape(ids[rows])[0]
            loss = tf.math.divide_no_nan(loss[0], loss[1]) if is_sum else loss
        accumulator.accumulate(tape.gradient(loss, variables), weight=weight)
    accumulator.flush()
    _compare(recorder.gradients, gradients, tolerance, number)


def _compare(found: list[Any], expected: list[Any], tolerance: float, number: int) -> None:
    for one, two in paired(found, expected):
        assert type(one) is type(two), number  # rows stay rows, None stays None
        if two is not None:
            one, two = tf.convert_to_tensor(one), tf.convert_to_tensor(two)
            largest = max(1.0, float(tf.reduce_max(tf.abs(two))))
            np.testing.assert_allclose(
                one, two, rtol=0, atol=tolerance * largest, err_msg=str(number)
            )


def _use(dtype: str) -> None:
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)


def main() -> int:
    """Run models until the time is over; say which differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the first number")
    options = parser.parse_args()
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    end = time.monotonic() + 60 * options.minutes
    number, failed = options.seed, []
    while time.monotonic() < end:
        try:
            check_loop(number)
            check(number, strategy)
        except Exception as error:
            failed.append(number)
            print(f"{number}: {type(error).__name__}: {error}", flush=True)
        number += 1
        if number % 20 == 0:
            print(f"{number - options.seed} models, {len(failed)} differ: {failed}", flush=True)
            keras.utils.clear_session()
    print(f"{number - options.seed} models from {options.seed}, {len(failed)} differ: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
