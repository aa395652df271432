"""Which backend a model has, and what all generations of Keras have in common.

Names of Keras that are not public are in `backends/` alone; `tests/test_compat*.py` pin them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import types
from typing import Any, Callable, Iterator

import keras

from bigbatch.backends.base import Backend
from bigbatch.core import versions
from bigbatch.core.patching import replaced
from bigbatch.errors import ArgumentError, explain


def backend_of(model: Any) -> Any:
    """Return the backend of a model: its Keras, and the framework that it runs on.

    `None` for anything that is not a model of a Keras.
    """
    package = _package_of(model)
    return None if package is None else _backend(package)


def _package_of(model: Any) -> str | None:
    """Return the package whose model it is: "keras", "tf_keras" or none."""
    for kind in type(model).__mro__:
        package = kind.__module__.split(".")[0]
        # In Keras 3 a layer with a `Trainer` is a model, too.
        if kind.__name__ in ("Model", "Trainer") and package in ("keras", "tf_keras"):
            return package
    return None


def is_keras_3(model: Any) -> bool:
    """Say whether a model is one of Keras 3."""
    return _package_of(model) == "keras" and is_version_3()


def is_version_3() -> bool:
    """Say whether the package `keras` is Keras 3."""
    return int(keras.__version__.split(".")[0]) >= 3


KERAS_3_BACKENDS = {
    "tensorflow": ("bigbatch.backends.tensorflow.keras3", "Keras3OnTensorFlow"),
    "jax": ("bigbatch.backends.jax.keras3", "Keras3OnJax"),
    "torch": ("bigbatch.backends.torch.keras3", "Keras3OnTorch"),
}
"""Where the backends of Keras 3 are, by the name that Keras has for the framework."""


@functools.lru_cache(maxsize=None)
def _backend(package: str) -> Backend:
    if package == "keras" and is_version_3():
        module, name = KERAS_3_BACKENDS[keras.backend.backend()]
        return getattr(importlib.import_module(module), name)(keras)
    # Before TensorFlow 2.16 the public names are those of `tf.keras`.
    name = "tensorflow.keras" if package == "keras" else package
    module = importlib.import_module("bigbatch.backends.keras2.backend")
    return module.Keras2(importlib.import_module(name))


@contextlib.contextmanager
def hidden_from_progress_bar(model: Any, names: Callable[[], set[str]]) -> Iterator[None]:
    """Return a block in which the progress bar of a model does not show some logs.

    Keras makes the progress bar inside `fit` and hands it the logs of all callbacks.

    Args:
        model: a Keras model.
        names: returns the names of logs to leave out.
    """
    bar = importlib.import_module(_package_of(model) or "keras").callbacks.ProgbarLogger
    on_epoch_end = bar.on_epoch_end

    def shown(self: Any, epoch: int, logs: Any = None) -> None:
        hidden = names() if self.model is model else ()
        logs = {name: value for name, value in (logs or {}).items() if name not in hidden}
        on_epoch_end(self, epoch, logs)

    bar.on_epoch_end = shown
    try:
        yield
    finally:
        bar.on_epoch_end = on_epoch_end


class Callback(keras.callbacks.Callback):
    """A callback for models of every Keras, with nothing to do for single batches."""

    def _implements_train_batch_hooks(self) -> bool:
        return False

    _implements_test_batch_hooks = _implements_train_batch_hooks
    _implements_predict_batch_hooks = _implements_train_batch_hooks


class KerasBackend(Backend):
    """The part of a backend that all generations of Keras share.

    Args:
        package: the public names of Keras.
    """

    def __init__(self, package: Any) -> None:
        self.keras = package

    def unpacked(self, data: Any) -> tuple[Any, Any, Any]:
        return self.keras.utils.unpack_x_y_sample_weight(data)

    def packed(self, x: Any, y: Any, sample_weight: Any) -> Any:
        return self.keras.utils.pack_x_y_sample_weight(x, y, sample_weight)

    def has_custom_train_step(self, model: Any) -> bool:
        return self._has_custom(model, "train_step")

    def has_custom_compute_loss(self, model: Any) -> bool:
        return self._has_custom(model, "compute_loss")

    def uses_inputs_after_call(self, model: Any) -> bool:
        custom = functools.partial(self._has_custom, model)
        return custom("compute_loss") or custom("compute_metrics")

    def _has_custom(self, model: Any, method: str) -> bool:
        own = getattr(type(model), method) is not getattr(self.keras.Model, method)
        return own or method in vars(model)

    def name_of(self, optimizer: Any) -> str:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        return inner.name if hasattr(inner, "name") else inner._name

    def result_of(self, metric: Any) -> Any:
        return metric.result()

    def is_mean(self, metric: Any) -> bool:
        return type(metric) is self.keras.metrics.Mean

    def divides_total(self, metric: Any) -> bool:
        mean = self.keras.metrics.Mean
        is_own = type(metric).result is mean.result and "result" not in vars(metric)
        return isinstance(metric, mean) and is_own

    def function_of(self, metric: Any) -> Callable[[Any, Any], Any] | None:
        wrapper = self.keras.metrics.MeanMetricWrapper
        if (
            not isinstance(metric, wrapper)
            or type(metric).update_state is not wrapper.update_state
        ):
            return None
        return functools.partial(metric._fn, **metric._fn_kwargs)

    def update_mean(self, metric: Any, value: Any) -> None:
        self.keras.metrics.Mean.update_state(metric, value)

    @contextlib.contextmanager
    def changing_added_losses(
        self, model: Any, change: Callable[[Any, int, Any], Any]
    ) -> Iterator[None]:
        """Return a block in which layers add `change(layer, position, loss)` to the loss."""

        def adding(layer: Any, add_loss: Any, positions: Iterator[int]) -> Callable[..., None]:
            def add(losses: Any, *args: Any, **kwargs: Any) -> None:
                each = losses if isinstance(losses, (list, tuple)) else [losses]
                changed = [
                    one if callable(one) else change(layer, next(positions), one)
                    for one in each
                ]
                add_loss(changed, *args, **kwargs)

            return add

        with contextlib.ExitStack() as stack:
            for layer in (model, *layers_of(model)):
                instead = adding(layer, layer.add_loss, itertools.count())
                stack.enter_context(replaced(layer, add_loss=instead))
            yield


def check_model(model: Any) -> None:
    """Raise if `model` is not a Keras model that can be trained here."""
    if _package_of(model) is None or (
        is_keras_3(model) and keras.backend.backend() not in KERAS_3_BACKENDS
    ):
        raise ArgumentError(
            explain(
                received=f"model={model!r} ({type(model).__name__}), Keras {keras.__version__} "
                f"with the backend {keras.backend.backend()!r}",
                expected="a Keras 2 model, or a Keras 3 model on one of the backends "
                f"{', '.join(KERAS_3_BACKENDS)}",
                fix="pass the model whose fit() is to accumulate; set KERAS_BACKEND to one of "
                "these",
            )
        )
    if is_keras_3(model):
        versions.check_keras_3(keras.__version__)


def check_keras_3(model: Any, what: str) -> None:
    """Raise if `what`, which is for Keras 3, is asked for a model of Keras 2."""
    if not is_keras_3(model):
        raise ArgumentError(
            explain(
                received=f"{what} for the Keras 2 model {model.name!r}",
                expected="a Keras 3 model",
                fix="bigbatch.accumulate works for both; to try this out, build the model with "
                "Keras 3",
            )
        )


def check_compiled(model: Any) -> None:
    """Raise if a model has no loss and optimizer yet."""
    if not backend_of(model).is_compiled(model):
        raise ArgumentError(
            explain(
                received="a model that has not been compiled",
                expected="a model with a loss and an optimizer",
                fix="call model.compile(...) first",
            )
        )


def is_multi_worker(model: Any) -> bool:
    """Say whether a model is trained by several processes together."""
    return backend_of(model).is_multi_worker(model)


def layers_of(model: Any) -> list[Any]:
    """Return the layers of a model, however deep they are."""
    # In Keras 2 metrics are layers, too.
    return [
        layer
        for layer in model._flatten_layers(include_self=False)
        if not hasattr(layer, "update_state")
    ]


def equalizing_layers(model: Any) -> list[Any]:
    """Return the layers with the values of all images of a batch in each: `Equalization`.

    Those that equalize if they draw so, such as `RandAugment`, stand for the one they have.
    """
    layers, found = layers_of(model), []
    for layer in layers:
        if type(layer).__name__ == "Equalization" and type(layer).__module__[:5] == "keras":
            # A model has layers, too; what draws calls methods of its own layers only.
            holders = [one for one in layers if not hasattr(one, "layers")]
            holders = [one for one in holders if any(it is layer for it in layers_of(one))]
            found.append(min(holders, key=lambda one: len(layers_of(one)), default=layer))
    return found


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizers that a `train_step` may use."""
    return _held_by(model, backend_of(model).is_optimizer)


def metrics_of(model: Any) -> list[Any]:
    """Return the metrics of a model, also those that its own `metrics` leaves out."""
    held = _held_by(model, lambda one: hasattr(one, "update_state") and hasattr(one, "result"))
    return list({id(one): one for one in (*model.metrics, *held)}.values())


_SIMPLE = frozenset((type(None), bool, int, float, str, types.MethodType, types.FunctionType))


def _held_by(model: Any, is_wanted: Callable[[Any], bool]) -> list[Any]:
    """Return what is an attribute of the model or its layers, or stands in a list or dict."""
    unique: dict[int, Any] = {}
    for owner in (model, *layers_of(model)):
        # Python does this for every micro-batch that it runs: most attributes are passed over.
        for value in [one for one in vars(owner).values() if type(one) not in _SIMPLE]:
            values = value.values() if isinstance(value, dict) else value
            for one in values if isinstance(value, (list, tuple, dict)) else (value,):
                if is_wanted(one):
                    unique.setdefault(id(one), one)
    return list(unique.values())


class Held:
    """The optimizers and metrics that attributes of a model hold, batch by batch.

    Where Python runs every micro-batch, looking takes time: it is done in the first two
    micro-batches of a batch, because the first one may make some.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._found: dict[Any, list[list[Any]]] = {}

    def begin(self) -> None:
        """Begin a batch."""
        self._found.clear()

    def optimizers(self) -> list[Any]:
        """Return what `optimizers_of` does."""
        return self._last(optimizers_of)

    def metrics(self) -> list[Any]:
        """Return what `metrics_of` does."""
        return self._last(metrics_of)

    def _last(self, find: Callable[[Any], list[Any]]) -> list[Any]:
        if not backend_of(self._model).runs_in_python(self._model):
            return find(self._model)
        found = self._found.setdefault(find, [])
        if len(found) < 2:
            found.append(find(self._model))
        return found[-1]


def is_copied_for_scikit_learn(model: Any) -> bool:
    """Say whether a wrapper for scikit-learn is copying its model, to train the copy."""
    frame = inspect.currentframe()
    while frame is not None:
        is_wrapper = frame.f_globals.get("__name__") == "keras.src.wrappers.sklearn_wrapper"
        if is_wrapper and frame.f_code.co_name == "_get_model":
            return frame.f_locals["self"].model is model
        frame = frame.f_back
    return False


def python_function(function: Any) -> Callable[..., Any]:
    """Return the Python function in a `tf.function`, and any other function as it is.

    Gradients could not get out of a graph of its own.
    """
    return getattr(function, "python_function", function)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attach a mask to a tensor, for Keras to see."""
    if is_version_3():
        importlib.import_module("keras.src.backend").set_keras_mask(tensor, mask)
    else:
        tensor._keras_mask = mask


def mask_of(tensor: Any) -> Any:
    """Return the mask Keras has attached to a tensor, or `None`."""
    if is_version_3():  # which knows the masks of tensors that take no attributes, too
        return importlib.import_module("keras.src.backend").get_keras_mask(tensor)
    return getattr(tensor, "_keras_mask", None)


def set_logits(tensor: Any, logits: Any) -> None:
    """Attach the logits that probabilities were made of, for losses of Keras to see."""
    tensor._keras_logits = logits


def logits_of(tensor: Any) -> Any:
    """Return the logits Keras has attached to probabilities, or `None`."""
    return getattr(tensor, "_keras_logits", None)
