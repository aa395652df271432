"""The compiled loss of Keras 2, with another function in place of each of its terms."""

from __future__ import annotations

import copy
from typing import Any, Callable

import tensorflow as tf

_SUM, _NONE = "sum", "none"


class WatchedLoss:
    """Stands in for the compiled loss of a model."""

    def __init__(
        self,
        compiled: Any,
        replace: Callable[[Any], Any],
        note: Callable[[Any], None],
        replicas: int,
    ) -> None:
        self._compiled, self._replace = compiled, replace
        self._note, self._replicas = note, replicas

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def tried(self, *args: Any) -> Any:
        """Compute the loss; one that was not built is not built afterwards: it logs nothing."""
        if self._compiled.built:
            return self(*args)
        compiled = copy.copy(self._compiled)
        return WatchedLoss(compiled, self._replace, self._note, self._replicas)(*args)

    def __call__(self, y_true: Any, y_pred: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss; on several replicas that of this one."""
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
        total = total if total is None or self._replicas == 1 else total * self._replicas
        self._note(total)
        return total


class _Term:
    """Stands in for a loss.

    What is a sum Keras does not divide by the number of replicas, and `WatchedLoss` still
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
