"""The optimizers of Keras 3."""

from __future__ import annotations

from typing import Any

from bigbatch.backends.tensorflow.compat import variables_of
from bigbatch.backends.tensorflow.plain_optimizers import (
    PlainOptimizer,
    refuse_unknown,
    settings_of,
)
from bigbatch.backends.tensorflow.variables import native


class Keras3Optimizer(PlainOptimizer):
    """An optimizer of Keras 3.

    It is called outside `strategy.run`: there it makes no reduction of its own, and what it
    clips is the gradient of all replicas.
    """

    is_traced = True

    @staticmethod
    def fits(optimizer: Any) -> bool:
        """Say whether this is such an optimizer."""
        return all(hasattr(optimizer, name) for name in ("apply", "build", "built"))

    def __init__(self, optimizer: Any, variables: list[Any]) -> None:
        super().__init__(optimizer, variables)
        if not optimizer.built:
            optimizer.build(variables)
        known = {id(native(variable)) for variable in variables_of(optimizer)}
        refuse_unknown(v for v in variables if id(native(v)) not in known)

    def settings(self) -> tuple[Any, ...]:
        """Return what is read while an update is traced."""
        found = settings_of(self._optimizer, "_learning_rate")
        inner = getattr(self._optimizer, "inner_optimizer", None)
        return (*found, *([] if inner is None else settings_of(inner, "_learning_rate")))


_ADD_UP_ROWS = ("SGD", "Lion")
_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")


def adds_up_rows(optimizer: Any) -> bool:
    """Say whether an optimizer makes the same update from repeated rows and from their sum.

    Those of Keras do whose update is linear in the gradient up to the sum of repeated rows,
    unless they clip: it is the rows that are clipped, not their sum. A test tries all of them.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a `LossScaleOptimizer`
    modules = [type(one).__module__ for one in (optimizer, inner)]
    # Momentum of the legacy ones moves only the rows that were looked up.
    is_known = all(name.startswith("keras.src.") and ".legacy" not in name for name in modules)
    clips = any(getattr(one, name, None) for one in (optimizer, inner) for name in _CLIPPING)
    return is_known and type(inner).__name__ in _ADD_UP_ROWS and not clips
