"""Train with any batch size on the memory you have; get the same update as the full batch.

Importing `bigbatch` imports no framework: the public names below are resolved when they
are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bigbatch.errors import MissingFrameworkError, explain

if TYPE_CHECKING:
    from bigbatch.keras.accumulate import accumulate as accumulate
    from bigbatch.keras.accumulate import microbatch_size as microbatch_size
    from bigbatch.keras.accumulate import restore as restore
    from bigbatch.planner.measure import plan as plan
    from bigbatch.planner.plan import Plan as Plan
    from bigbatch.tf.accumulator import GradientAccumulator as GradientAccumulator
    from bigbatch.tf.gradients import value_and_gradients as value_and_gradients

__version__ = "0.1.0.dev0"

_HOMES = {
    "GradientAccumulator": "bigbatch.tf.accumulator",
    "Plan": "bigbatch.planner.plan",
    "accumulate": "bigbatch.keras.accumulate",
    "microbatch_size": "bigbatch.keras.accumulate",
    "plan": "bigbatch.planner.measure",
    "restore": "bigbatch.keras.accumulate",
    "value_and_gradients": "bigbatch.tf.gradients",
}

__all__ = [
    "GradientAccumulator",
    "Plan",
    "__version__",
    "accumulate",
    "microbatch_size",
    "plan",
    "restore",
    "value_and_gradients",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bigbatch' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ("tensorflow", "keras"):
            raise
        raise MissingFrameworkError(
            explain(
                received=f"bigbatch.{name} where TensorFlow or Keras is not installed",
                expected="TensorFlow 2.16 or newer with Keras 3 in this environment",
                fix="pip install 'bigbatch[tensorflow]'",
            )
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
