"""Keras 3 on TensorFlow."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator

import tensorflow as tf

from bigbatch.backends.exact_refusals import refuse_exact
from bigbatch.backends.keras import optimizers_of
from bigbatch.backends.keras3 import Keras3
from bigbatch.backends.tensorflow.compat import (
    global_seeds,
    inlined_functions,
    is_compiled,
    variables_of,
)
from bigbatch.backends.tensorflow.data import next_of, on_next, without_optionals
from bigbatch.backends.tensorflow.exact.moments import moments_of_batch
from bigbatch.backends.tensorflow.longest import longest
from bigbatch.backends.tensorflow.mechanics import TensorFlowBackend
from bigbatch.core.patching import replaced


class Keras3OnTensorFlow(Keras3, TensorFlowBackend):
    """The backend of Keras 3 models on TensorFlow."""

    longest = staticmethod(longest)
    BUILD_BEFORE_FIT = "_maybe_symbolic_build"

    def methods(self, model: Any, hooks: Any) -> dict[str, Any]:
        methods = super().methods(model, hooks)
        if hooks.is_multi_worker:
            make = functools.partial(_make_test_function, model)
            return {**methods, "make_test_function": make}
        return methods

    def build_before_fit(self, model: Any, iterator: Any, data_batch: Any) -> None:
        self.build_under_strategy(model, iterator, data_batch)

    def jit_compile(self, model: Any) -> bool:
        return super().jit_compile(model) or is_compiled(model.train_step)

    def in_one_graph(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return inlined_functions(compiled=is_compiled(model.train_step))

    def batches_of(self, epoch_iterator: Any) -> tuple[int | None, int | None, int | None]:
        batches, size, rest = super().batches_of(epoch_iterator)
        if size is None:  # a data set may still know it
            leaf = tf.nest.flatten(epoch_iterator._distributed_dataset.element_spec)[0]
            if isinstance(leaf, tf.TensorSpec) and leaf.shape.rank:
                size = leaf.shape[0]
        return batches, size, rest

    def build(self, model: Any, data: Any) -> bool:
        """Create the state of a model, its metrics, loss and optimizer for such `data`.

        What a custom `train_step` builds is known when it has run: it alone knows what layers
        are called with. It builds them in the first trace, as with plain Keras on TensorFlow,
        and so does a model that Keras cannot build without data. A custom `compute_loss` may
        build layers, too: then the optimizer has to wait for their weights.

        Returns:
            Whether all of it is there.
        """
        if model._distribute_strategy is not None:
            return True  # before it is trained: `build_under_strategy`
        is_custom = self.has_custom_train_step(model)
        is_late = is_custom or self.uses_inputs_after_call(model)
        if not is_custom:
            later = replaced(model, optimizer=None) if is_late else contextlib.nullcontext()
            try:
                with later, _in_training(model):
                    model._symbolic_build(data_batch=data)
            except Exception:  # training itself says more, if it fails, too
                return False
        parts = (*model._flatten_layers(), model._compile_metrics, model._compile_loss)
        return not is_late or all(part is None or part.built for part in parts)

    def build_under_strategy(self, model: Any, iterator: Any, data_batch: Any) -> None:
        """Build a model as `fit` does, from one replica's part of the data.

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
        """Return what every Keras 3 model has, and the state of draws without a seed."""
        seeds = None if model._distribute_strategy is not None else global_seeds()
        return [*super().state_of(model), *([] if seeds is None else [seeds.state.value])]

    def refuse_exact(self, model: Any, layers: list[Any]) -> None:
        moments = self.keras.layers.BatchNormalization._moments
        others = [layer for layer in layers if type(layer)._moments is not moments]
        refuse_exact(model, layers, others)

    def statistics_of_batch(self, layer: Any) -> contextlib.AbstractContextManager[None]:
        # Read now: a layer that is called twice has moved it before the second call.
        shift = layer.moving_mean.value.read_value() if layer.built else 0.0

        def moments(inputs: Any, mask: Any) -> tuple[Any, Any]:
            epsilon = self.keras.config.epsilon()
            return moments_of_batch(inputs, layer._reduction_axes, mask, shift, epsilon)

        return replaced(layer, _moments=moments)

    @contextlib.contextmanager
    def noting_gradients(self, model: Any) -> Iterator[dict[int, Any]]:
        """Return a block in which the gradients that optimizers are given are noted."""
        noted: dict[int, Any] = {}
        variables = model.trainable_variables
        places = {id(one): tf.Variable(tf.zeros(one.shape, one.dtype)) for one in variables}

        def noting(optimizer: Any) -> Callable[..., Any]:
            apply = optimizer.apply

            def apply_and_note(grads: Any, trainable_variables: Any = None) -> Any:
                grads = list(grads)
                variables = trainable_variables or variables_of(optimizer)
                scale = optimizer.scale_loss(tf.ones([]))  # of the loss: of gradients too
                for variable, gradient in zip(variables, grads):
                    if gradient is not None and id(variable) in places:
                        place = noted[id(variable)] = places[id(variable)]
                        value = tf.convert_to_tensor(gradient)
                        place.assign(value / tf.cast(scale, value.dtype))
                return apply(grads, trainable_variables)

            return apply_and_note

        with contextlib.ExitStack() as stack:
            for optimizer in optimizers_of(model):
                stack.enter_context(replaced(optimizer, apply=noting(optimizer)))
            yield noted


def _in_training(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a block in which a model with a custom `call` returns what it does in training.

    Keras builds a model with a call in inference, and its loss for what that returns, unless
    training is what builds them, as it does in plain Keras.
    """
    call = model.call
    if not model._call_has_training_arg or call.__module__.startswith("keras.src."):
        return contextlib.nullcontext()
    instead = lambda *args, **kwargs: call(*args, **{**kwargs, "training": True})  # noqa: E731
    return replaced(model, call=instead)


def _make_test_function(model: Any, force: bool = False) -> Any:
    """Make what Keras makes, but for several workers, where that fails on numbers."""
    strategy = model.distribute_strategy

    def on_batch(data: Any) -> dict[str, Any]:
        logs = strategy.run(model.test_step, args=(without_optionals(data),))
        mean = functools.partial(strategy.reduce, tf.distribute.ReduceOp.MEAN, axis=None)
        return {name: mean(value) for name, value in logs.items()}

    def test(iterator: Any) -> dict[str, Any]:
        if model.steps_per_execution == 1:
            return on_batch(next_of(iterator))
        return on_next(iterator, on_batch, model.steps_per_execution)[1]

    if model.test_function is None or force:
        model.test_function = test
        if not model.run_eagerly:
            model.test_function = tf.function(test, reduce_retracing=True, autograph=False)
    return model.test_function
