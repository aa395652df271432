"""Keras 2: `tf_keras`, and `tf.keras` of TensorFlow 2.10 to 2.15."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any, Callable, Iterator

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx

from bigbatch.errors import ArgumentError, explain
from bigbatch.keras.collector import optimizers_of
from bigbatch.keras.compat import (
    Generation,
    layers_of,
    mask_of,
    python_function,
    set_mask,
    strategy_of,
)
from bigbatch.keras.data import END_OF_DATA, with_any_count
from bigbatch.keras.patching import replaced
from bigbatch.tf.compat import like_the_caller, outside_strategy_scope
from bigbatch.tf.optimizers import adapted

_SUM, _NONE = "sum", "none"
_NO_CALLBACKS = explain(
    received="accumulation_steps and an own fit() of a Keras 2 model that takes no callbacks",
    expected="a fit() that can be given the callback that sees an epoch end",
    fix="let it take **kwargs and pass them on to super().fit(), or pass microbatch_size",
)


class Keras2(Generation):
    """What there is to know of Keras 2."""

    ACTIVITY_REGULARIZER = "_activity_regularizer"

    def methods(self, model: Any, hooks: Any) -> dict[str, Any]:
        """Return what replaces methods of a model while it accumulates, beside `fit`."""
        del model, hooks
        return {}

    def fit(
        self, hooks: Any, fit: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call `fit`, with callbacks that see an epoch begin and end."""
        parameters = inspect.signature(fit).parameters
        names = list(parameters)[1:]
        given = {**dict(zip(names, args)), **kwargs}
        takes = parameters.values()
        if "callbacks" not in parameters and all(one.kind != one.VAR_KEYWORD for one in takes):
            if hooks.setting.accumulation_steps is not None:
                raise ArgumentError(_NO_CALLBACKS)
            return fit(model, *args, **kwargs)
        callbacks: Any = given.get("callbacks")
        own = getattr(callbacks, "callbacks", callbacks) or []
        own = list(own) if isinstance(own, (list, tuple)) else [own]
        first, last = self._bookends(hooks, model, given)
        if hasattr(callbacks, "append") and hasattr(callbacks, "set_params"):  # a CallbackList
            for callback in (first, last):
                callback.set_model(model)
                callback.set_params(callbacks.params)
            callbacks.callbacks[:] = [first, *own, last]
            try:
                return fit(model, *args, **kwargs)
            finally:
                callbacks.callbacks[:] = own
        position = names.index("callbacks") if "callbacks" in names else len(args)
        if position < len(args):
            args = (*args[:position], [first, *own, last], *args[position + 1 :])
            return fit(model, *args, **kwargs)
        return fit(model, *args, **{**kwargs, "callbacks": [first, *own, last]})

    def _bookends(self, hooks: Any, model: Any, given: dict[str, Any]) -> tuple[Any, Any]:
        """Return the callbacks that run before and after all others."""
        keras2 = self

        class First(self.keras.callbacks.Callback):
            def on_train_begin(self, logs: Any = None) -> None:
                del logs
                batches = self.params.get("steps")
                certain = None if given.get("steps_per_epoch") else batches
                hooks.begin((batches, *_sizes(given)), certain)
                hooks.make_train_function()

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                del logs
                batches = self.params.get("steps")
                if batches is not None and batch + 1 >= batches:
                    keras2.end_epoch(hooks, model)

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                del epoch
                keras2.end_epoch(hooks, model)  # if the number of batches is not known
                if logs is not None:
                    logs.update(hooks.extra_logs())

        class Last(self.keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                del batch, logs
                if model.stop_training:
                    keras2.end_epoch(hooks, model)

        return First(), Last()

    def train(self, hooks: Any, model: Any, iterator: Any) -> dict[str, Any]:
        """Train on what `fit` asks for; return the logs."""
        count = self.batches_per_call(model)
        if not hooks.is_fitting:  # but `train_on_batch`, with batches that need not be alike
            iterator = iter([next(iterator)])
        try:
            logs = hooks.engine.train(iterator)
        except END_OF_DATA:
            self.end_epoch(hooks, model)
            raise
        model._train_counter.assign_add(count)
        return dict(logs)

    def end_epoch(self, hooks: Any, model: Any) -> None:
        """Make the update of a short last window; let the logs be those of the epoch.

        `fit` has the logs already, and looks at them when the epoch is over.
        """
        logs = hooks.engine.flush()
        if hooks.logs is None:
            return
        hooks.logs.update(logs or {})
        if strategy_of(model).num_replicas_in_sync > 1:  # of which each has told its own
            results = {metric.name: metric.result() for metric in model.metrics}
            known = results.keys() & hooks.logs.keys()
            hooks.logs.update((name, results[name]) for name in known)

    def is_compiled(self, model: Any) -> bool:
        """Say whether a model has a loss and an optimizer."""
        return bool(model._is_compiled)

    def batches_per_call(self, model: Any) -> int:
        """Return on how many batches the train function is to train when it is called.

        `fit` changes it for the last batches of an epoch.
        """
        return int(model._steps_per_execution.numpy())

    def jit_compile(self, model: Any) -> bool:
        """Say whether micro-batches are to be compiled by XLA."""
        return bool(model._jit_compile)

    def train_step_of(self, model: Any) -> Callable[[Any], Any]:
        """Return the model's `train_step`, a Python function, as `fit` calls it."""
        function = python_function(model.train_step)
        if model.run_eagerly or not self.has_own_train_step(model):
            return function
        # As in a `tf.function`, which Keras 2 has AutoGraph convert.
        context = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)
        return tf.__internal__.autograph.tf_convert(function, context)

    def call(self, model: Any, x: Any, *, training: bool) -> Any:
        """Call the model as `train_step` does, in training or inference mode."""
        return model(x, training=training)

    # What a model is made of.

    def build(self, model: Any, data: Any) -> bool:
        """Create the state of a model, its metrics, loss and optimizer for such `data`.

        Returns:
            Whether that can be done. What cannot be built without training (no `call`) is
            built in the first trace, as Keras itself does.
        """
        own, strategy = self.has_own_train_step(model), strategy_of(model)
        # An own `train_step` may have no use for what was given to `compile`.
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
                # Without a `call`; an own `train_step` may do anything with its data.
                if own or isinstance(error, NotImplementedError):
                    return False
                raise
        if model.trainable_variables and optimizers_of(model) == [model.optimizer]:
            with strategy.scope():
                adapted(model.optimizer, model.trainable_variables)
        return True

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

    def layers_with_other_draws(self, model: Any) -> list[Any]:
        """Return the layers that draw: from generators that advance by what is drawn."""
        return [layer for layer in layers_of(model) if _is_random(layer)]

    def metrics_variables(self, model: Any) -> list[Any]:
        """Return the variables of the metrics of a model."""
        return [variable for metric in model.metrics for variable in metric.variables]

    def native(self, variable: Any) -> Any:
        """Return the `tf.Variable` inside a variable."""
        return variable

    def results(self, model: Any) -> dict[str, Any]:
        """Return what the metrics of a model say, on this replica."""
        results: dict[str, Any] = {}
        for metric in model.metrics:
            result = _local_result(metric)()
            results.update(result if isinstance(result, dict) else {metric.name: result})
        return results

    @contextlib.contextmanager
    def metrics_on_replicas(self, model: Any) -> Iterator[None]:
        """Return a block in which the results of metrics can be read in a loop on replicas.

        They are those of the replica: to add them up would be to leave the loop.
        """
        with contextlib.ExitStack() as stack:
            if strategy_of(model).num_replicas_in_sync > 1:
                for metric in model.metrics:
                    stack.enter_context(replaced(metric, result=_local_result(metric)))
            yield

    # The loss.

    def compile_loss_of(self, model: Any) -> Any:
        """Return the object that adds up the losses given to `compile`, or `None`."""
        compiled = getattr(model, "compiled_loss", None)
        return None if compiled is None or compiled._user_losses is None else compiled

    def number_of_terms(self, model: Any) -> int:
        """Return of how many losses given to `compile` the loss is the sum, once built."""
        return sum(loss is not None for loss in model.compiled_loss._losses)

    def compute_loss(self, model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        """Compute the loss as `train_step` does."""
        return model.compute_loss(x, y, y_pred, sample_weight)

    def compute_compiled_loss(self, model: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        """Compute the losses given to `compile`, and nothing else."""
        return model.compiled_loss(y, y_pred, sample_weight)

    def name_of_loss(self, model: Any) -> str:
        """Return what the loss of a model is called in messages."""
        if type(model).compute_loss is not self.keras.Model.compute_loss:
            return f"{type(model).__name__}.compute_loss"
        losses = model.compiled_loss._losses
        return ", ".join(dict.fromkeys(repr(loss.name) for loss in losses if loss is not None))

    def losses_of_layers(self, model: Any) -> list[Any]:
        """Return what layers have added to the loss in the last call, without regularisers."""
        return [loss for one in (model, *layers_of(model)) for loss in one._eager_losses]

    def add_loss(self, model: Any, loss: Any) -> None:
        """Add to the loss of a model, while it is called."""
        model.add_loss(loss)

    @contextlib.contextmanager
    def without_losses(self, model: Any) -> Iterator[None]:
        """Return a block in which layers have added nothing to the loss when they were made."""
        with contextlib.ExitStack() as stack:
            for layer in layers_of(model):
                stack.enter_context(replaced(layer, _losses=[]))
            yield

    def elements(self, loss: Any, y_true: Any, y_pred: Any) -> tuple[Any, list[Any]] | None:
        """Return the elements that a loss reduces, and the masks of which it knows.

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
        """Return what a loss says of samples, given what it divides by."""
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
        """Return what a term of the loss has been divided by when it leaves its loss."""
        del replicas
        return 1

    @contextlib.contextmanager
    def watching_loss(
        self, model: Any, replace: Callable[[Any], Any], record: Callable[[Any, Any], None]
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
        replicas = strategy_of(model).num_replicas_in_sync
        with replaced(model, compiled_loss=_WatchedLoss(compiled, replace, replicas)):
            yield

    def losses_of_one_replica(
        self, model: Any, replicas: int, samples: Any = None
    ) -> contextlib.AbstractContextManager[None]:
        """Return a block in which a replica's loss is its own mean: left to `watching_loss`."""
        del model, replicas, samples
        return contextlib.nullcontext()

    # Optimizers.

    def is_optimizer(self, value: Any) -> bool:
        """Say whether a value is an optimizer: of either kind that Keras 2 has."""
        return all(hasattr(type(value), name) for name in ("apply_gradients", "iterations"))

    def scales_loss(self, optimizer: Any) -> bool:
        """Say whether an optimizer scales the loss, for float16."""
        return hasattr(type(optimizer), "get_scaled_loss")

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
        original = optimizer.minimize

        def apply_gradients(grads_and_vars: Any, *_: Any, **__: Any) -> None:
            pairs = list(grads_and_vars)
            collect([gradient for gradient, _ in pairs], [variable for _, variable in pairs])

        def minimize(
            loss: Any, var_list: Any, *args: Any, tape: Any = None, **kwargs: Any
        ) -> Any:
            if tape is not None and not callable(loss):
                with tape:
                    loss = weigh(loss)
            return original(loss, var_list, *args, tape=tape, **kwargs)

        return replaced(optimizer, apply_gradients=apply_gradients, minimize=minimize)

    def scale_loss(self, optimizer: Any, loss: Any) -> Any:
        """Return the loss as an optimizer wants it to be differentiated."""
        return optimizer.get_scaled_loss(loss) if self.scales_loss(optimizer) else loss

    def unscaled(self, optimizer: Any, gradients: list[Any]) -> list[Any]:
        """Return gradients of a scaled loss as `apply` takes them: not scaled."""
        if not self.scales_loss(optimizer):
            return gradients
        return optimizer.get_unscaled_gradients(gradients)

    def scale_of_gradients(self, optimizer: Any) -> Any:
        """Return the factor that gradients have when `apply` takes them."""
        del optimizer
        return 1

    def optimizer_variables(self, optimizer: Any) -> list[Any]:
        """Return all variables of an optimizer."""
        variables = optimizer.variables
        variables = list(variables() if inspect.ismethod(variables) else variables)
        if self.scales_loss(optimizer) and optimizer.dynamic:
            state = optimizer._loss_scale
            variables += [state.current_loss_scale, state.counter]
        return variables

    # Batch normalisation.

    def is_batch_norm(self, layer: Any) -> bool:
        """Say whether a layer normalises with the statistics of a batch."""
        return _batch_norm_base(layer) is not None

    def alone(self, layer: Any) -> contextlib.AbstractContextManager[None]:
        """Return a block in which a layer takes the statistics of its own replica."""
        if hasattr(layer, "synchronized"):
            return replaced(layer, synchronized=False)
        # `SyncBatchNormalization`, which was a class of its own.
        own = functools.partial(_batch_norm_base(layer)._calculate_mean_and_var, layer)
        return replaced(layer, _calculate_mean_and_var=own)

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
        """Say whether a layer leaves out of its statistics what is masked."""
        return not layer.fused


class _WatchedLoss:
    """Stands in for the compiled loss of a model."""

    def __init__(self, compiled: Any, replace: Callable[[Any], Any], replicas: int) -> None:
        self._compiled, self._replace, self._replicas = compiled, replace, replicas

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def __call__(self, y_true: Any, y_pred: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = self._compiled
        if not compiled.built:
            compiled.build(y_pred)
        losses = compiled._losses
        compiled._losses = [
            loss and _Term(loss, self._replace, self._replicas) for loss in losses
        ]
        try:
            total = compiled(y_true, y_pred, *args, **kwargs)
        finally:
            compiled._losses = losses
        return total if total is None or self._replicas == 1 else total * self._replicas


class _Term:
    """Stands in for a loss.

    What is a sum Keras does not divide by the number of replicas, and `_WatchedLoss` still
    multiplies by it; the metric of a sum is multiplied by Keras.
    """

    def __init__(self, loss: Any, replace: Callable[[Any], Any], replicas: int) -> None:
        self.reduction = loss.reduction
        self._call, self._replicas = replace(loss), replicas

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value = self._call(y_true, y_pred, sample_weight)
        if self._replicas == 1 or self.reduction not in (_SUM, _NONE):
            return value
        part = value / self._replicas
        return part if self.reduction == _SUM else part + tf.stop_gradient(value - part)


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


def _sizes(given: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the size of the batches that `fit` was asked for, and of a smaller last one."""
    x = given.get("x")
    if isinstance(x, tf.data.Dataset):
        leaf = tf.nest.flatten(x.element_spec)[0]
        return (leaf.shape[0] if getattr(leaf, "shape", None) else None), None
    leaves = tf.nest.flatten(x)
    if not all(hasattr(leaf, "shape") and len(leaf.shape) for leaf in leaves):
        return None, None
    size = given.get("batch_size") or 32
    split = given.get("validation_split") or 0
    count = int(int(leaves[0].shape[0]) * (1 - split))
    return size, None if given.get("steps_per_epoch") else count % size
