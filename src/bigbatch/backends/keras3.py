"""Keras 3, on every framework."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator

from bigbatch.backends.keras import KerasBackend, layers_of, mask_of
from bigbatch.core.patching import replaced

END_OF_EPOCH = "_get_metrics_result_or_logs"
"""The method with which `fit` turns the logs of the last batch into those of the epoch."""


class Keras3(KerasBackend):
    """The part of a backend that knows Keras 3."""

    BUILD_BEFORE_FIT = "_symbolic_build"
    """The method with which `fit` and `evaluate` build a model."""

    def methods(self, model: Any, hooks: Any) -> dict[str, Any]:

        def build(iterator: Any = None, data_batch: Any = None) -> None:
            self.build_before_fit(model, iterator, data_batch)
            if iterator is None:
                hooks.batches_per_epoch = None
            else:
                hooks.begin(self.batches_of(iterator), certain_batches_of(iterator))

        def end_epoch(logs: Any) -> Any:
            # Evaluation ends here too, perhaps in the middle of a window, with logs of its own.
            end = functools.partial(getattr(type(model), END_OF_EPOCH), model)
            if logs is not hooks.logs:
                return end(logs)
            return {**end(hooks.trainer.flush() or logs), **hooks.extra_logs()}

        return {self.BUILD_BEFORE_FIT: build, END_OF_EPOCH: end_epoch}

    def build_before_fit(self, model: Any, iterator: Any, data_batch: Any) -> None:
        """Do what the method `BUILD_BEFORE_FIT` does."""
        getattr(type(model), self.BUILD_BEFORE_FIT)(model, iterator, data_batch)

    def batches_of(self, epoch_iterator: Any) -> tuple[int | None, int | None, int | None]:
        """Return the batches in an epoch, their size, and that of a smaller last one."""
        adapter = epoch_iterator.data_adapter
        size = rest = None
        if is_batched_by_user(adapter):
            return epoch_iterator.num_batches, None, None
        with contextlib.suppress(NotImplementedError):  # adapters may not know
            size = adapter.batch_size
            if not epoch_iterator.steps_per_epoch:
                rest = adapter.partial_batch_size
        return epoch_iterator.num_batches, size, rest

    def fit(
        self, hooks: Any, fit: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        del hooks
        return fit(model, *args, **kwargs)

    def training(
        self, hooks: Any, model: Any, iterator: Any
    ) -> contextlib.AbstractContextManager[Any]:
        del hooks, model
        return contextlib.nullcontext(iterator)

    def is_compiled(self, model: Any) -> bool:
        return bool(model.compiled)

    def batches_per_call(self, model: Any) -> int:
        return model.steps_per_execution

    def jit_compile(self, model: Any) -> bool:
        return bool(model.jit_compile)

    def train_step_of(self, model: Any) -> Callable[[Any], Any]:
        return model.train_step

    def plain_train_function(self, model: Any) -> Callable[[Any], dict[str, Any]]:
        """Return what Keras itself trains a model with, on one batch."""
        train = type(model).make_train_function(model, force=True) or model.train_function
        return lambda data: train(iter([data]))

    def call(self, model: Any, x: Any, *, training: bool) -> Any:
        return model(x, training=training) if model._call_has_training_arg else model(x)

    def without_training(self, layer: Any) -> contextlib.AbstractContextManager[None]:
        """Return a block in which a layer does as in inference, if it knows the difference."""
        if not layer._call_has_training_arg:
            return contextlib.nullcontext()
        call = layer.call
        instead = lambda *args, **kwargs: call(*args, **{**kwargs, "training": False})  # noqa: E731
        return replaced(layer, call=instead)

    # What a model is made of.

    def layers_with_other_draws(self, model: Any, *, is_split: bool) -> list[Any]:
        del model, is_split
        return []

    def has_seeds(self, layer: Any) -> bool:
        return bool(layer._seed_generators)

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
        return model.metrics_variables

    def native(self, variable: Any) -> Any:
        return getattr(variable, "value", variable)

    def results(self, model: Any) -> dict[str, Any]:
        compiled = model._compile_metrics
        if compiled is not None and not compiled.built:  # by a custom step, and not yet
            return {}
        return model.get_metrics_result()

    def metrics_on_replicas(self, model: Any) -> contextlib.AbstractContextManager[None]:
        del model
        return contextlib.nullcontext()

    # The loss.

    def compile_loss_of(self, model: Any) -> Any:
        return model._compile_loss

    def number_of_terms(self, model: Any) -> int:
        return len(model._compile_loss._flat_losses or ())  # none before it is built

    def compute_loss(self, model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        return model._compute_loss(x, y, y_pred, sample_weight, training=True)

    def compute_compiled_loss(self, model: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        return model._compile_loss(y, y_pred, sample_weight)

    def name_of_loss(self, model: Any) -> str:
        if type(model).compute_loss is not self.keras.Model.compute_loss:
            return f"{type(model).__name__}.compute_loss"
        terms = model._compile_loss._flat_losses
        return ", ".join(dict.fromkeys(repr(getattr(term.loss, "name", "?")) for term in terms))

    def regularisers_of(self, model: Any) -> list[Any]:
        return model._get_regularization_losses()

    def compiled_metrics(self, model: Any) -> list[Any]:
        compiled = model._compile_metrics
        return [] if compiled is None else compiled.metrics

    def update_compiled_metrics(
        self, model: Any, y: Any, y_pred: Any, sample_weight: Any
    ) -> None:
        if model._compile_metrics is not None:
            model._compile_metrics.update_state(y, y_pred, sample_weight)

    def losses_of_layers(self, model: Any) -> list[Any]:
        own = model._get_own_losses()
        return [*own, *(loss for layer in layers_of(model) for loss in layer._get_own_losses())]

    def add_loss(self, model: Any, loss: Any) -> None:
        self.keras.Layer.add_loss(model, loss)

    def without_losses(self, model: Any) -> contextlib.AbstractContextManager[None]:
        del model
        return contextlib.nullcontext()

    def elements(self, loss: Any, y_true: Any, y_pred: Any) -> tuple[Any, list[Any]] | None:
        """Return the elements that a loss reduces, and the masks it knows.

        `None` if it does not leave the reduction to Keras.
        """
        if type(loss).__call__ is not self.keras.losses.Loss.__call__:
            return None

        def convert(value: Any) -> Any:
            return self.keras.ops.convert_to_tensor(value, dtype=loss.dtype)

        of = self.keras.tree.map_structure
        values = loss.call(of(convert, y_true), of(convert, y_pred))
        masks = [mask_of(one) for one in (y_pred, values)]
        return values, [mask for mask in masks if mask is not None]

    def value_of(self, loss: Any, y_true: Any, y_pred: Any, weight: Any, by: Any) -> Any:
        del by
        return loss(y_true, y_pred, weight)

    def divides_by_replicas(self, replicas: int) -> int:
        return replicas

    @contextlib.contextmanager
    def watching_loss(
        self,
        model: Any,
        replace: Callable[[Any], Any],
        record: Callable[[Any, Any], None],
        note: Callable[[Any], None] = lambda _: None,
    ) -> Iterator[None]:
        """Return a block in which each loss given to `compile` is replaced by `replace(loss)`.

        What the metric of a loss, if there is one, would be updated with is passed to
        `record(metric, value)` instead; the sum of the losses is passed to `note` as well.
        """
        compile_loss = model._compile_loss
        if compile_loss is None:
            yield
            return
        original = compile_loss.call

        def call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            before: list[Any] = []

            def watch() -> None:
                terms, metrics = compile_loss._flat_losses, compile_loss._metrics
                before[:] = terms, metrics
                compile_loss._flat_losses = [
                    term._replace(loss=replace(term.loss)) for term in terms
                ]
                compile_loss._metrics = [_Recorder(metric, record) for metric in metrics]

            def build(y_true: Any, y_pred: Any) -> None:  # which its first call does
                type(compile_loss).build(compile_loss, y_true, y_pred)
                watch()

            if compile_loss.built:
                watch()
            try:
                with replaced(compile_loss, build=build):
                    total = original(y_true, y_pred, sample_weight)
            finally:
                if before:
                    compile_loss._flat_losses, compile_loss._metrics = before
            note(total)
            return total

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
        return isinstance(value, self.keras.optimizers.Optimizer)

    def scales_loss(self, optimizer: Any) -> bool:
        return isinstance(optimizer, self.keras.optimizers.LossScaleOptimizer)

    def capturing(
        self,
        optimizer: Any,
        apply: Callable[..., None],
        weigh: Callable[[Any], Any],
    ) -> contextlib.AbstractContextManager[None]:
        """Return a block in which an optimizer calls functions and changes nothing.

        Args:
            optimizer: an optimizer.
            apply: called with the gradients, the variables they are of, and whether it is
                `apply_gradients` that was given them.
            weigh: called with the loss, before it is differentiated; returns it.
        """
        scale_loss = optimizer.scale_loss

        def capture(grads: Any, trainable_variables: Any = None) -> None:
            if trainable_variables is None:
                inner = getattr(optimizer, "inner_optimizer", optimizer)
                trainable_variables = inner._trainable_variables
            apply(list(grads), list(trainable_variables), False)

        def capture_pairs(grads_and_vars: Any, *_: Any, **__: Any) -> Any:
            pairs = list(grads_and_vars)
            apply([gradient for gradient, _ in pairs], [one for _, one in pairs], True)
            return optimizer.iterations

        return replaced(
            optimizer,
            apply=capture,
            apply_gradients=capture_pairs,
            scale_loss=lambda loss: scale_loss(weigh(loss)),
        )

    def scale_loss(self, optimizer: Any, loss: Any) -> Any:
        return optimizer.scale_loss(loss)

    def unscaled(self, optimizer: Any, gradients: list[Any]) -> list[Any]:
        del optimizer
        return gradients

    def scale_of_gradients(self, optimizer: Any) -> Any:
        return optimizer.scale_loss(self.ops.ones())

    def optimizer_variables(self, optimizer: Any) -> list[Any]:
        return list(optimizer.variables)

    def changed_by_apply(self, optimizer: Any) -> list[Any]:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        rate = inner._learning_rate  # a variable, unless it is a schedule
        return [one for one in optimizer.variables if one is not rate]

    # Batch normalisation.

    def is_batch_norm(self, layer: Any) -> bool:
        return isinstance(layer, self.keras.layers.BatchNormalization)

    def alone(self, layer: Any) -> contextlib.AbstractContextManager[None]:
        return replaced(layer, synchronized=False)

    def choosing_moments(
        self, layer: Any, choose: Callable[[Any, Any], tuple[Any, Any]]
    ) -> contextlib.AbstractContextManager[None] | None:
        moments = layer._moments
        return replaced(
            layer, _moments=lambda *args, **kwargs: choose(*moments(*args, **kwargs))
        )

    def clear_statistics(self, layer: Any) -> None:
        """Make the moving statistics such that a momentum of zero replaces them: they are."""

    def bias_of_variance(self, layer: Any, count: Any) -> Any:
        del layer, count
        return 1

    def knows_mask(self, layer: Any) -> bool:
        del layer
        return True


def is_batched_by_user(adapter: Any) -> bool:
    """Say whether batches of a torch `DataLoader` are not of its `batch_size` for certain."""
    collate = getattr(getattr(adapter, "_dataloader", None), "collate_fn", None)
    module = getattr(collate, "__module__", None) or ""
    return collate is not None and not module.startswith("torch.utils.data")


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
