"""How `fit` of Keras 2 is told where epochs begin and end: by callbacks."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, Callable, Iterator

import tensorflow as tf

from bigbatch.backends.keras import KerasBackend
from bigbatch.backends.tensorflow.data import END_OF_DATA
from bigbatch.errors import ArgumentError, explain

_NO_CALLBACKS = explain(
    received="accumulation_steps and a custom fit() of a Keras 2 model that takes no callbacks",
    expected="a fit() that accepts callbacks, one of which applies the last window",
    fix="let it take **kwargs and pass them on to super().fit(), or pass microbatch_size",
)


class Keras2Fit(KerasBackend):
    """The part of a backend that calls `fit` of Keras 2."""

    def fit(
        self, hooks: Any, fit: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
    ) -> Any:
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

    @contextlib.contextmanager
    def training(self, hooks: Any, model: Any, iterator: Any) -> Iterator[Any]:
        count = self.batches_per_call(model)
        if not hooks.is_fitting:  # but `train_on_batch`, with batches that need not be alike
            iterator = iter([next(iterator)])
        try:
            yield iterator
        except END_OF_DATA:
            self.end_epoch(hooks, model)
            raise
        model._train_counter.assign_add(count)

    def end_epoch(self, hooks: Any, model: Any) -> None:
        """Make the update of a short last window; let the logs be those of the epoch.

        `fit` has the logs already, and looks at them when the epoch is over.
        """
        logs = hooks.trainer.flush()
        if hooks.logs is None:
            return
        hooks.logs.update(logs or {})
        if model.distribute_strategy.num_replicas_in_sync > 1:  # each has told its own
            results = {metric.name: metric.result() for metric in model.metrics}
            known = results.keys() & hooks.logs.keys()
            hooks.logs.update((name, results[name]) for name in known)


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
