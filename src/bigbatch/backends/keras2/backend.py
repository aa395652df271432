"""Keras 2: `tf_keras`, and `tf.keras` of TensorFlow 2.10 to 2.15."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any, Callable, Iterator

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx

from bigbatch.backends.keras import (
    layers_of,
    mask_of,
    optimizers_of,
    python_function,
    set_mask,
)
from bigbatch.backends.keras2.fit import Keras2Fit
from bigbatch.backends.keras2.loss import WatchedLoss
from bigbatch.backends.tensorflow.compat import like_the_caller, outside_strategy_scope
from bigbatch.backends.tensorflow.data import with_any_count
from bigbatch.backends.tensorflow.mechanics import TensorFlowBackend
from bigbatch.backends.tensorflow.optimizers import adapted
from bigbatch.core.patching import replaced


class Keras2(Keras2Fit, TensorFlowBackend):
    """The backend of Keras 2 models."""

    ACTIVITY_REGULARIZER = "_activity_regularizer"

    def methods(self, model: Any, hooks: Any) -> dict[str, Any]:
        del model, hooks
        return {}

    def is_compiled(self, model: Any) -> bool:
        return bool(model._is_compiled)

    def batches_per_call(self, model: Any) -> int:
        """Return on how many batches the train function is to train when it is called.

        `fit` changes it for the last batches of an epoch.
        """
        return int(model._steps_per_execution.numpy())

    def jit_compile(self, model: Any) -> bool:
        return bool(model._jit_compile)

    def train_step_of(self, model: Any) -> Callable[[Any], Any]:
        function = python_function(model.train_step)
        if model.run_eagerly or not self.has_custom_train_step(model):
            return function
        # As in a `tf.function`, which Keras 2 has AutoGraph convert.
        context = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)
        return tf.__internal__.autograph.tf_convert(function, context)

    def call(self, model: Any, x: Any, *, training: bool) -> Any:
        return model(x, training=training)

    # What a model is made of.

    def build(self, model: Any, data: Any) -> bool:
        """Create the state of a model, its metrics, loss and optimizer for such `data`.

        Returns:
            Whether that can be done. What cannot be built without training (no `call`) is
            built in the first trace, as Keras itself does.
        """
        own, strategy = self.has_custom_train_step(model), model.distribute_strategy
        # A custom `train_step` may have no use for what was given to `compile`.
        compiled = [] if own and self.compile_loss_of(model) is None else [model.compiled_loss]
        compiled += [one for one in [model.compiled_metrics] if one is not None and compiled]

        def build(data: Any) -> None:
            x, y, sample_weight = self.unpacked(data)
            y_pred = self.call(model, x, training=True)
            if compiled:
                model.compute_loss(x, y, y_pred, sample_weight)
                model.compute_metrics(x, y, y_pred, sample_weight)

        function = tf.function(lambda data: strategy.run(build, (data,)), autograph=False)
        types = tf.nest.map_structure(with_any_count, data)
        if not (model.built and all(one.built for one in compiled)):
            try:
                function.get_concrete_function(types)
            except Exception as error:
                # Without a `call`; a custom `train_step` may do anything with its data.
                if own or isinstance(error, NotImplementedError):
                    return False
                raise
        if model.trainable_variables and optimizers_of(model) == [model.optimizer]:
            with strategy.scope():
                adapted(model.optimizer, model.trainable_variables)
        return True

    def has_seeds(self, layer: Any) -> bool:
        return _is_random(layer)

    def state_of(self, model: Any) -> list[Any]:
        """Return the variables of a model that training changes beside its weights.

        Metrics, moving statistics and other weights that were made not to be trained, and the
        state of random layers that have any; not weights that are frozen.
        """
        variables = self.metrics_variables(model)
        for layer in (model, *layers_of(model)):
            variables += layer._non_trainable_weights
            generator = getattr(getattr(layer, "_random_generator", None), "_generator", None)
            variables += [] if generator is None else [generator.state]
        return list({id(variable): variable for variable in variables}.values())

    def layers_with_other_draws(self, model: Any, *, is_split: bool) -> list[Any]:
        del is_split
        return [layer for layer in layers_of(model) if _is_random(layer)]

    def metrics_variables(self, model: Any) -> list[Any]:
        return [variable for metric in model.metrics for variable in metric.variables]

    def native(self, variable: Any) -> Any:
        return variable

    def results(self, model: Any) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for metric in model.metrics:
            result = self.result_of(metric)
            results.update(result if isinstance(result, dict) else {metric.name: result})
        return results

    def result_of(self, metric: Any) -> Any:
        return _local_result(metric)()

    @contextlib.contextmanager
    def metrics_on_replicas(self, model: Any) -> Iterator[None]:
        """Return a block in which the results of metrics can be read in a loop on replicas.

        They are those of the replica: to add them up would be to leave the loop.
        """
        with contextlib.ExitStack() as stack:
            if model.distribute_strategy.num_replicas_in_sync > 1:
                for metric in model.metrics:
                    stack.enter_context(replaced(metric, result=_local_result(metric)))
            yield

    # The loss.

    def compile_loss_of(self, model: Any) -> Any:
        compiled = getattr(model, "compiled_loss", None)
        return None if compiled is None or compiled._user_losses is None else compiled

    def number_of_terms(self, model: Any) -> int:
        return sum(loss is not None for loss in model.compiled_loss._losses)

    def compute_loss(self, model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        return model.compute_loss(x, y, y_pred, sample_weight)

    def compute_compiled_loss(self, model: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        return model.compiled_loss.tried(y, y_pred, sample_weight)

    def name_of_loss(self, model: Any) -> str:
        if type(model).compute_loss is not self.keras.Model.compute_loss:
            return f"{type(model).__name__}.compute_loss"
        losses = model.compiled_loss._losses
        return ", ".join(dict.fromkeys(repr(loss.name) for loss in losses if loss is not None))

    def regularisers_of(self, model: Any) -> list[Any]:
        return [loss() for one in (model, *layers_of(model)) for loss in one._callable_losses]

    def compiled_metrics(self, model: Any) -> list[Any]:
        compiled = getattr(model, "compiled_metrics", None)
        return [] if compiled is None else compiled.metrics

    def update_compiled_metrics(
        self, model: Any, y: Any, y_pred: Any, sample_weight: Any
    ) -> None:
        model.compiled_metrics.update_state(y, y_pred, sample_weight)

    def losses_of_layers(self, model: Any) -> list[Any]:
        return [loss for one in (model, *layers_of(model)) for loss in one._eager_losses]

    def add_loss(self, model: Any, loss: Any) -> None:
        model.add_loss(loss)

    @contextlib.contextmanager
    def without_losses(self, model: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for layer in layers_of(model):
                stack.enter_context(replaced(layer, _losses=[]))
            yield

    def elements(self, loss: Any, y_true: Any, y_pred: Any) -> tuple[Any, list[Any]] | None:
        """Return the elements that a loss reduces, and the masks it knows.

        `None` if it does not leave the reduction to Keras.
        """
        if type(loss).__call__ is not self.keras.losses.Loss.__call__:
            return None
        values = like_the_caller(loss.call)(y_true, y_pred)
        masks = [mask_of(values)]
        if self._divides_by_valid:
            masks.append(mask_of(y_pred))
        return values, [mask for mask in masks if mask is not None]

    @functools.cached_property
    def _divides_by_valid(self) -> bool:
        """Whether a loss divides by the elements that are not masked, or by all."""
        with tf.init_scope(), outside_strategy_scope():
            y_pred = tf.ones([2, 1])
            set_mask(y_pred, tf.constant([True, False]))
            loss = self.keras.losses.MeanSquaredError(reduction="sum_over_batch_size")
            return float(loss(tf.zeros([2, 1]), y_pred, tf.constant([1.0, 0.0]))) == 1

    def value_of(self, loss: Any, y_true: Any, y_pred: Any, weight: Any, by: Any) -> Any:
        if isinstance(by, str):
            return loss(y_true, y_pred, sample_weight=weight)
        # Where all is masked Keras 2 would divide by zero. The weights are masked, too: without
        # the mask it is zero.
        mask = mask_of(y_pred)
        if mask is not None:
            y_pred = tf.identity(y_pred)
            set_mask(y_pred, mask | tf.equal(by, 0))
        return loss(y_true, y_pred, sample_weight=weight)

    def divides_by_replicas(self, replicas: int) -> int:
        del replicas
        return 1

    @contextlib.contextmanager
    def watching_loss(
        self,
        model: Any,
        replace: Callable[[Any], Any],
        record: Callable[[Any, Any], None],
        note: Callable[[Any], None] = lambda _: None,
    ) -> Iterator[None]:
        """Return a block in which each loss given to `compile` is replaced by `replace(loss)`.

        On several replicas the loss is that of the replica: Keras divides it by their number.
        The metrics of losses are among those of the model, and need not be watched here.
        """
        del record
        compiled = getattr(model, "compiled_loss", None)
        if compiled is None:
            yield
            return
        replicas = model.distribute_strategy.num_replicas_in_sync
        with replaced(model, compiled_loss=WatchedLoss(compiled, replace, note, replicas)):
            yield

    def losses_of_one_replica(
        self, model: Any, replicas: int, samples: Any = None
    ) -> contextlib.AbstractContextManager[None]:
        del model, replicas, samples
        return contextlib.nullcontext()

    # Optimizers.

    def is_optimizer(self, value: Any) -> bool:
        return all(hasattr(type(value), name) for name in ("apply_gradients", "iterations"))

    def scales_loss(self, optimizer: Any) -> bool:
        return hasattr(type(optimizer), "get_scaled_loss")

    def capturing(
        self,
        optimizer: Any,
        apply: Callable[[list[Any], list[Any]], None],
        weigh: Callable[[Any], Any],
    ) -> contextlib.AbstractContextManager[None]:
        """Return a block in which an optimizer calls functions and changes nothing.

        Args:
            optimizer: an optimizer.
            apply: called with the gradients, and the variables they are of.
            weigh: called with the loss, before it is differentiated; returns it.
        """
        original = optimizer.minimize

        def apply_gradients(grads_and_vars: Any, *_: Any, **__: Any) -> None:
            pairs = list(grads_and_vars)
            apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])

        def minimize(
            loss: Any, var_list: Any, *args: Any, tape: Any = None, **kwargs: Any
        ) -> Any:
            if tape is not None and not callable(loss):
                with tape:
                    loss = weigh(loss)
            return original(loss, var_list, *args, tape=tape, **kwargs)

        return replaced(optimizer, apply_gradients=apply_gradients, minimize=minimize)

    def scale_loss(self, optimizer: Any, loss: Any) -> Any:
        return optimizer.get_scaled_loss(loss) if self.scales_loss(optimizer) else loss

    def unscaled(self, optimizer: Any, gradients: list[Any]) -> list[Any]:
        if not self.scales_loss(optimizer):
            return gradients
        return optimizer.get_unscaled_gradients(gradients)

    def scale_of_gradients(self, optimizer: Any) -> Any:
        del optimizer
        return 1

    def optimizer_variables(self, optimizer: Any) -> list[Any]:
        variables = optimizer.variables
        variables = list(variables() if inspect.ismethod(variables) else variables)
        if self.scales_loss(optimizer) and optimizer.dynamic:
            state = optimizer._loss_scale
            variables += [state.current_loss_scale, state.counter]
        return variables

    # Batch normalisation.

    def is_batch_norm(self, layer: Any) -> bool:
        return _batch_norm_base(layer) is not None

    def alone(self, layer: Any) -> contextlib.AbstractContextManager[None]:
        if hasattr(layer, "synchronized"):
            return replaced(layer, synchronized=False)
        # `SyncBatchNormalization`, which was a class of its own.
        own = functools.partial(_batch_norm_base(layer)._calculate_mean_and_var, layer)
        return replaced(layer, _calculate_mean_and_var=own)

    def choosing_moments(
        self, layer: Any, choose: Callable[[Any, Any], tuple[Any, Any]]
    ) -> contextlib.AbstractContextManager[None] | None:
        if layer.fused:  # its kernel keeps them to itself
            return None
        moments = layer._moments
        return replaced(
            layer, _moments=lambda *args, **kwargs: choose(*moments(*args, **kwargs))
        )

    def clear_statistics(self, layer: Any) -> None:
        """Make the moving statistics such that a momentum of zero replaces them.

        Keras subtracts the difference, which would be rounded.
        """
        for variable in (layer.moving_mean, layer.moving_variance):
            variable.assign(tf.zeros_like(variable))

    def bias_of_variance(self, layer: Any, count: Any) -> Any:
        """Return the biased variance over what a layer takes for the variance of elements.

        The fused kernel has the variance divided by one less than the number of elements.
        """
        return tf.maximum(count - 1, 1) / tf.maximum(count, 1) if layer.fused else 1

    def knows_mask(self, layer: Any) -> bool:
        return not layer.fused


def _local_result(metric: Any) -> Callable[[], Any]:
    """Return what gives the result of a metric on this replica.

    The method of the instance adds up what all replicas have.
    """
    return functools.partial(type(metric).result, metric)


def _is_random(layer: Any) -> bool:
    names = {kind.__name__ for kind in type(layer).__mro__}
    if "BaseRandomLayer" not in names:
        return False
    rates = [getattr(layer, name, None) for name in ("rate", "dropout", "recurrent_dropout")]
    return all(rate is None for rate in rates) or any(rates)


def _batch_norm_base(layer: Any) -> Any:
    kinds = (kind for kind in type(layer).__mro__ if kind.__name__ == "BatchNormalizationBase")
    return next(kinds, None)
