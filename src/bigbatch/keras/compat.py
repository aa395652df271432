"""Names of Keras 3 that are not public, in one place; `tests/test_compat.py` pins them."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

import keras
import tensorflow as tf

from bigbatch.keras.patching import replaced

BUILD_BEFORE_FIT = "_maybe_symbolic_build"
"""The method with which `fit` and `evaluate` build a model that has a strategy."""

END_OF_EPOCH = "_get_metrics_result_or_logs"
"""The method with which `fit` turns the logs of the last batch into those of the epoch."""


def strategy_of(model: Any) -> Any:
    """Return the strategy in whose scope the model was made."""
    return model.distribute_strategy


def is_multi_worker(model: Any) -> bool:
    """Say whether a model is trained by several processes together."""
    return isinstance(strategy_of(model), tf.distribute.MultiWorkerMirroredStrategy)


def build(model: Any, data: Any) -> bool:
    """Create the state of a model, its metrics, loss and optimizer for such `data`.

    Returns:
        Whether Keras can. What it cannot build without data (no `call`, ragged inputs) is
        built in the first trace, as Keras itself does.
    """
    if model._distribute_strategy is None:
        try:
            model._symbolic_build(data_batch=data)
        except (RuntimeError, AttributeError):
            return False
    return True  # under a strategy before it is trained: `build_under_strategy`


def build_under_strategy(model: Any, iterator: Any, data_batch: Any) -> None:
    """Do what the method `BUILD_BEFORE_FIT` does, from one replica's part of the data.

    Keras averages the parts, which fails if they differ in size or on several workers.
    """
    strategy = model._distribute_strategy
    if strategy is None:
        return
    if iterator is not None:
        data_batch = next(next(iter(iterator))[2])
    data_batch = tf.nest.map_structure(
        lambda leaf: strategy.experimental_local_results(leaf)[0], data_batch
    )
    with strategy.scope():
        model._symbolic_build(data_batch=data_batch)


def state_of(model: Any) -> list[Any]:
    """Return the variables of a model that training changes beside its weights.

    Metrics, moving statistics and other weights that were made not to be trained, and the
    state of random layers; not weights that are frozen.
    """
    variables = list(model.metrics_variables)
    for layer in (model, *layers_of(model)):
        variables += layer._non_trainable_variables
        variables += [generator.state for generator in layer._seed_generators]
    return list({id(variable): variable.value for variable in variables}.values())


def random_layers_of(model: Any) -> list[Any]:
    """Return the layers that draw random numbers."""
    return [layer for layer in layers_of(model) if layer._seed_generators]


def batches_of(epoch_iterator: Any) -> tuple[int | None, int | None, int | None]:
    """Return the number of batches in an epoch, their size, and that of a smaller last one."""
    adapter = epoch_iterator.data_adapter
    size = rest = None
    with contextlib.suppress(NotImplementedError):  # adapters may not know
        size = adapter.batch_size
        if not epoch_iterator.steps_per_epoch:
            rest = adapter.partial_batch_size
    if size is None:  # a data set may still know it
        leaf = tf.nest.flatten(epoch_iterator._distributed_dataset.element_spec)[0]
        if isinstance(leaf, tf.TensorSpec) and leaf.shape.rank:
            size = leaf.shape[0]
    return epoch_iterator.num_batches, size, rest


def certain_batches_of(epoch_iterator: Any) -> int | None:
    """Return after how many batches every epoch ends, or `None` if that is not certain.

    Some epochs are shorter if the data ends before `steps_per_epoch`, or not at a multiple.
    """
    if epoch_iterator.steps_per_epoch and epoch_iterator.data_adapter.num_batches:
        return None
    return epoch_iterator.num_batches


def layers_of(model: Any) -> list[Any]:
    """Return the layers of a model, however deep they are."""
    return list(model._flatten_layers(include_self=False))


def train_step_of(model: Any) -> Callable[[Any], Any]:
    """Return the model's `train_step`; if it is a `tf.function`, the Python function in it.

    Gradients could not get out of a graph of its own.
    """
    return getattr(model.train_step, "python_function", model.train_step)


def has_own_train_step(model: Any) -> bool:
    """Say whether the model does not leave `train_step` to Keras."""
    return type(model).train_step is not keras.Model.train_step or "train_step" in vars(model)


def uses_inputs_after_call(model: Any) -> bool:
    """Say whether the model may look at its inputs when it computes the loss or metrics."""
    return any(
        getattr(type(model), name) is not getattr(keras.Model, name) or name in vars(model)
        for name in ("compute_loss", "compute_metrics")
    )


def call(model: Any, x: Any, *, training: bool) -> Any:
    """Call the model as `train_step` does, in training or inference mode."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def without_training(layer: Any) -> contextlib.AbstractContextManager[None]:
    """Return a block in which a layer does as in inference, if it knows the difference."""
    if not layer._call_has_training_arg:
        return contextlib.nullcontext()
    call = layer.call
    instead = lambda *args, **kwargs: call(*args, **{**kwargs, "training": False})  # noqa: E731
    return replaced(layer, call=instead)


def losses_of_layers(model: Any) -> list[Any]:
    """Return what layers have added to the loss in the last call, without regularisers."""
    own = model._get_own_losses()
    return [*own, *(loss for layer in layers_of(model) for loss in layer._get_own_losses())]


def compile_loss_of(model: Any) -> Any:
    """Return the object that adds up the losses given to `compile`, or `None`."""
    return model._compile_loss


def number_of_terms(model: Any) -> int:
    """Return of how many losses given to `compile` the loss is the sum, once it is built."""
    return len(compile_loss_of(model)._flat_losses)


def compute_loss(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    """Compute the loss as `train_step` does."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=True)


def name_of_loss(model: Any) -> str:
    """Return what the loss of a model is called in messages."""
    if type(model).compute_loss is not keras.Model.compute_loss:
        return f"{type(model).__name__}.compute_loss"
    terms = compile_loss_of(model)._flat_losses
    return ", ".join(dict.fromkeys(repr(getattr(term.loss, "name", "?")) for term in terms))


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
def losses_of_one_replica(model: Any, replicas: int, samples: Any = None) -> Iterator[None]:
    """Return a block in which a replica's loss is its own mean, of `samples` if given.

    On several replicas Keras divides losses by their number, and multiplies again what it
    logs. The losses given to `compile` are left to `with_terms`.
    """
    if replicas == 1:
        yield
        return
    aggregate, tracker = model._aggregate_additional_loss, model._loss_tracker
    update_state = tracker.update_state

    def update(value: Any, sample_weight: Any = None) -> Any:
        sample_weight = sample_weight if samples is None else samples
        return update_state(value / replicas, sample_weight=sample_weight)

    with replaced(
        model, _aggregate_additional_loss=lambda loss: aggregate(loss) * replicas
    ), replaced(tracker, update_state=update):
        yield


def set_mask(tensor: Any, mask: Any) -> None:
    """Attach a mask to a tensor, for Keras to see."""
    tensor._keras_mask = mask


def mask_of(tensor: Any) -> Any:
    """Return the mask Keras has attached to a tensor, or `None`."""
    return getattr(tensor, "_keras_mask", None)
