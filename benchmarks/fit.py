"""Time per update in `model.fit`, relative to the limit and to the full batch.

    python benchmarks/fit.py

The limit is a `train_step` that runs k forward and backward passes in one graph, keeps only the
last gradients and applies them: no accumulation can be faster. Candidates are interleaved in
one process, each trained by `fit` on the same arrays; the figures are medians and quartiles of
the ratios of each round. Writes `benchmarks/results/fit.md`.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from models import convolutional_with_batch_norm, deep_tiny, transformer, wide

import bigbatch

MICROBATCH_SIZE, K, ROUNDS = 16, 8, 7
BATCH = MICROBATCH_SIZE * K
ONE_CALL = f"window, steps_per_execution={K}"
WITH_NOISE = "split with NoiseScale"
RESULTS = Path(__file__).parent / "results"


def limit(make_model):
    """Return a model that runs the passes of a batch without adding them up."""
    inner = make_model()

    class Limit(keras.Model):
        def call(self, x, training=None):
            return inner(x, training=training)

        def train_step(self, data):
            variables = inner.trainable_variables

            def passes(x, y):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(x, y, self(x, training=True))
                return loss, tape.gradient(loss, variables)

            passes = tf.function(passes, jit_compile=self.jit_compile, autograph=False)

            def body(index, *_):
                rows = [leaf[index * MICROBATCH_SIZE :][:MICROBATCH_SIZE] for leaf in data]
                for part, leaf in zip(rows, data):
                    part.set_shape([MICROBATCH_SIZE, *leaf.shape[1:]])
                return index + 1, *passes(*rows)

            start = (tf.constant(0), tf.constant(0.0), [tf.zeros(v.shape) for v in variables])
            _, loss, gradients = tf.while_loop(
                lambda index, *_: index < K, body, start, parallel_iterations=1
            )
            self.optimizer.apply(gradients, variables)
            return {"loss": loss}

    model = Limit()
    model.built = True
    return model


def candidates(make_model, jit_compile):
    """Return models that are compiled, and the `batch_size` to fit each with."""
    models = {
        "limit": (limit(make_model), BATCH),
        "full batch": (make_model(), BATCH),
        "split": (bigbatch.accumulate(make_model(), microbatch_size=MICROBATCH_SIZE), BATCH),
        "window": (bigbatch.accumulate(make_model(), accumulation_steps=K), MICROBATCH_SIZE),
        WITH_NOISE: (bigbatch.accumulate(make_model(), microbatch_size=MICROBATCH_SIZE), BATCH),
        # `fit` itself takes some time per call, and calls a window K times but for this.
        ONE_CALL: (bigbatch.accumulate(make_model(), accumulation_steps=K), MICROBATCH_SIZE),
        "Keras' own": (make_model(), MICROBATCH_SIZE),
    }
    if jit_compile:
        plain = bigbatch.accumulate(make_model(), microbatch_size=MICROBATCH_SIZE)
        models["split without jit_compile"] = (plain, BATCH)
    for name, (model, _) in models.items():
        steps = K if name == "Keras' own" else None
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # The limit compiles its passes itself: XLA runs a loop on a CPU slowly.
        jit = jit_compile and name not in ("limit", "split without jit_compile")
        model.compile(
            keras.optimizers.Adam(1e-4, gradient_accumulation_steps=steps),
            loss,
            jit_compile=jit,
            steps_per_execution=K if name == ONE_CALL else 1,
        )
        if name == "limit":
            model.jit_compile = jit_compile
            model.make_train_function = _uncompiled(model)
    return models


def _uncompiled(model):
    """Make the train function of the limit without XLA around the whole."""

    def make(force=False):
        jit_compile, model.jit_compile = model.jit_compile, False
        keras.Model.make_train_function(model, force)
        model.jit_compile = jit_compile
        return model.train_function

    return make


def time_of_epoch(model, *data, callbacks=(), **options):
    """Return how long the epoch of `fit` takes, without what comes before and after it.

    A data set takes up to half a second to go away, or none, by chance.
    """
    clock = [0.0, 0.0]
    callback = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: clock.__setitem__(0, time.perf_counter()),
        on_epoch_end=lambda *_: clock.__setitem__(1, time.perf_counter()),
    )
    model.fit(*data, shuffle=False, verbose=0, callbacks=[callback, *callbacks], **options)
    return clock[1] - clock[0]


def measure(make_model, updates, jit_compile=False):
    """Return the times of every candidate, one for each round."""
    keras.utils.set_random_seed(0)
    models = candidates(make_model, jit_compile)
    shape = make_model().input_shape[1:]
    x = np.random.default_rng(0).normal(size=(BATCH * updates, *shape)).astype("float32")
    y = np.zeros(len(x), "int32")
    times = {name: [] for name in models}
    callbacks = {WITH_NOISE: [bigbatch.NoiseScale()]}
    for _ in range(ROUNDS + 1):  # the first traces
        for name, (model, batch_size) in models.items():
            more = {"batch_size": batch_size, "callbacks": callbacks.get(name, ())}
            times[name].append(time_of_epoch(model, x, y, **more))
    return {name: np.array(values[1:]) for name, values in times.items()}


def rows(name, times):
    """Return the lines of a table."""
    limit_times = times.pop("limit")
    lines = []
    for candidate, values in times.items():
        low, ratio, high = np.percentile(values / limit_times, [25, 50, 75])
        full = np.median(values / times["full batch"])
        lines.append(
            f"| {name} | {candidate} | {ratio:.2f} | {low:.2f} to {high:.2f} | {full:.2f} |"
        )
        print(lines[-1])
    return lines


if __name__ == "__main__":
    header = [
        "# Time per update in `fit`",
        "",
        f"`python benchmarks/fit.py`, {platform.machine()}, {os.cpu_count()} cores, TensorFlow "
        f"{tf.__version__}, Keras {keras.__version__}, micro-batches of {MICROBATCH_SIZE}, "
        f"k = {K}, {ROUNDS} rounds. GPUs were not measured.",
        "",
        "| model | candidate | relative to the limit | quartiles | to the full batch |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(header))
    lines = []
    for make_model, updates in (
        (convolutional_with_batch_norm, 4),
        (transformer, 4),
        (wide, 4),
        (deep_tiny, 16),
    ):
        name = make_model.__name__.replace("_", " ")
        lines += rows(name, measure(make_model, updates))
    lines += rows("transformer, jit_compile", measure(transformer, 4, jit_compile=True))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "fit.md").write_text("\n".join([*header, *lines]) + "\n")
    print("wrote benchmarks/results/fit.md")
