"""Names of Keras 3 that are not public, in one place; `tests/test_compat.py` pins them."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

import tensorflow as tf

from bigbatch.keras.patching import replaced

BUILD_BEFORE_FIT = "_maybe_symbolic_build"
"""The method with which `fit` and `evaluate` build a model that has a strategy."""


def strategy_of(model: Any) -> Any:
    """Return the strategy in whose scope the model was made."""
    return model.distribute_strategy


def build(model: Any, data: Any) -> None:
    """Create the state of the model, its metrics, loss and optimizer for such `data`."""
    strategy = model._distribute_strategy
    if strategy is None:
        # Models that Keras cannot build without data (no `call`, ragged inputs) are built in
        # the first trace, as Keras itself does.
        with contextlib.suppress(RuntimeError, AttributeError):
            model._symbolic_build(data_batch=data)
        return
    # From one replica's part. Keras averages the parts, which fails if they differ in size.
    data = tf.nest.map_structure(
        lambda leaf: strategy.experimental_local_results(leaf)[0], data
    )
    with strategy.scope():
        model._symbolic_build(data_batch=data)


def build_before_fit(model: Any) -> Callable[..., None]:
    """Return what to replace the method `BUILD_BEFORE_FIT` by: the same, with `build`."""

    def maybe_symbolic_build(iterator: Any = None, data_batch: Any = None) -> None:
        if model._distribute_strategy is None:
            return
        if iterator is not None:
            data_batch = next(next(iter(iterator))[2])
        build(model, data_batch)

    return maybe_symbolic_build


def layers_of(model: Any) -> list[Any]:
    """Return the layers of a model, however deep they are."""
    return list(model._flatten_layers(include_self=False))


def call(model: Any, x: Any) -> Any:
    """Call the model in inference mode."""
    return model(x, training=False) if model._call_has_training_arg else model(x)


def compile_loss_of(model: Any) -> Any:
    """Return the object that adds up the losses given to `compile`, or `None`."""
    return model._compile_loss


def with_terms(
    compile_loss: Any,
    replace_loss: Callable[[Any], Any],
    record: Callable[[Any, Any], None],
    call: Callable[[], Any],
) -> Any:
    """Return what `call()` returns while the terms of `compile_loss` are watched.

    Each loss is replaced by `replace_loss(loss)`, and what its metric, if there is one, would
    be updated with is passed to `record(metric, value)` instead.
    """
    terms, metrics = compile_loss._flat_losses, compile_loss._metrics
    compile_loss._flat_losses = [term._replace(loss=replace_loss(term.loss)) for term in terms]
    compile_loss._metrics = [_Recorder(metric, record) for metric in metrics]
    try:
        return call()
    finally:
        compile_loss._flat_losses, compile_loss._metrics = terms, metrics


class _Recorder:
    """Stands in for a metric."""

    def __init__(self, metric: Any, record: Callable[[Any, Any], None]) -> None:
        self._metric, self._record = metric, record

    def update_state(self, value: Any, sample_weight: Any = None) -> None:
        del sample_weight
        self._record(self._metric, value)


@contextlib.contextmanager
def losses_of_one_replica(model: Any, replicas: int) -> Iterator[None]:
    """Return a block in which a replica's loss is its own mean.

    On several replicas Keras divides losses by their number, and multiplies again what it
    logs. The losses given to `compile` are left to `with_terms`.
    """
    if replicas == 1:
        yield
        return
    aggregate, tracker = model._aggregate_additional_loss, model._loss_tracker
    update_state = tracker.update_state

    def update(value: Any, sample_weight: Any = None) -> Any:
        return update_state(value / replicas, sample_weight=sample_weight)

    with replaced(
        model, _aggregate_additional_loss=lambda loss: aggregate(loss) * replicas
    ), replaced(tracker, update_state=update):
        yield


def mask_of(tensor: Any) -> Any:
    """Return the mask Keras has attached to a tensor, or `None`."""
    return getattr(tensor, "_keras_mask", None)
