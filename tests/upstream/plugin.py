"""A pytest plugin that lets every `fit` of a Keras model accumulate gradients.

`BIGBATCH_UPSTREAM="microbatch_size=2"` switches split mode on, `"accumulation_steps=2"` window
mode; without it nothing is changed. How each test ended is written to the file that
`BIGBATCH_OUTCOMES` names.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

KERAS_MARKERS = ("requires_trainable_backend", "multi_device")
"""Keras registers them in a file that its wheel does not have."""


def pytest_configure(config: Any) -> None:
    for marker in KERAS_MARKERS:
        config.addinivalue_line("markers", f"{marker}: used by Keras' own tests")
    argument, _, number = os.environ.get("BIGBATCH_UPSTREAM", "").partition("=")
    if argument:
        accumulate_in_every_fit({argument: int(number)})
    if not hasattr(config, "workerinput"):  # one process writes the outcomes of all
        config.pluginmanager.register(Outcomes(), "bigbatch-outcomes")


def accumulate_in_every_fit(setting: dict[str, int]) -> None:
    """Let `fit` of every Keras model call `bigbatch.accumulate(model, **setting)` first."""
    import keras

    import bigbatch
    from bigbatch.engine.hooks import fit_with, is_attached

    trainer = next(kind for kind in keras.Model.__mro__ if "fit" in vars(kind))
    original = trainer.fit
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.compiled or is_attached(model):
            return original(model, *args, **kwargs)
        bigbatch.accumulate(model, **setting)
        if "accumulation_steps" in setting:
            bound = signature.bind(model, *args, **kwargs)
            cut_batches(bound.arguments, setting["accumulation_steps"])
            args, kwargs = bound.args[1:], bound.kwargs
        return fit_with(model, original, *args, **kwargs)

    trainer.fit = fit


def cut_batches(arguments: dict[str, Any], steps: int) -> None:
    """Make the batches of arrays smaller, so that `steps` of them are one batch of the test.

    Data sets and generators are grouped as they are: there is nothing to compare with.
    """
    import keras

    leaves = keras.tree.flatten(arguments.get("x"))
    are_arrays = all(getattr(leaf, "shape", None) for leaf in leaves)
    if leaves and are_arrays and arguments.get("steps_per_epoch") is None:
        batch = min(arguments.get("batch_size") or 32, leaves[0].shape[0])
        arguments["batch_size"] = -(-batch // steps)


def pytest_runtest_setup(item: Any) -> None:
    """Begin every test with the same random numbers: some outcomes depend on them."""
    del item
    import keras

    keras.utils.set_random_seed(0)


class Outcomes:
    """Notes how each test ended: "passed", "skipped", or the first line of its failure."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = re.sub("0x[0-9a-f]+", "0x", report.nodeid)  # addresses differ from run to run
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash else str(report.longrepr)
            self.of[name] = f"failed: {text.strip().splitlines()[0][:200]}"
        elif report.when == "call" or report.skipped:
            self.of.setdefault(name, report.outcome)

    def pytest_sessionfinish(self) -> None:
        file = os.environ.get("BIGBATCH_OUTCOMES")
        if file:
            Path(file).write_text(json.dumps(self.of, indent=1, sort_keys=True))
