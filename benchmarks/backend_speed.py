"""Time per update in `fit` on JAX or torch, relative to the limit and to the full batch.

`KERAS_BACKEND` says which: every backend has a process of its own.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Callable

import keras
import numpy as np

import bigbatch
from benchmarks.measuring import Settings, mean_ratio, table, with_models, write
from benchmarks.work import Work, loss, time_of_epoch

MICROBATCH, K, MODELS = 16, 8, 3
BATCH = MICROBATCH * K
FULL_BATCH, LIMIT, KERAS = "full batch", "limit", "Keras' own"
HEADINGS = (
    "work",
    "candidate",
    "relative to the limit",
    "to the full batch",
    "samples per second",
)


def run(settings: Settings, name: str, title: str, packages: tuple[str, ...]) -> None:
    """Measure, and write a page of this name."""
    limit = {"jax": jax_limit, "torch": torch_limit}[keras.backend.backend()]
    rows: list[list[str]] = []
    for work in settings.works("convolutional", "transformer", "wide"):
        keras.utils.set_random_seed(0)
        x, y = work.data(BATCH * work.updates)
        make = functools.partial(_runs, work, limit, x, y)
        times = with_models(make, min(MODELS, settings.rounds), settings.rounds)
        for candidate, values in times.items():
            ratios = [mean_ratio(values, times[one]) for one in (LIMIT, FULL_BATCH)]
            rows.append([work.name, candidate, *ratios, f"{len(x) / np.median(values):,.0f}"])
            print("  ".join(rows[-1]), flush=True)
    notes = [
        f"Micro-batches of {MICROBATCH}, k = {K}, Adam, float32, in `fit`. Mean and standard "
        f"error over {MODELS} models of each kind, of the median of the ratios of each round; "
        "candidates take turns. The limit is a loop by hand, without `fit`, that makes the "
        "same passes and one update, and adds nothing up. Samples per second change with the "
        "machine; ratios hardly do."
    ]
    write(settings, name, title, table(HEADINGS, rows), notes, packages)


def _runs(work: Work, limit: Any, x: Any, y: Any) -> dict[str, Callable[[], float]]:
    """Return one run of new models for each candidate."""

    def fit(size: int, own_steps: int | None = None, **setting: Any) -> Any:
        model = work.make_model()
        model.compile(_optimizer(gradient_accumulation_steps=own_steps), loss())
        if setting:
            bigbatch.accumulate(model, **setting)
        return functools.partial(time_of_epoch, model, x, y, batch_size=size)

    return {
        FULL_BATCH: fit(BATCH),
        LIMIT: limit(work, x, y),
        "bigbatch, split": fit(BATCH, microbatch_size=MICROBATCH),
        "bigbatch, window": fit(MICROBATCH, accumulation_steps=K),
        KERAS: fit(MICROBATCH, K),
    }


def _optimizer(**options: Any) -> Any:
    return keras.optimizers.Adam(1e-4, **options)


def jax_limit(work: Work, x: Any, y: Any) -> Callable[[], float]:
    """Return a loop of k jitted passes and one jitted update."""
    import jax

    model, optimizer, loss_of = work.make_model(), _optimizer(), loss()
    optimizer.build(model.trainable_variables)
    groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    state = [[variable.value for variable in group] for group in groups]

    def forward(weights: Any, others: Any, x: Any, y: Any) -> Any:
        outputs, others = model.stateless_call(weights, others, x, training=True)
        return loss_of(y, outputs), others

    one = jax.jit(jax.value_and_grad(forward, has_aux=True))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(slots: Any, weights: Any, gradients: Any) -> Any:
        return optimizer.stateless_apply(slots, gradients, weights)

    def epoch() -> float:
        weights, others, slots = state
        start = time.perf_counter()
        for first in range(0, len(x), MICROBATCH):
            part = slice(first, first + MICROBATCH)
            (_, others), gradients = one(weights, others, x[part], y[part])
            if (first + MICROBATCH) % BATCH == 0:
                weights, slots = update(slots, weights, gradients)
        jax.block_until_ready(weights)
        state[:] = weights, others, slots
        return time.perf_counter() - start

    return epoch


def torch_limit(work: Work, x: Any, y: Any) -> Callable[[], float]:
    """Return a loop of k passes and one update."""
    import torch

    model, optimizer, loss_of = work.make_model(), _optimizer(), loss()
    optimizer.build(model.trainable_variables)
    weights = model.trainable_variables

    def epoch() -> float:
        start = time.perf_counter()
        for first in range(0, len(x), MICROBATCH):
            part = slice(first, first + MICROBATCH)
            model.zero_grad()
            outputs = model(torch.from_numpy(x[part]), training=True)
            loss_of(torch.from_numpy(y[part]), outputs).backward()
            if (first + MICROBATCH) % BATCH == 0:
                with torch.no_grad():
                    optimizer.apply([one.value.grad for one in weights], weights)
        return time.perf_counter() - start

    return epoch
