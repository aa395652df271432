"""The lines before training: how batches are made up, and how layers treat them."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Iterable

from bigbatch.backends.keras import backend_of, equalizing_layers
from bigbatch.core.exact import HOST, ExactBatchNorm, exact_choice
from bigbatch.core.memory import readable
from bigbatch.engine.batch_norm import batch_norms_of, is_pooled
from bigbatch.engine.settings import Setting
from bigbatch.errors import ArgumentError


@dataclass(frozen=True)
class Epoch:
    """The batches that `fit` is given in one epoch; `None` is not known."""

    batches: int | None
    batch_size: int | None
    rest: int | None
    """The samples of the last batch, if it is smaller."""


def banner(model: Any, setting: Setting, epoch: Epoch) -> str:
    """Return a line or two about how a model will train."""
    replicas = backend_of(model).replicas(model)
    describe = _split if setting.microbatch_size is not None else _window
    parts = describe(setting, epoch, replicas)
    if setting.coupled is True:
        is_exact = exact_choice(setting.batch_norm) is not None
        parts.append(f"{'outputs gathered' if is_exact else 'two passes'} for a coupled loss")
    variables = model.trainable_variables if model.built else []
    count = sum(_width(v.dtype) * math.prod(v.shape) for v in variables)
    if count:
        parts.append(f"gradient buffer {readable(count)}")
    lines = [", ".join(parts)]
    exact, norms = exact_choice(setting.batch_norm), batch_norms_of(model)
    if exact and norms:
        lines.append(_exact_line(exact, norms))
    size, batch = setting.microbatch_size, epoch.batch_size
    size = None if isinstance(size, str) else size
    is_plain = setting.accumulation_steps == 1 or (size and batch and size >= batch)
    if not is_plain:
        lines += _kept_by_layers(model, setting)
    return "\n".join(f"bigbatch: {line}" for line in lines)


def warn_of_conflicts(
    model: Any, setting: Setting, epoch: Epoch, callbacks: Iterable[Any]
) -> None:
    """Warn if something else that was asked for works against accumulation."""
    size, steps = setting.microbatch_size, setting.accumulation_steps
    replicas = backend_of(model).replicas(model)
    if isinstance(size, int) and _is_nothing_cut(size, epoch, replicas):
        each = f"{epoch.batch_size} samples" + (
            f" on {replicas} replicas" if replicas > 1 else ""
        )
        _warn(
            f"nothing is accumulated: batches of {each} are no larger than "
            f"microbatch_size={size}. Pass a larger batch_size to fit(), or a smaller "
            "microbatch_size to accumulate()."
        )
    if not isinstance(steps, int) or steps == 1:
        return
    if epoch.batches is not None and steps > epoch.batches:
        _warn(
            f"accumulation_steps={steps} is more than the {epoch.batches} batches of an epoch: "
            "each epoch makes one update from all of them. Choose a smaller number, or smaller "
            "batches."
        )
    for callback in callbacks:
        frequency = getattr(callback, "save_freq", None)
        if isinstance(frequency, int) and frequency % steps:
            _warn(
                f"{type(callback).__name__}(save_freq={frequency}) saves in the middle of a "
                f"window: gradients accumulated since the last update are not saved. Choose a "
                f"multiple of accumulation_steps={steps}, or 'epoch'."
            )


def _width(dtype: Any) -> int:
    """Return the bytes of a number in which gradients of a type are added up."""
    return 8 if "64" in str(dtype) else 4


def _warn(message: str) -> None:
    warnings.warn(f"bigbatch: {message}", stacklevel=2)


def _split(setting: Setting, epoch: Epoch, replicas: int) -> list[str]:
    size, batch = setting.microbatch_size, epoch.batch_size
    if not isinstance(size, int):
        parts = ["each batch in micro-batches as large as the memory allows"]
    else:
        parts = [f"each batch in micro-batches of {size}"]
    if isinstance(size, int) and batch is not None:
        share = -(-batch // replicas)
        count, size = -(-share // size), min(size, share)
        exact = count * size * replicas == batch
        parts = [f"batch {batch} = {_product(size, count, replicas, is_exact=exact)}"]
    if epoch.batches is not None:
        parts.append(f"{_plural(epoch.batches, 'update')} per epoch")
        if epoch.rest:
            parts.append(f"the last of {_plural(epoch.rest, 'sample')}")
    return parts


def _is_nothing_cut(size: int, epoch: Epoch, replicas: int) -> bool:
    """Say whether all batches fit into one micro-batch, and not because data is short."""
    batch = epoch.batch_size
    return batch is not None and epoch.batches != 1 and -(-batch // replicas) <= size


def _window(setting: Setting, epoch: Epoch, replicas: int) -> list[str]:
    steps, batch = setting.accumulation_steps, epoch.batch_size
    if not isinstance(steps, int):
        return ["batches per update by a schedule", "an epoch ends with an update"]
    parts = [f"{_plural(steps, 'batch', 'es')} of the data set per update"]
    if batch is not None:
        parts = [f"batch {batch * steps} = {_product(batch, steps, 1)}"]
        if replicas > 1:
            parts[0] += f" over {replicas} replicas"
    if epoch.batches is not None:
        updates, rest = -(-epoch.batches // steps), epoch.batches % steps
        parts.append(f"{_plural(updates, 'update')} per epoch")
        if rest:
            parts.append(f"the last of {_plural(rest, 'micro-batch', 'es')}")
    return parts


def _product(size: int, count: int, replicas: int, *, is_exact: bool = True) -> str:
    samples, microbatches = _plural(size, "sample"), _plural(count, "micro-batch", "es")
    text = f"{samples} × {microbatches}" if is_exact else f"{microbatches} of up to {samples}"
    return text + (f" × {replicas} replicas" if replicas > 1 else "")


def _could_be_exact(model: Any, setting: Setting) -> bool:
    """Say whether layers that normalise with micro-batches could do so with the batch."""
    norms = batch_norms_of(model)
    if setting.batch_norm != "pooled" or not norms:
        return False
    try:
        backend_of(model).refuse_exact(model, norms)
    except ArgumentError:
        return False
    return True


def _exact_line(exact: ExactBatchNorm, norms: list[Any]) -> str:
    """Say which layers normalise with the statistics of the whole batch."""
    where = ", with boundaries in the memory of the host" if exact.storage == HOST else ""
    return f"exact batch normalisation: {_names(norms)}{where}"


def _kept_by_layers(model: Any, setting: Setting) -> list[str]:
    """Say how layers normalise, and which of them draw their own random numbers."""
    batch_norm = setting.batch_norm
    norms = [] if exact_choice(batch_norm) else batch_norms_of(model)
    pooled = [layer for layer in norms if is_pooled(layer, batch_norm)]
    others = [layer for layer in norms if layer not in pooled]
    could_be = _could_be_exact(model, setting)
    exact = ' (batch_norm="exact" equals the full batch)' if could_be else ""
    normalises = "BatchNormalization normalises with micro-batch statistics"
    frozen = "BatchNormalization is frozen"
    moving = f"{normalises} and its moving statistics follow every micro-batch{exact}"
    what = {
        f"{normalises}; its moving statistics are pooled over the batch{exact}": pooled,
        frozen if batch_norm == "frozen" else moving: others,
        # The check says it, if there is one.
        "images are equalized with the values of a micro-batch": (
            equalizing_layers(model) if setting.check == "off" else []
        ),
        "random draws differ from the full batch": backend_of(model).layers_with_other_draws(
            model, is_split=setting.microbatch_size is not None
        ),
    }
    return [f"{text}: {_names(layers)}" for text, layers in what.items() if layers]


def _names(layers: list[Any], shown: int = 5) -> str:
    names = ", ".join(layer.name for layer in layers[:shown])
    return names + (f" and {len(layers) - shown} more" if len(layers) > shown else "")


def _plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}" + (ending if count != 1 else "")
