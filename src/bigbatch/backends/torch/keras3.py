"""Keras 3 on torch."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator

import torch

from bigbatch.backends.keras import optimizers_of
from bigbatch.backends.keras3 import Keras3
from bigbatch.backends.torch.longest import longest
from bigbatch.backends.torch.mechanics import TorchBackend
from bigbatch.core.patching import replaced
from bigbatch.errors import ArgumentError, explain

BUILD_BEFORE_FIT = "_symbolic_build"
"""The method with which `fit` and `evaluate` build a model."""

END_OF_EPOCH = "_get_metrics_result_or_logs"
"""The method with which `fit` turns the logs of the last batch into those of the epoch."""


_NOTHING = None, None, None


class Keras3OnTorch(Keras3, TorchBackend):
    """The backend of Keras 3 models on torch."""

    _computed: tuple[Any, Any, Any] = _NOTHING
    """A loss, the outputs it was called with last, and what it said of each element."""

    longest = staticmethod(longest)

    def methods(self, model: Any, hooks: Any) -> dict[str, Any]:
        def build(iterator: Any = None, data_batch: Any = None) -> None:
            getattr(type(model), BUILD_BEFORE_FIT)(model, iterator, data_batch)
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

        return {BUILD_BEFORE_FIT: build, END_OF_EPOCH: end_epoch}

    def build(self, model: Any, data: Any) -> bool:
        """Create the state of a model, its metrics, loss and optimizer for such `data`.

        Returns:
            Whether Keras can. What it cannot build without data (no `call`) is built by the
            first micro-batch.
        """
        try:
            samples = self.data.with_samples(data)
            getattr(type(model), BUILD_BEFORE_FIT)(model, data_batch=samples)
        except (RuntimeError, AttributeError):
            return False
        return True

    def build_under_strategy(self, model: Any, iterator: Any, data_batch: Any) -> None:
        """Do nothing: there are no strategies."""

    def batches_per_call(self, model: Any) -> int:
        if model.steps_per_execution > 1:
            raise ArgumentError(
                explain(
                    received=f"steps_per_execution={model.steps_per_execution}",
                    expected="steps_per_execution=1, the only value for Keras on torch",
                    fix="leave steps_per_execution out of compile()",
                )
            )
        return 1

    def plain_train_function(self, model: Any) -> Callable[[Any], dict[str, Any]]:
        type(model).make_train_function(model, force=True)
        train = model.train_function
        detached = functools.partial(self.ops.map_structure, lambda leaf: leaf.detach())
        return lambda data: detached(train([data]))

    # The loss.

    def elements(self, loss: Any, y_true: Any, y_pred: Any) -> tuple[Any, list[Any]] | None:
        found = super().elements(loss, y_true, y_pred)
        self._computed = loss, y_pred, found and found[0]
        return found

    def value_of(self, loss: Any, y_true: Any, y_pred: Any, weight: Any, by: Any) -> Any:
        # Keras multiplies sample weights by the mask in place.
        weight = self.ops.map_structure(_copy, weight)
        (of, at, elements), self._computed = self._computed, _NOTHING
        if of is not loss or at is not y_pred or elements is None:
            return super().value_of(loss, y_true, y_pred, weight, by)
        # What `elements` has computed is not computed again: nothing prunes it here.
        with replaced(loss, call=lambda *_: elements):
            return super().value_of(loss, y_true, y_pred, weight, by)

    # What diagnostics ask for.

    @contextlib.contextmanager
    def noting_gradients(self, model: Any) -> Iterator[dict[int, Any]]:
        """Return a block in which the gradients that optimizers are given are noted."""
        noted: dict[int, Any] = {}

        def noting(optimizer: Any) -> Callable[..., Any]:
            apply = optimizer.apply

            def apply_and_note(grads: Any, trainable_variables: Any = None) -> Any:
                grads = list(grads)
                inner = getattr(optimizer, "inner_optimizer", optimizer)
                variables = trainable_variables or inner._trainable_variables
                scale = self.scale_of_gradients(optimizer)
                for variable, gradient in zip(variables, grads):
                    if gradient is not None:
                        noted[id(variable)] = (gradient / scale).to("cpu")
                return apply(grads, trainable_variables)

            return apply_and_note

        with contextlib.ExitStack() as stack:
            for optimizer in optimizers_of(model):
                stack.enter_context(replaced(optimizer, apply=noting(optimizer)))
            yield noted


def _copy(weight: Any) -> Any:
    return weight.clone() if torch.is_tensor(weight) else weight


def certain_batches_of(epoch_iterator: Any) -> int | None:
    """Return after how many batches every epoch ends, or `None` if that is not certain.

    Some epochs are shorter if the data ends before `steps_per_epoch`, or not at a multiple.
    """
    if epoch_iterator.steps_per_epoch and epoch_iterator.data_adapter.num_batches:
        return None
    return epoch_iterator.num_batches
