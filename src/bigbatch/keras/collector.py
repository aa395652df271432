"""Take the gradients that a `train_step` hands to its optimizers, without an update."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Callable, Iterator

from bigbatch.errors import ContextError, explain
from bigbatch.keras import compat


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizers that a `train_step` may use."""
    return _held_by(model, compat.keras_of(model).is_optimizer)


def metrics_of(model: Any) -> list[Any]:
    """Return the metrics of a model, also those that its own `metrics` leaves out."""
    held = _held_by(model, lambda one: hasattr(one, "update_state") and hasattr(one, "result"))
    return list({id(one): one for one in (*model.metrics, *held)}.values())


def _held_by(model: Any, is_wanted: Callable[[Any], bool]) -> list[Any]:
    """Return what is an attribute of the model or its layers, or stands in a list or dict."""
    unique: dict[int, Any] = {}
    for owner in (model, *compat.layers_of(model)):
        for value in list(vars(owner).values()):
            values = value.values() if isinstance(value, dict) else value
            for one in values if isinstance(value, (list, tuple, dict)) else (value,):
                if is_wanted(one):
                    unique.setdefault(id(one), one)
    return list(unique.values())


class Collected:
    """What one optimizer was given in one micro-batch."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.variables: list[Any] = []
        self.gradients: list[Any] = []
        self.is_weighted = False
        """Whether the weight of the micro-batch is in the gradients already."""


@contextlib.contextmanager
def collecting(
    model: Any, weigh: Callable[[Any], Any], keep: Callable[[Collected], None]
) -> Iterator[list[Collected]]:
    """Return a block in which `optimizer.apply` collects gradients and changes no weight.

    `weigh(loss)` multiplies a loss by the weight of the micro-batch. It is applied where
    Keras scales the loss, just before the backward pass; a `train_step` that does not scale
    its loss gives gradients that have still to be weighted. `keep(collected)` is called as
    soon as an optimizer has been given its gradients.
    """
    keras = compat.keras_of(model)
    optimizers = optimizers_of(model)
    collected = [Collected(optimizer) for optimizer in optimizers]
    with contextlib.ExitStack() as stack:
        for one in collected:
            collect = _collect(one, keras.name_of(one.optimizer), keep)
            weighted = _weigh(one, weigh)
            stack.enter_context(keras.collecting(one.optimizer, collect, weighted))
        yield collected
    collected[:] = [one for one in collected if one.variables]
    # Without trainable weights Keras warns, and there is nothing to update.
    if not collected and model.trainable_weights:
        raise ContextError(_nothing_to_accumulate(model, optimizers))
    if len(collected) > 1:
        names = ", ".join(keras.name_of(one.optimizer) for one in collected)
        warnings.warn(
            f"bigbatch: train_step uses several optimizers ({names}). All of them accumulate, "
            "and update together, each from gradients of the weights before the batch.",
            stacklevel=2,
        )


def _nothing_to_accumulate(model: Any, optimizers: list[Any]) -> str:
    name_of = compat.keras_of(model).name_of
    names = ", ".join(repr(name_of(one)) for one in optimizers) or "none found"
    return explain(
        received=f"a train_step that hands no gradients to an optimizer of the model ({names})",
        expected="one call of optimizer.apply_gradients or optimizer.apply per batch",
        fix="use optimizers that are attributes of the model or its layers",
    )


def _collect(
    collected: Collected, name: str, keep: Callable[[Collected], None]
) -> Callable[[list[Any], list[Any]], None]:
    def collect(gradients: list[Any], variables: list[Any]) -> None:
        if collected.variables:
            raise ContextError(
                explain(
                    received=f"a train_step that applies gradients of the optimizer {name!r} "
                    "twice",
                    expected="one update per optimizer and batch",
                    fix="add the losses up and apply their gradients once, or give the second "
                    "update an optimizer of its own",
                )
            )
        collected.variables, collected.gradients = variables, gradients
        keep(collected)

    return collect


def _weigh(collected: Collected, weigh: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def weighted(loss: Any) -> Any:
        collected.is_weighted = True
        return weigh(loss)

    return weighted
