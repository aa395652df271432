"""What can be counted in place of timing: graph operations, traces, bytes, compilations.

`python -m benchmarks counts` writes `results/counts.json`, with which CI compares what it
counts (`tests/test_counts.py`): a slow-down by accident is seen in review. `python -m
benchmarks.counts` prints what the backend of `KERAS_BACKEND` counts.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

MICROBATCH, K = 4, 4
BATCH = MICROBATCH * K
TOLERANCE = {
    "operations": 0.01,
    "traced": 0.01,
    "traces": 0.0,
    "bytes": 0.3,
    "compilations": 0.0,
}
"""How far a count may be from the noted one, relative to it.

The allocator hands out up to twice what is asked for; one more gradient set of the wide model
is half of what is noted. The other counts are the same in every run.
"""
PACKAGES = {"tensorflow": ("tensorflow-cpu", "keras"), "jax": ("jax", "keras")}
SETTINGS = {"split": {"microbatch_size": MICROBATCH}, "window": {"accumulation_steps": K}}


def run(settings: Any) -> None:
    """Count on every backend, and write `counts.json`."""
    counted = {backend: counted_on(backend) for backend in PACKAGES}
    settings.results.mkdir(exist_ok=True)
    path = settings.results / "counts.json"
    path.write_text(json.dumps(counted, indent=1) + "\n")
    print(f"wrote {path}")


def counted_on(backend: str) -> dict[str, Any]:
    """Return what a process of its own counts on a backend, with the versions it has."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPU_ALLOCATOR_USE_BFC": "true"}
    command = [sys.executable, "-m", "benchmarks.counts"]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        command, env=environment, cwd=root, stdout=subprocess.PIPE, check=True, text=True
    )
    return json.loads(done.stdout)


def differences(noted: dict[str, Any], counted: dict[str, Any]) -> list[str]:
    """Return what is further from the noted counts than it may be, in words."""
    found = []
    for name in sorted({*noted, *counted} - {"versions"}):
        before, now = noted.get(name, {}), counted.get(name, {})
        for what in sorted({*before, *now}):
            pair = before.get(what), now.get(what)
            if None in pair or abs(pair[1] - pair[0]) > TOLERANCE[what] * pair[0]:
                found.append(f"{name}: {what} {pair[0]} noted, {pair[1]} counted")
    return found


def versions(backend: str) -> dict[str, str]:
    """Return the versions that the counts on a backend depend on."""
    return {name: importlib.metadata.version(name) for name in PACKAGES[backend]}


def count_on_tensorflow() -> dict[str, Any]:
    """Return counts for some models, in `fit` and in loops.

    `operations`: those of one micro-batch, the body of a loop, with the functions it calls at
    every place where they are called; without a loop in a graph those of the update, too.
    `traced`: all operations that are put into any graph until the first update is made.
    `traces`: how often Python runs the model meanwhile. `bytes`: the peak of an update.
    """
    import tensorflow as tf

    from benchmarks.work import VOCABULARY, Work, convolutional, embedding, transformer, wide

    tf.config.threading.set_inter_op_parallelism_threads(1)
    works = {
        "wide": Work(functools.partial(wide, 512)),
        "convolutional": Work(convolutional),
        "transformer": Work(transformer, VOCABULARY),
        "embedding": Work(functools.partial(embedding, 50_000), 2_000),
    }
    counted: dict[str, Any] = {"versions": versions("tensorflow")}
    for name in ("wide", "convolutional"):  # of many weights, of many activations
        for way, make in WAYS.items():
            counted[f"{name}, {way}"] = {"bytes": count_bytes(works[name], make)}
    for name, work in works.items():
        for way, make in WAYS.items():
            counted.setdefault(f"{name}, {way}", {}).update(count_graphs(work, make))
    return counted


def count_bytes(work: Any, make: Callable[..., Callable[[], Any]]) -> int:
    """Return the peak of an update."""
    import gc

    import tensorflow as tf

    from benchmarks.measuring import peak_bytes
    from benchmarks.work import loss

    gc.collect()
    return peak_bytes(make(work.make_model(), loss(), *map(tf.constant, work.data(BATCH))))


def count_graphs(work: Any, make: Callable[..., Callable[[], Any]]) -> dict[str, int]:
    """Return what is put into graphs until the first update of a new model is made."""
    import tensorflow as tf

    from benchmarks.work import loss, traces_of

    model = work.make_model()
    update = make(model, loss(), *map(tf.constant, work.data(BATCH)))
    before = traces_of(model)
    with graphs_made() as graphs:
        update()
    return {
        "operations": operations(graphs),
        "traced": sum(len(graph.get_operations()) for graph in graphs),
        "traces": traces_of(model) - before,
    }


class graphs_made(list):  # noqa: N801, it is used as a function
    """A block in which the list gets every graph of a function that is made."""

    def __enter__(self) -> graphs_made:
        """Start to listen."""
        from tensorflow.python.framework.func_graph import FuncGraph

        self._kind, self._init = FuncGraph, FuncGraph.__init__
        note = self.append

        @functools.wraps(self._init)
        def init(graph: Any, *arguments: Any, **options: Any) -> None:
            note(graph)
            self._init(graph, *arguments, **options)

        FuncGraph.__init__ = init
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop to listen."""
        self._kind.__init__ = self._init


def operations(graphs: list[Any]) -> int:
    """Return the operations of the largest loop body; of all graphs, if none has a loop."""
    roots = [one for one in graphs if not hasattr(one.outer_graph, "outer_graph")]
    bodies, sizes = zip(*map(_body_and_all, roots))
    return max(bodies) or sum(sizes)


def _body_and_all(graph: Any) -> tuple[int, int]:
    """Return how many operations the largest loop body has, and how many the graph has."""
    made = graph.as_graph_def()
    functions = {one.signature.name: one.node_def for one in made.library.function}

    @functools.cache
    def of(name: str) -> int:
        return size(functions[name])

    def size(nodes: Any) -> int:
        return sum(1 + sum(map(of, called(node))) for node in nodes)

    every = [node for nodes in (made.node, *functions.values()) for node in nodes]
    bodies = [of(node.attr["body"].func.name) for node in every if "body" in node.attr]
    return max(bodies, default=0), size(made.node)


def called(node: Any) -> list[str]:
    """Return the names of the functions that an operation calls."""
    found = []
    for value in node.attr.values():
        found += [one.name for one in (value.func, *value.list.func) if one.name]
    return found


def fit(mode: str, model: Any, loss: Any, x: Any, y: Any) -> Callable[[], Any]:
    """Return an update in `fit`."""
    import keras
    import tensorflow as tf

    import bigbatch

    model.compile(keras.optimizers.SGD(0.1), loss)
    bigbatch.accumulate(model, **SETTINGS[mode], check="off")
    size = BATCH if mode == "split" else MICROBATCH
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(size)
    return lambda: model.fit(data, verbose=0)


def value_and_gradients(model: Any, loss: Any, x: Any, y: Any) -> Callable[[], Any]:
    """Return an update by `bigbatch.value_and_gradients`."""
    import keras
    import tensorflow as tf

    import bigbatch

    optimizer, variables = keras.optimizers.SGD(0.1), model.trainable_variables
    optimizer.build(variables)

    @tf.function(autograph=False)
    def update() -> None:
        _, gradients = bigbatch.value_and_gradients(
            lambda x, y: loss(y, model(x, training=True)),
            variables,
            (x, y),
            microbatch_size=MICROBATCH,
        )
        optimizer.apply(gradients, variables)

    return update


def accumulator(model: Any, loss: Any, x: Any, y: Any) -> Callable[[], Any]:
    """Return an update by `bigbatch.GradientAccumulator`."""
    import keras
    import tensorflow as tf

    import bigbatch

    optimizer, variables = keras.optimizers.SGD(0.1), model.trainable_variables
    one = bigbatch.GradientAccumulator(optimizer, variables, accumulation_steps=K)

    @tf.function(autograph=False)
    def micro_batch(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        one.accumulate(tape.gradient(value, variables))

    def update() -> None:
        for first in range(0, BATCH, MICROBATCH):
            micro_batch(x[first : first + MICROBATCH], y[first : first + MICROBATCH])
            one.apply_when_full()

    return update


WAYS: dict[str, Callable[..., Callable[[], Any]]] = {
    "split": functools.partial(fit, "split"),
    "window": functools.partial(fit, "window"),
    "value_and_gradients": value_and_gradients,
    "GradientAccumulator": accumulator,
}
"""The ways to train that are counted."""


def count_on_jax() -> dict[str, Any]:
    """Return how many programs are compiled in `fit` until the first two updates are made."""
    import jax
    import keras

    import bigbatch
    from benchmarks.work import SMALLEST, loss

    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if "backend_compile" in event else None
    )
    counted: dict[str, Any] = {"versions": versions("jax")}
    x, y = SMALLEST.data(2 * BATCH)
    # Plain Keras first: what it compiles, too, is compiled then.
    for mode, setting in {"plain": {}, **SETTINGS}.items():
        model = SMALLEST.make_model()
        model.compile(keras.optimizers.SGD(0.1), loss())
        if setting:
            bigbatch.accumulate(model, **setting, check="off")
        compiled.clear()
        model.fit(x, y, batch_size=MICROBATCH if mode == "window" else BATCH, verbose=0)
        counted[f"tiny, {mode}"] = {"compilations": len(compiled)}
    return counted


if __name__ == "__main__":
    on = {"tensorflow": count_on_tensorflow, "jax": count_on_jax}
    print(json.dumps(on[os.environ.get("KERAS_BACKEND", "tensorflow")]()))
