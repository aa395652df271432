"""Comparisons of trainings: all of them check lengths and shapes, and none overlooks a NaN.

The syntax is that of Python 3.7: the tests of TensorFlow 1.14 use `paired`, too.
"""

from __future__ import annotations

import contextlib
import re
import warnings as python_warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stack import variables_of

VISIBLE = (UserWarning, RuntimeWarning)
"""Warnings that are about the training; deprecations are about how a library is written."""


def paired(one: Iterable[Any], two: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return the pairs of two collections of the same length, which are not empty."""
    one, two = list(one), list(two)
    assert len(one) == len(two), f"{len(one)} entries are compared with {len(two)}"
    assert one, "there is nothing to compare"
    return [*zip(one, two)]


def largest_difference(arrays: Iterable[Any], other_arrays: Iterable[Any]) -> float:
    """Return the largest difference between two lists of arrays: NaN if any entry is NaN.

    NaN is not less than any tolerance, so `largest_difference(...) <= tolerance` is false.
    """
    return float(np.max([_difference(*pair) for pair in paired(arrays, other_arrays)]))


def _difference(one: Any, two: Any) -> float:
    one, two = np.asarray(one), np.asarray(two)
    assert one.shape == two.shape, f"shape {one.shape} is compared with {two.shape}"
    with np.errstate(invalid="ignore"):  # infinity minus infinity is NaN, and so no match
        differences = np.abs(one.astype("float64") - two.astype("float64"))
    return float(np.max(differences, initial=0.0))


def _size(values: Any) -> float:
    """Return the largest entry without its sign; NaN counts as nothing, it is found later."""
    absolute = np.abs(np.asarray(values, "float64"))
    return float(np.max(np.nan_to_num(absolute, nan=0.0), initial=0.0))


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizer a model is compiled with, and others that it or its layers hold."""
    found = [model.optimizer]
    for owner in (model, *getattr(model, "layers", ())):
        for value in vars(owner).values():
            for one in value if isinstance(value, (list, tuple)) else [value]:
                if hasattr(one, "apply_gradients") and all(one is not other for other in found):
                    found.append(one)
    return found


def _by_name(variables: Iterable[Any]) -> dict[str, np.ndarray]:
    """Return values by position and name, without the numbers that Keras adds to names."""
    named = {}
    for index, variable in enumerate(variables):
        name = getattr(variable, "path", None)
        if name is None:  # Keras 2, where a name begins with the scope of who made it
            name = variable.name.split("/")[-1]
        name = re.sub(r"_\d+(?=[_/:]|$)", "", name)
        named[f"{index}/{name}"] = np.array(variable.numpy())
    return named


@dataclass(frozen=True)
class Training:
    """Everything that a training leaves behind, as plain values."""

    weights: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    state: dict[str, np.ndarray]
    """What is not trained: moving statistics, states of random layers; logs say metrics."""
    logs: dict[str, list[float]]
    iterations: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Fitted:
    """A model that was trained; `model, history = fitted` works, too."""

    model: Any
    history: dict[str, Any]
    warnings: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.history))

    @property
    def training(self) -> Training:
        """What the training has left in the model by now."""
        return training_of(self.model, self.history, self.warnings)


def training_of(model: Any, history: dict[str, Any], warnings: Iterable[str] = ()) -> Training:
    """Return everything that a training has left behind."""
    metrics = {id(variable) for one in model.metrics for variable in one.variables}
    for one in optimizers_of(model):
        _ = one.iterations  # which Keras 2.10 makes when it is first asked for
    states = [one for one in model.non_trainable_variables if id(one) not in metrics]
    return Training(
        weights=_by_name(model.trainable_variables),
        optimizer=_by_name(v for one in optimizers_of(model) for v in variables_of(one)),
        state=_by_name(states),
        logs={name: [*map(float, np.ravel(history[name]))] for name in sorted(history)},
        iterations=int(model.optimizer.iterations.numpy()),
        warnings=tuple(re.sub(r"_\d+\b", "", message) for message in warnings),
    )


@contextlib.contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Record the messages of warnings, and give the warnings afterwards as if nobody had."""
    messages: list[str] = []
    with python_warnings.catch_warnings(record=True) as caught:
        for category in VISIBLE:
            python_warnings.simplefilter("always", category)
        yield messages
    messages.extend(str(one.message) for one in caught if issubclass(one.category, VISIBLE))
    for one in caught:
        python_warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def _same_names(names: Iterable[str], others: Iterable[str], is_exact: bool) -> bool:
    """Whether as many variables have the same names, except for where they were built.

    Keras says "dense/kernel", or "my_model/dense/kernel" if the model called the layer first.
    """
    names, others = list(names), list(others)
    if is_exact or len(names) != len(others):
        return names == others
    ends = ((one.split("/")[-1], two.split("/")[-1]) for one, two in zip(names, others))
    return all(one.endswith(two) or two.endswith(one) for one, two in ends)


def _kind_of_slot(name: str, training: Training) -> frozenset[str]:
    """Return what is left of the name of a slot without the name of its weight: "momentum"."""
    of_weights = {word for weight in training.weights for word in _words(weight)}
    return frozenset(_words(name)) - of_weights


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\W_]", name) if word and not word.isdigit()]


def differences(
    found: Training, expected: Training, tolerance: float, warns: Sequence[str] = ()
) -> list[str]:
    """Return a line for each entry of a training in which it differs from the expected one.

    `tolerance` is absolute for weights and state. A log is a mean of larger numbers: its own
    size comes on top. Slots of an optimizer have the size of gradients or of their squares, as
    small as 1e-6: there it is relative to the largest entry of all slots of that kind, unless
    that is above one, and so never looser than for weights. Not to that of the slot alone: of a
    weight that does not change the loss it is rounding, and nothing else.

    A training may not warn of anything that the expected one does not warn of, except for
    `warns`, patterns of which each must be found.
    """
    lines = []
    if found.iterations != expected.iterations:
        lines.append(f"iterations: {found.iterations}, expected {expected.iterations}")
    if not expected.weights:
        lines.append("weights: there is nothing to compare")
    for field in ("weights", "optimizer", "state", "logs"):
        entries, others = getattr(found, field), getattr(expected, field)
        if not _same_names(entries, others, is_exact=field == "logs"):
            lines.append(f"{field}: {list(entries)}, expected {list(others)}")
            continue
        scales = _scales(field, expected)
        for (name, value), other, scale in zip(entries.items(), others.values(), scales):
            if np.shape(value) != np.shape(other):
                lines.append(f"{field}: {name}: {np.shape(value)}, not {np.shape(other)}")
                continue
            difference = _difference(value, other)
            if not difference <= tolerance * scale:  # NaN is not
                lines.append(f"{field}: {name}: {difference:.3g} > {tolerance * scale:.3g}")
    return lines + _warnings_of(found, expected, warns)


def _scales(field: str, expected: Training) -> list[float]:
    """Return what to multiply the tolerance by for each entry of a field."""
    sizes = [_size(values) for values in getattr(expected, field).values()]
    if field == "logs":
        return [1.0 + size for size in sizes]
    if field != "optimizer":
        return [1.0] * len(sizes)
    kinds = [_kind_of_slot(name, expected) for name in expected.optimizer]
    largest = dict.fromkeys(kinds, 0.0)
    for kind, size in zip(kinds, sizes):
        largest[kind] = max(largest[kind], size)
    return [min(1.0, largest[kind]) for kind in kinds]


def _warnings_of(found: Training, expected: Training, warns: Sequence[str]) -> list[str]:
    """Return a line for each warning that should not be there, or should be and is not."""
    lines, unexpected = [], set(found.warnings) - set(expected.warnings)
    for pattern in warns:
        matching = {one for one in unexpected if re.search(pattern, one)}
        if not matching:
            lines.append(f"warnings: none matches {pattern!r}")
        unexpected -= matching
    return [*lines, *(f"warnings: {one}" for one in sorted(unexpected))]


def check_same(
    found: Training | Fitted,
    expected: Training | Fitted,
    tolerance: float,
    warns: Sequence[str] = (),
) -> None:
    """Fail with every entry in which a training differs; see `differences`."""
    one, two = (one.training if isinstance(one, Fitted) else one for one in (found, expected))
    lines = differences(one, two, tolerance, warns)
    assert not lines, "not the same:\n" + "\n".join(lines)


def check_same_models(model: Any, expected: Any, tolerance: float) -> None:
    """Compare all that two models hold, where their logs are not comparable."""
    check_same(training_of(model, {}), training_of(expected, {}), tolerance)


def check_equals_full_batch(
    case: Any,
    tolerance: float,
    sizes: Iterable[int] = (8, 20),
    windows: Iterable[int] = (3, 7),
    expected: Fitted | None = None,
) -> None:
    """Train a case with the full batch and accumulated in many ways; compare everything.

    The batch has 21 samples and the last one of an epoch eight: micro-batches of `sizes` leave
    remainders (8 + 8 + 5, 20 + 1), and the last of `windows` is short (7 + 1, 3 + 3 + 2).
    """
    expected = expected or case.train()
    settings = [("split", {"microbatch_size": size}) for size in sizes]
    settings += [("window", {"accumulation_steps": steps}) for steps in windows]
    assert settings, "there is nothing to compare"
    for mode, setting in settings:
        found = case.accumulate(mode, setting)
        try:
            check_same(found, expected, tolerance)
        except AssertionError as error:
            raise AssertionError(f"{setting}: {error}") from error
