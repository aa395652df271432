"""What a custom `train_step` does that micro-batches cannot: what to call it, and the fix."""

from __future__ import annotations

from typing import Any

import numpy as np

from bigbatch.engine.difference import LOSS, Cause, Part, differ

_ENOUGH = 8
"""Of how many numbers in a gradient on it is no chance that parts add up to the whole."""


def of_counts(model: Any, size: float) -> Cause:
    """Say that a `train_step` divides by something else than was counted before."""
    return Cause(
        f"train_step of {type(model).__name__}",
        "it weights its loss by numbers of its own, and what micro-batches count for is "
        "counted from the sample weights of the data",
        size,
        "put these numbers into the data as sample weights, and call self.compute_loss(x, y, "
        "y_pred, sample_weight) with the weights that train_step is given",
        subject=LOSS,
    )


def of_mixed_inputs(model: Any, parts: list[Part], rounding: float) -> Cause | None:
    """Return the `train_step` if it mixes samples before the first layer has them."""
    calls = [one.calls[0] for one in parts if one.calls]
    if not calls or len(calls) < len(parts) or len({id(call.layer) for call in calls}) > 1:
        return None
    size = differ([call.inputs for call in calls], [one.share for one in parts[1:]])
    if size <= rounding:
        return None
    return Cause(
        f"train_step of {type(model).__name__}",
        f"what it gives to {calls[0].layer.name!r} depends on other samples of the batch, as "
        "with mixup, or on draws that cannot equal the full batch",
        size,
        "do that before fit(), by map() of a data set of whole batches, in split mode",
    )


def of_other_weights(
    model: Any, parts: list[Part], rounding: float, what_differs: str
) -> Cause | None:
    """Return the `train_step` if parts of the batch would have to count otherwise, no more."""
    size = _other_weights([one.gradients for one in parts], rounding)
    if size is None:
        return None
    return Cause(
        f"train_step of {type(model).__name__}",
        "its loss divides by something other than the number of samples, such as that of "
        f"tokens; {what_differs}",
        size,
        "put a weight for each token into the data as sample weights, zero for what does not "
        "count, call self.compute_loss(x, y, y_pred, sample_weight) with them, and compile a "
        'loss with reduction="mean_with_sample_weight"',
        subject=LOSS,
    )


def _other_weights(gradients: list[list[Any]], rounding: float) -> float | None:
    """Return by how much the parts would have to count otherwise; `None` if that is not all."""
    pairs = [values for values in zip(*gradients) if all(one is not None for one in values)]
    arrays = [[np.ravel(one).astype(float) for one in values] for values in pairs]
    norms = [np.linalg.norm(values[0]) for values in arrays]
    # Variables count the same, whatever the size of their gradients.
    arrays = [[one / norm for one in some] for some, norm in zip(arrays, norms) if norm > 0]
    if sum(values[0].size for values in arrays) < _ENOUGH:
        return None
    whole, *parts = (np.concatenate(some) for some in zip(*arrays))
    weights, *_ = np.linalg.lstsq(np.stack(parts, 1), whole, rcond=None)
    rest = np.linalg.norm(whole - np.stack(parts, 1) @ weights)
    size = float(np.abs(weights - 1).max())
    is_all = rest <= rounding * np.linalg.norm(whole) and size > rounding
    return size if is_all else None
