"""Peak memory of a full batch and of the same batch as micro-batches, as a table and a plot.

    python benchmarks/memory.py

Writes `memory.md` and `memory.png` to `benchmarks/results/`. The figures are allocator bytes,
repeatable to the byte: the network of the demo with random images,
one set of gradients for each batch size.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"  # the allocator that counts
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib as mpl
import tensorflow as tf

import bigbatch

mpl.use("Agg")
from matplotlib import pyplot as plt

MICROBATCH_SIZE = 32
BATCH_SIZES = [32, 64, 128, 256, 512, 1024]
RESULTS = Path(__file__).parent / "results"


def peak_mib(function, *arguments):
    for _ in range(2):
        function(*arguments)
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    function(*arguments)
    return (tf.config.experimental.get_memory_info("CPU:0")["peak"] - before) / 2**20


def measure():
    tf.config.threading.set_inter_op_parallelism_threads(1)  # the same order every time
    layers = [keras.layers.Dense(64, activation="relu") for _ in range(3)]
    head = [keras.layers.Flatten(), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64, 1)), *layers, *head])

    def loss_fn(x, y):
        return tf.reduce_mean(
            keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
        )

    @tf.function(reduce_retracing=True)
    def full_batch(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(x, y)
        return tape.gradient(loss, model.trainable_variables)

    @tf.function(reduce_retracing=True)
    def accumulated(x, y):
        return bigbatch.value_and_gradients(
            loss_fn, model.trainable_variables, (x, y), microbatch_size=MICROBATCH_SIZE
        )

    rows = []
    for size in BATCH_SIZES:
        x, y = tf.zeros([size, 64, 1]), tf.zeros([size], tf.int32)
        rows.append((size, peak_mib(full_batch, x, y), peak_mib(accumulated, x, y)))
        print(f"batch {size:5}: {rows[-1][1]:7.1f} MiB, accumulated {rows[-1][2]:6.1f} MiB")
    return rows


def write_table(rows):
    lines = [
        "# Peak memory for one set of gradients",
        "",
        f"`python benchmarks/memory.py`, {platform.machine()}, TensorFlow {tf.__version__}, "
        f"Keras {keras.__version__}, micro-batches of {MICROBATCH_SIZE}. Allocator bytes of a "
        "CPU; GPUs were not measured.",
        "",
        "| batch | full batch (MiB) | accumulated (MiB) |",
        "|---|---|---|",
        *(f"| {size} | {full:.1f} | {small:.1f} |" for size, full, small in rows),
    ]
    (RESULTS / "memory.md").write_text("\n".join(lines) + "\n")


def write_plot(rows):
    sizes, full, small = zip(*rows)
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.plot(sizes, full, "o-", color="#c44e52", label="full batch")
    axes.plot(sizes, small, "o-", color="#4c72b0", label=f"micro-batches of {MICROBATCH_SIZE}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="samples per update", ylabel="peak memory (MiB)", ylim=0)
    axes.set_title("The same gradients, in the memory of one micro-batch")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(RESULTS / "memory.png", dpi=150)


if __name__ == "__main__":
    RESULTS.mkdir(exist_ok=True)
    measured = measure()
    write_table(measured)
    write_plot(measured)
    print("wrote benchmarks/results/memory.md and memory.png")
