"""Gradient accumulation for Keras and TensorFlow: the same update as the full batch.

Importing `bigbatch` imports no framework: the public names below are resolved when they
are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bigbatch.errors import MissingFrameworkError, explain

if TYPE_CHECKING:
    from bigbatch.backends.cross_microbatch import (
        cross_microbatch_gather as cross_microbatch_gather,
    )
    from bigbatch.backends.cross_microbatch import cross_microbatch_sum as cross_microbatch_sum
    from bigbatch.backends.learning_rate import scale_learning_rate as scale_learning_rate
    from bigbatch.core.exact import ExactBatchNorm as ExactBatchNorm
    from bigbatch.core.noise import NoiseScaleEstimator as NoiseScaleEstimator
    from bigbatch.core.schedules import grow as grow
    from bigbatch.core.schedules import piecewise as piecewise
    from bigbatch.diagnostics.monitor import Monitor as Monitor
    from bigbatch.diagnostics.noise_scale import NoiseScale as NoiseScale
    from bigbatch.diagnostics.verification import Verification as Verification
    from bigbatch.diagnostics.verify import verify as verify
    from bigbatch.engine.accumulate import accumulate as accumulate
    from bigbatch.engine.accumulate import microbatch_size as microbatch_size
    from bigbatch.engine.accumulate import restore as restore
    from bigbatch.errors import NotEqualWarning as NotEqualWarning
    from bigbatch.loops.accumulator import GradientAccumulator as GradientAccumulator
    from bigbatch.loops.value_and_gradients import value_and_gradients as value_and_gradients
    from bigbatch.planner.measure import plan as plan
    from bigbatch.planner.plan import Plan as Plan

__version__ = "0.2.0.dev0"

_HOMES = {
    "ExactBatchNorm": "bigbatch.core.exact",
    "GradientAccumulator": "bigbatch.loops.accumulator",
    "Monitor": "bigbatch.diagnostics.monitor",
    "NoiseScale": "bigbatch.diagnostics.noise_scale",
    "NoiseScaleEstimator": "bigbatch.core.noise",
    "NotEqualWarning": "bigbatch.errors",
    "Plan": "bigbatch.planner.plan",
    "Verification": "bigbatch.diagnostics.verification",
    "accumulate": "bigbatch.engine.accumulate",
    "cross_microbatch_gather": "bigbatch.backends.cross_microbatch",
    "cross_microbatch_sum": "bigbatch.backends.cross_microbatch",
    "grow": "bigbatch.core.schedules",
    "microbatch_size": "bigbatch.engine.accumulate",
    "piecewise": "bigbatch.core.schedules",
    "plan": "bigbatch.planner.measure",
    "restore": "bigbatch.engine.accumulate",
    "scale_learning_rate": "bigbatch.backends.learning_rate",
    "value_and_gradients": "bigbatch.loops.value_and_gradients",
    "verify": "bigbatch.diagnostics.verify",
}

_WITHOUT_FRAMEWORK = {
    "bigbatch.core.exact",
    "bigbatch.core.noise",
    "bigbatch.core.schedules",
    "bigbatch.diagnostics.verification",
    "bigbatch.errors",
    "bigbatch.planner.plan",
}

__all__ = [
    "ExactBatchNorm",
    "GradientAccumulator",
    "Monitor",
    "NoiseScale",
    "NoiseScaleEstimator",
    "NotEqualWarning",
    "Plan",
    "Verification",
    "__version__",
    "accumulate",
    "cross_microbatch_gather",
    "cross_microbatch_sum",
    "grow",
    "microbatch_size",
    "piecewise",
    "plan",
    "restore",
    "scale_learning_rate",
    "value_and_gradients",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bigbatch' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_home(name)), name)
    except ModuleNotFoundError as error:
        if error.name not in ("tensorflow", "jax", "torch", "keras"):
            raise
        raise MissingFrameworkError(
            explain(
                received=f"bigbatch.{name} where {error.name} is not installed",
                expected="Keras 3 with TensorFlow, JAX or torch, or Keras 2 with TensorFlow "
                "2.10 or newer",
                fix="pip install 'bigbatch[tensorflow]', 'bigbatch[jax]' or 'bigbatch[torch]'",
            )
        ) from error
    globals()[name] = value
    return value


def _home(name: str) -> str:
    """Return the module that has `name`, for the framework that is installed."""
    home = _HOMES[name]
    if home in _WITHOUT_FRAMEWORK:
        return home
    if not home.startswith("bigbatch.loops") and not _keras_runs_on_tensorflow():
        return home
    is_one = importlib.import_module("bigbatch.core.versions").is_one
    tensorflow = importlib.import_module("tensorflow")
    return "bigbatch.loops.tf1" if is_one(name, tensorflow.__version__) else home


def _keras_runs_on_tensorflow() -> bool:
    """Say whether TensorFlow is the backend of Keras, as it always is before Keras 3."""
    try:
        keras = importlib.import_module("keras")
    except ModuleNotFoundError:
        return True
    return not hasattr(keras, "backend") or keras.backend.backend() == "tensorflow"


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
