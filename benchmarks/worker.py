"""One of two workers; started by `workers.py`, prints what it has measured as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
import numpy as np
import tensorflow as tf

import bigbatch
from benchmarks.candidates import MICROBATCH
from benchmarks.work import WORK, loss, time_of_epoch, wide
from bigbatch.backends.tensorflow.compat import outside_strategy_scope

UPDATES = 4
SIZES = [2**10, 2**16, 2**20, 2**22, 2**24]
STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()
WORKERS = STRATEGY.num_replicas_in_sync


def loopback_bytes() -> int:
    """Return the bytes that the loopback interface has received so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[0])
    raise RuntimeError("there is no loopback interface")


def measured(run: Any, repeats: int) -> tuple[float, float]:
    """Return seconds and bytes of one `run`, after two to warm up.

    A `run` returns its seconds itself if not all that it does counts.
    """
    seconds, size = [], []
    for _ in range(repeats + 2):
        before, start = loopback_bytes(), time.perf_counter()
        took = run()
        took = took if isinstance(took, float) else time.perf_counter() - start
        seconds.append(took)
        size.append(loopback_bytes() - before)
    seconds, size = seconds[2:], size[2:]
    return float(np.median(seconds)), float(np.median(size))


def data(k: int) -> Any:
    x, y = WORK["wide"].data(MICROBATCH * k * WORKERS * UPDATES)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    return (
        tf.data.Dataset.from_tensor_slices((x, y))
        .batch(MICROBATCH * k * WORKERS)
        .with_options(options)
    )


def make_model() -> Any:
    with STRATEGY.scope():
        model = wide()
        model.compile(keras.optimizers.Adam(1e-4), loss())
    return model


def reductions_in(graph: Any) -> int:
    """Return how many reductions a graph and what it calls make."""
    nodes = [*graph.node, *(node for body in graph.library.function for node in body.node_def)]
    return sum("CollectiveReduce" in node.op for node in nodes)


def accumulated(k: int, repeats: int) -> dict[str, float]:
    """Return the figures of updates in `fit`."""
    model = bigbatch.accumulate(make_model(), microbatch_size=MICROBATCH)
    batches = data(k)
    seconds, size = measured(lambda: time_of_epoch(model, batches), repeats)
    phases = vars(model)["_bigbatch_hooks"].trainer.phases
    iterator = iter(STRATEGY.experimental_distribute_dataset(batches))
    rows = tf.constant(MICROBATCH)
    graph = phases.train_next.get_concrete_function(iterator, 1, rows).graph.as_graph_def()
    return {
        "seconds": seconds / UPDATES,
        "bytes": size / UPDATES,
        "reductions": reductions_in(graph),
    }


def every_microbatch(k: int, repeats: int) -> dict[str, float]:
    """Return the figures of a loop that reduces the gradients of every micro-batch."""
    model = make_model()
    variables, optimizer, loss_fn = model.trainable_variables, model.optimizer, loss()
    with STRATEGY.scope():
        optimizer.build(variables)

    def local(x: Any, y: Any) -> Any:
        context = tf.distribute.get_replica_context()
        sums = None
        for part in range(k):
            rows = slice(part * MICROBATCH, (part + 1) * MICROBATCH)
            with tf.GradientTape() as tape:
                value = loss_fn(y[rows], model(x[rows], training=True))
            gradients = context.all_reduce("sum", tape.gradient(value, variables))
            sums = gradients if sums is None else [a + b for a, b in zip(sums, gradients)]
        return sums

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> None:
        # As bigbatch does it: reduced already, and the same on every worker.
        sums = STRATEGY.run(local, args=(x, y))
        with outside_strategy_scope():
            optimizer.apply(
                [STRATEGY.experimental_local_results(s)[0] for s in sums], variables
            )

    distributed = STRATEGY.experimental_distribute_dataset(data(k))

    def run() -> None:
        for batch in distributed:
            step(*batch)

    seconds, size = measured(run, repeats)
    graph = step.get_concrete_function(*next(iter(distributed))).graph.as_graph_def()
    return {
        "seconds": seconds / UPDATES,
        "bytes": size / UPDATES,
        "reductions": reductions_in(graph),
    }


def local_update(k: int, repeats: int) -> float:
    """Return the seconds of an update without any communication."""
    model = wide()
    model.compile(keras.optimizers.Adam(1e-4), loss())
    bigbatch.accumulate(model, microbatch_size=MICROBATCH)
    x, y = WORK["wide"].data(MICROBATCH * k * UPDATES)
    seconds, _ = measured(
        lambda: time_of_epoch(model, x, y, batch_size=MICROBATCH * k), repeats
    )
    return seconds / UPDATES


def reduction(size: int, repeats: int) -> float:
    """Return the seconds of a reduction of so many bytes."""
    value = tf.ones([size // 4])

    @tf.function(autograph=False)
    def reduce() -> Any:
        return STRATEGY.run(
            lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.identity(value))
        )

    return measured(reduce, repeats)[0]


def main() -> None:
    repeats = 1 if "smoke" in sys.argv else 5
    sizes = SIZES[:2] if "smoke" in sys.argv else SIZES
    updates = {f"bigbatch, k = {k}": accumulated(k, repeats) for k in (1, 8)}
    updates["a reduction per micro-batch, k = 8"] = every_microbatch(8, repeats)
    weights = wide().trainable_weights
    result = {
        "updates": updates,
        "local": {str(k): local_update(k, repeats) for k in (1, 8)},
        "reductions": [(size, reduction(size, repeats)) for size in sizes],
        "gradient bytes": int(sum(4 * np.prod(weight.shape) for weight in weights)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
