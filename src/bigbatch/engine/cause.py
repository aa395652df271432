"""Why micro-batches differ from the full batch: causes by name, and what to do about them."""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import numpy as np

from bigbatch.backends.keras import backend_of, equalizing_layers, layers_of, optimizers_of
from bigbatch.core.outcome import GRADIENT, VARIABLE, Item
from bigbatch.core.sparse_gradients import DENSE
from bigbatch.engine.difference import LOSS, Cause, Part, differ
from bigbatch.engine.train_step_cause import of_mixed_inputs, of_other_weights


def causes_of(
    model: Any, trial: Any, found: dict[Item, float], rounding: float, *, logs_agree: bool
) -> list[Cause]:
    """Return what makes a few samples differ when they are cut.

    Args:
        model: a Keras model.
        trial: the samples, which can be run again by Python.
        found: what differs, and how much.
        rounding: the differences that mean nothing.
        logs_agree: whether all that is logged is the same, to the last digits.
    """
    if trial.is_exact:
        return [_beside_batch_norm(found)]
    parts: list[Part] = []
    with contextlib.suppress(Exception):  # there is a difference to tell of already
        parts = trial.run_by_python()
    causes = _of_layers(model, parts, rounding, trial.assigns) if parts else []
    causes += [_of_variable(item, size) for item, size in found.items() if _is(item, VARIABLE)]
    gradients = {item: size for item, size in found.items() if _is(item, GRADIENT)}
    whole = parts[0].gradients if parts else []
    if trial.makes_two_passes:
        # Of the parts by themselves, which Python has run, loss and gradients are others.
        return causes or [_beside_two_passes(found)]
    # State that differs explains gradients, if they are equal without it.
    is_state = bool(causes) and bool(whole) and _agree(whole, _added(parts[1:]), rounding)
    if gradients and not is_state and not any(one.where.startswith("layer") for one in causes):
        causes.insert(0, _of_loss(model, gradients, parts, rounding, logs_agree=logs_agree))
    return causes or [_of_log(model, item, size) for item, size in found.items()]


def of_summed_rows(model: Any, phases: Any) -> list[Cause]:
    """Return the tables whose rows are summed, where that makes another update."""
    backend, sparse = backend_of(model), phases.sparse
    named = [(f"the gradient of {one.name!r}", one.optimizer) for one in sparse.differing]
    # Where the loss is that of the whole batch, no gradients have been there yet.
    may_be_sparse = not sparse.is_known and any(map(_may_look_up, layers_of(model)))
    if sparse.choice == DENSE and may_be_sparse:
        differing = [one for one in optimizers_of(model) if not backend.adds_up_rows(one)]
        named = [("sparse gradients", type(one).__name__) for one in differing]
    return [
        Cause(
            where,
            'sparse_gradients="dense" sums rows that are looked up several times, and '
            f"{optimizer} treats them differently from their sum",
            None,
            'leave sparse_gradients="dense" out, or use SGD; or ignore this if you want the '
            "update of a dense gradient",
        )
        for where, optimizer in named
    ]


def with_equalizing(model: Any, found: list[Cause]) -> list[Cause]:
    """Return causes with the layers that equalize images, of which a few samples may miss one.

    Keras counts the values of all images at once. `RandAugment` and `AugMix` draw whether they
    equalize, so they may not do so where samples are tried.
    """
    causes = list(found)
    for layer in equalizing_layers(model):
        where = f"layer {layer.name!r} ({type(layer).__name__})"
        tried = next((one for one in causes if one.where == where), None)
        cause = Cause(
            where,
            "it equalizes images with the values of all images of a micro-batch, as "
            "keras.layers.Equalization does",
            tried and tried.size,
            "apply it to whole batches before fit(), with map() of a data set in split mode",
        )
        if tried is None:
            causes.append(cause)
        else:
            causes[causes.index(tried)] = cause
    return causes


def _may_look_up(layer: Any) -> bool:
    """Say whether a layer may have a sparse gradient: an embedding, or one that is unknown."""
    is_known = type(layer).__module__.split(".")[0] in ("keras", "tf_keras")
    return not is_known or type(layer).__name__ == "Embedding"


def _beside_batch_norm(found: dict[Item, float]) -> Cause:
    """Return what is known of a difference where micro-batches run in stages."""
    item = max(found, key=lambda one: found[one])
    return Cause(
        f"{item.kind} {item.name!r}",
        "it differs although batch normalisation is exact: something else mixes samples, or "
        "changes with every micro-batch",
        found[item],
        "pass coupled=True if it is the loss of compile() or compute_loss(); otherwise find "
        'the layer with batch_norm="pooled" and check="raise", and use '
        "bigbatch.cross_microbatch_sum or bigbatch.cross_microbatch_gather in it",
    )


def _beside_two_passes(found: dict[Item, float]) -> Cause:
    """Return what is known of a difference where the loss is that of the whole batch."""
    item = max(found, key=lambda one: found[one])
    return Cause(
        f"{item.kind} {item.name!r}",
        "it differs although the loss is computed on the whole batch: something in call() "
        "mixes samples, or changes with every micro-batch",
        found[item],
        "compute every sample separately in call()",
    )


def _is(item: Item, kind: str) -> bool:
    return item.kind == kind


def _of_layers(
    model: Any, parts: list[Part], rounding: float, assigns: Callable[[Any], bool]
) -> list[Cause]:
    """Return the layers whose outputs depend on other samples, innermost ones only.

    `assigns` says whether `train_step` itself assigns a variable of a layer.
    """
    shares = [one.share for one in parts[1:]]
    found: dict[int, Cause] = {}
    for calls in zip(*(one.calls for one in parts)):
        layer = calls[0].layer
        if any(call.layer is not layer for call in calls):
            return []  # not the same program: nothing can be compared
        inner = {id(one) for one in layers_of(layer)} if layer is not model else set(found)
        if id(layer) in found or inner & set(found):
            continue
        if differ([call.inputs for call in calls], shares) > rounding:
            continue  # by what another layer did
        size = differ([call.outputs for call in calls], shares)
        if size > rounding:
            make = _assigned if any(map(assigns, layer.weights)) else _mixing
            found[id(layer)] = make(model, layer, size)
            continue
        size = differ([call.losses for call in calls], shares)
        if size > rounding:
            found[id(layer)] = _adding(layer, size)
    return list(found.values())


def _mixing(model: Any, layer: Any, size: float) -> Cause:
    where = f"layer {layer.name!r} ({type(layer).__name__})"
    if backend_of(model).has_seeds(layer):
        return Cause(
            where,
            "it draws random numbers that cannot equal the full batch",
            size,
            "draw uniform or normal numbers with keras.random and a SeedGenerator, or use a "
            "layer that mixes samples (MixUp, CutMix) before fit(), by map() of a data set of "
            "whole batches in split mode, or ignore this if other numbers of the same "
            "distribution are good enough",
        )
    return Cause(
        where,
        "it mixes the samples of a batch, and a micro-batch has fewer of them",
        size,
        "compute every sample separately in call(), and compare samples in the loss passed to "
        "compile(), which is computed on the whole batch; or, with Keras 3 on TensorFlow or "
        'JAX, mix them with bigbatch.cross_microbatch_sum and batch_norm="exact"',
    )


def _assigned(model: Any, layer: Any, size: float) -> Cause:
    return Cause(
        f"train_step of {type(model).__name__}",
        f"it assigns values that depend on samples to weights of the layer {layer.name!r}",
        size,
        "change weights with optimizer.apply: there may be several calls, and each gets the "
        "gradient of the whole batch",
    )


def _adding(layer: Any, size: float) -> Cause:
    return Cause(
        f"layer {layer.name!r} ({type(layer).__name__})",
        "its add_loss() is not a mean over samples",
        size,
        "pass a mean over samples to add_loss(); let call() return what compares samples, and "
        "add that to the loss in compute_loss(), which is computed on the whole batch; or "
        "compute sums of the whole batch with bigbatch.cross_microbatch_sum, and pass "
        'batch_norm="exact"',
    )


def _of_variable(item: Item, size: float) -> Cause:
    return Cause(
        f"variable {item.name!r}",
        "every micro-batch changes it, and the full batch changes it once",
        size,
        "assign it once per update, in a callback; or, with Keras 3 on TensorFlow, compute it "
        "from all samples by bigbatch.cross_microbatch_sum or cross_microbatch_gather, with "
        'batch_norm="exact"',
    )


def _of_log(model: Any, item: Item, size: float) -> Cause:
    if not backend_of(model).has_custom_train_step(model):
        return Cause(
            f"metric {item.name!r}",
            "its result for the whole batch cannot be computed from results of micro-batches",
            size,
            "read it from evaluate(); the weights are correct",
            item.name,
        )
    return Cause(
        f"{item.kind} {item.name!r}",
        "train_step returns it, and it is not a mean over samples",
        size,
        "update a metric of the model with one value per sample and return its result()",
    )


def _of_loss(
    model: Any,
    gradients: dict[Item, float],
    parts: list[Part],
    rounding: float,
    *,
    logs_agree: bool,
) -> Cause:
    """Say what is wrong with the loss, or what `train_step` does with its gradients."""
    backend = backend_of(model)
    item = max(gradients, key=lambda one: gradients[one])
    of = f"the gradient of {item.name!r} differs most"
    size = gradients[item]
    if not backend.has_custom_train_step(model):
        if logs_agree:
            return Cause(
                f"the gradient of {item.name!r}",
                "it differs, although the loss and all logged values are equal",
                size,
                "report this model: bigbatch does not know the cause",
                subject=LOSS,
            )
        return Cause(
            f"loss {backend.name_of_loss(model)}",
            "it compares samples, or divides by something other than their number or their "
            f"weights; {of}",
            size,
            "pass coupled=True to accumulate(), which computes it on the whole batch",
            subject=LOSS,
        )
    mixed = of_mixed_inputs(model, parts, rounding)
    if mixed is not None:
        return mixed
    where = f"train_step of {type(model).__name__}"
    if logs_agree:
        return Cause(
            where,
            "its logs are equal and its gradients are not, as if it changed them before it "
            f"applies them (clipped or normalised by hand); {of}",
            size,
            "let the optimizer do it: global_clipnorm=, clipnorm= or clipvalue=",
        )
    return of_other_weights(model, parts, rounding, of) or Cause(
        where,
        f"its loss compares samples, or divides by something other than their number; {of}",
        size,
        "write the forward pass in call() and the loss in compile(loss=...) or compute_loss(), "
        "and remove train_step: then the loss is computed on the whole batch",
        subject=LOSS,
    )


def _added(parts: list[Part]) -> list[Any]:
    """Return the sum of the gradients of parts, which are weighted."""
    return [
        None if any(value is None for value in values) else sum(values)
        for values in zip(*(one.gradients for one in parts))
    ]


def _agree(some: list[Any], others: list[Any], rounding: float) -> bool:
    """Say whether gradients are the same, taken together."""
    pairs = [(a, b) for a, b in zip(some, others) if a is not None and b is not None]
    if not pairs:
        return False
    norm = np.sqrt(sum(float(np.sum(np.square(a))) for a, _ in pairs))
    difference = np.sqrt(sum(float(np.sum(np.square(a - b))) for a, b in pairs))
    return bool(difference <= rounding * norm)
