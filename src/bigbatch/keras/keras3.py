"""Keras 3, on its TensorFlow backend: what bigbatch has to know of it."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator

import tensorflow as tf

from bigbatch.core.versions import version_of
from bigbatch.keras.compat import Generation, layers_of, python_function, strategy_of
from bigbatch.keras.data import on_next, without_optionals
from bigbatch.keras.patching import replaced
from bigbatch.tf.compat import variables_of
from bigbatch.tf.values import times

BUILD_BEFORE_FIT = "_maybe_symbolic_build"
"""The method with which `fit` and `evaluate` build a model that has a strategy."""

END_OF_EPOCH = "_get_metrics_result_or_logs"
"""The method with which `fit` turns the logs of the last batch into those of the epoch."""

ACTIVITIES_ARE_MEANS = (3, 14)
"""The first Keras 3 that divides what an activity regulariser returns by the samples."""


class Keras3(Generation):
    """What there is to know of Keras 3."""

    ACTIVITY_REGULARIZER = "activity_regularizer"
    """The attribute of a model that holds what regularises its outputs."""

    def methods(self, model: Any, hooks: Any) -> dict[str, Any]:
        """Return what replaces methods of a model while it accumulates, beside `fit`."""

        def build(iterator: Any = None, data_batch: Any = None) -> None:
            self.build_under_strategy(model, iterator, data_batch)
            if iterator is None:
                hooks.batches_per_epoch = None
            else:
                hooks.begin(batches_of(iterator), certain_batches_of(iterator))

        def end_epoch(logs: Any) -> Any:
            # Evaluation ends here too, perhaps in the middle of a window, with logs of its own.
            end = functools.partial(getattr(type(model), END_OF_EPOCH), model)
            if logs is not hooks.logs:
                return end(logs)
            return {**end(hooks.engine.flush() or logs), **hooks.extra_logs()}

        methods = {BUILD_BEFORE_FIT: build, END_OF_EPOCH: end_epoch}
        if hooks.is_multi_worker:
            make = functools.partial(_make_test_function, model)
            return {**methods, "make_test_function": make}
        return methods

    def fit(
        self, hooks: Any, fit: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call `fit`."""
        del hooks
        return fit(model, *args, **kwargs)

    def train(self, hooks: Any, model: Any, iterator: Any) -> dict[str, Any]:
        """Train on what `fit` asks for; return the logs."""
        del model
        return hooks.engine.train(iterator)

    def is_compiled(self, model: Any) -> bool:
        """Say whether a model has a loss and an optimizer."""
        return bool(model.compiled)

    def batches_per_call(self, model: Any) -> int:
        """Return on how many batches the train function is to train when it is called."""
        return model.steps_per_execution

    def jit_compile(self, model: Any) -> bool:
        """Say whether micro-batches are to be compiled by XLA."""
        return bool(model.jit_compile)

    def train_step_of(self, model: Any) -> Callable[[Any], Any]:
        """Return the model's `train_step`, a Python function."""
        return python_function(model.train_step)

    def call(self, model: Any, x: Any, *, training: bool) -> Any:
        """Call the model as `train_step` does, in training or inference mode."""
        return model(x, training=training) if model._call_has_training_arg else model(x)

    def without_training(self, layer: Any) -> contextlib.AbstractContextManager[None]:
        """Return a block in which a layer does as in inference, if it knows the difference."""
        if not layer._call_has_training_arg:
            return contextlib.nullcontext()
        call = layer.call
        instead = lambda *args, **kwargs: call(*args, **{**kwargs, "training": False})  # noqa: E731
        return replaced(layer, call=instead)

    # What a model is made of.

    def build(self, model: Any, data: Any) -> bool:
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

    def build_under_strategy(self, model: Any, iterator: Any, data_batch: Any) -> None:
        """Do what the method `BUILD_BEFORE_FIT` does, from one replica's part of the data.

        Keras averages the parts, which fails if they differ in size or on several workers.
        """
        strategy = model._distribute_strategy
        if strategy is None:
            return
        if iterator is not None:
            data_batch = next(next(iter(iterator))[-1])
        data_batch = tf.nest.map_structure(
            lambda leaf: strategy.experimental_local_results(leaf)[0], data_batch
        )
        with strategy.scope():
            model._symbolic_build(data_batch=data_batch)

    def state_of(self, model: Any) -> list[Any]:
        """Return the variables of a model that training changes beside its weights.

        Metrics, moving statistics and other weights that were made not to be trained, and the
        state of random layers; not weights that are frozen.
        """
        variables = list(model.metrics_variables)
        for layer in (model, *layers_of(model)):
            variables += layer._non_trainable_variables
            variables += [generator.state for generator in layer._seed_generators]
        return list({id(variable): variable.value for variable in variables}.values())

    def metrics_variables(self, model: Any) -> list[Any]:
        """Return the variables of the metrics of a model."""
        return model.metrics_variables

    def native(self, variable: Any) -> Any:
        """Return the `tf.Variable` inside a variable."""
        return getattr(variable, "value", variable)

    def results(self, model: Any) -> dict[str, Any]:
        """Return what the metrics of a model say, on this replica."""
        return model.get_metrics_result()

    def metrics_on_replicas(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Return a block in which the results of metrics can be read in a loop on replicas."""
        del model
        return contextlib.nullcontext()

    # The loss.

    def compile_loss_of(self, model: Any) -> Any:
        """Return the object that adds up the losses given to `compile`, or `None`."""
        return model._compile_loss

    def number_of_terms(self, model: Any) -> int:
        """Return of how many losses given to `compile` the loss is the sum, once built."""
        return len(model._compile_loss._flat_losses)

    def compute_loss(self, model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        """Compute the loss as `train_step` does."""
        return model._compute_loss(x, y, y_pred, sample_weight, training=True)

    def compute_compiled_loss(self, model: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        """Compute the losses given to `compile`, and nothing else."""
        return model._compile_loss(y, y_pred, sample_weight)

    def name_of_loss(self, model: Any) -> str:
        """Return what the loss of a model is called in messages."""
        if type(model).compute_loss is not self.keras.Model.compute_loss:
            return f"{type(model).__name__}.compute_loss"
        terms = model._compile_loss._flat_losses
        return ", ".join(dict.fromkeys(repr(getattr(term.loss, "name", "?")) for term in terms))

    def losses_of_layers(self, model: Any) -> list[Any]:
        """Return what layers have added to the loss in the last call, without regularisers."""
        own = model._get_own_losses()
        return [*own, *(loss for layer in layers_of(model) for loss in layer._get_own_losses())]

    def scaling_sums_of_layers(
        self, model: Any, factor: Callable[[], Any]
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a block in which what layers add to the loss as a sum over samples is scaled.

        By `factor()`, unless that is `None`. In older versions activity regularisers do.
        """
        stack = contextlib.ExitStack()
        if version_of(self.keras.__version__) >= ACTIVITIES_ARE_MEANS:
            return stack

        def scaled(regularizer: Any, outputs: Any) -> Any:
            value, by = tf.convert_to_tensor(regularizer(outputs)), factor()
            return value if by is None else times(value, by)

        for layer in (model, *layers_of(model)):
            regularizer = layer.activity_regularizer
            if regularizer is not None:
                instead = functools.partial(scaled, regularizer)
                stack.enter_context(replaced(layer, activity_regularizer=instead))
        return stack

    def add_loss(self, model: Any, loss: Any) -> None:
        """Add to the loss of a model, also of a functional one, which does not let it."""
        self.keras.Layer.add_loss(model, loss)

    def without_losses(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Return a block in which layers have added nothing to the loss when they were made."""
        del model
        return contextlib.nullcontext()

    def elements(self, loss: Any, y_true: Any, y_pred: Any) -> tuple[Any, list[Any]] | None:
        """Return the elements that a loss reduces, and the masks of which it knows.

        `None` if it does not leave the reduction to Keras.
        """
        if type(loss).__call__ is not self.keras.losses.Loss.__call__:
            return None

        def convert(value: Any) -> Any:
            return self.keras.ops.convert_to_tensor(value, dtype=loss.dtype)

        of = self.keras.tree.map_structure
        values = loss.call(of(convert, y_true), of(convert, y_pred))
        masks = [getattr(one, "_keras_mask", None) for one in (y_pred, values)]
        return values, [mask for mask in masks if mask is not None]

    def value_of(self, loss: Any, y_true: Any, y_pred: Any, weight: Any, by: Any) -> Any:
        """Return what a loss says of samples, given what it divides by."""
        del by
        return loss(y_true, y_pred, weight)

    def divides_by_replicas(self, replicas: int) -> int:
        """Return what a term of the loss has been divided by when it leaves its loss."""
        return replicas

    @contextlib.contextmanager
    def watching_loss(
        self, model: Any, replace: Callable[[Any], Any], record: Callable[[Any, Any], None]
    ) -> Iterator[None]:
        """Return a block in which each loss given to `compile` is replaced by `replace(loss)`.

        What the metric of a loss, if there is one, would be updated with is passed to
        `record(metric, value)` instead.
        """
        compile_loss = model._compile_loss
        if compile_loss is None:
            yield
            return
        original = compile_loss.call

        def call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            terms, metrics = compile_loss._flat_losses, compile_loss._metrics
            compile_loss._flat_losses = [
                term._replace(loss=replace(term.loss)) for term in terms
            ]
            compile_loss._metrics = [_Recorder(metric, record) for metric in metrics]
            try:
                return original(y_true, y_pred, sample_weight)
            finally:
                compile_loss._flat_losses, compile_loss._metrics = terms, metrics

        with replaced(compile_loss, call=call):
            yield

    @contextlib.contextmanager
    def losses_of_one_replica(
        self, model: Any, replicas: int, samples: Any = None
    ) -> Iterator[None]:
        """Return a block in which a replica's loss is its own mean, of `samples` if given.

        On several replicas Keras divides losses by their number, and multiplies again what it
        logs. The losses given to `compile` are left to `watching_loss`.
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

    # Optimizers.

    def is_optimizer(self, value: Any) -> bool:
        """Say whether a value is an optimizer."""
        return isinstance(value, self.keras.optimizers.Optimizer)

    def scales_loss(self, optimizer: Any) -> bool:
        """Say whether an optimizer scales the loss, for float16."""
        return isinstance(optimizer, self.keras.optimizers.LossScaleOptimizer)

    def collecting(
        self,
        optimizer: Any,
        collect: Callable[[list[Any], list[Any]], None],
        weigh: Callable[[Any], Any],
    ) -> contextlib.AbstractContextManager[None]:
        """Return a block in which an optimizer calls functions and changes nothing.

        Args:
            optimizer: an optimizer.
            collect: called with the gradients, and the variables they are of.
            weigh: called with the loss, before it is differentiated; returns it.
        """
        scale_loss = optimizer.scale_loss

        def apply(grads: Any, trainable_variables: Any = None) -> None:
            if trainable_variables is None:
                trainable_variables = variables_of(optimizer)
            collect(list(grads), list(trainable_variables))

        return replaced(optimizer, apply=apply, scale_loss=lambda loss: scale_loss(weigh(loss)))

    def scale_loss(self, optimizer: Any, loss: Any) -> Any:
        """Return the loss as an optimizer wants it to be differentiated."""
        return optimizer.scale_loss(loss)

    def unscaled(self, optimizer: Any, gradients: list[Any]) -> list[Any]:
        """Return gradients of a scaled loss as `apply` takes them: scaled."""
        del optimizer
        return gradients

    def scale_of_gradients(self, optimizer: Any) -> Any:
        """Return the factor that gradients have when `apply` takes them."""
        return optimizer.scale_loss(tf.ones([]))

    def optimizer_variables(self, optimizer: Any) -> list[Any]:
        """Return all variables of an optimizer."""
        return list(optimizer.variables)

    # Batch normalisation.

    def is_batch_norm(self, layer: Any) -> bool:
        """Say whether a layer normalises with the statistics of a batch."""
        return isinstance(layer, self.keras.layers.BatchNormalization)

    def alone(self, layer: Any) -> contextlib.AbstractContextManager[None]:
        """Return a block in which a layer takes the statistics of its own replica."""
        return replaced(layer, synchronized=False)

    def clear_statistics(self, layer: Any) -> None:
        """Make the moving statistics such that a momentum of zero replaces them: they are."""

    def bias_of_variance(self, layer: Any, count: Any) -> Any:
        """Return the biased variance over what a layer takes for the variance of elements."""
        del layer, count
        return 1

    def knows_mask(self, layer: Any) -> bool:
        """Say whether a layer leaves out of its statistics what is masked."""
        del layer
        return True


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


class _Recorder:
    """Stands in for a metric."""

    def __init__(self, metric: Any, record: Callable[[Any, Any], None]) -> None:
        self._metric, self._record = metric, record

    def update_state(self, value: Any, sample_weight: Any = None) -> None:
        del sample_weight
        self._record(self._metric, value)


def _make_test_function(model: Any, force: bool = False) -> Any:
    """Make what Keras makes, but for several workers, where that fails on numbers."""
    strategy = strategy_of(model)

    def on_batch(data: Any) -> dict[str, Any]:
        logs = strategy.run(model.test_step, args=(without_optionals(data),))
        mean = functools.partial(strategy.reduce, tf.distribute.ReduceOp.MEAN, axis=None)
        return {name: mean(value) for name, value in logs.items()}

    def test(iterator: Any) -> dict[str, Any]:
        return on_next(iterator, on_batch, on_batch, model.steps_per_execution)[1]

    if model.test_function is None or force:
        model.test_function = test
        if not model.run_eagerly:
            model.test_function = tf.function(test, reduce_retracing=True, autograph=False)
    return model.test_function
