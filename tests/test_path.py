"""The path of a batch: few files, and each is named in the guide for contributors."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import keras
import numpy as np
import pytest

import bigbatch

SOURCE = Path(bigbatch.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "how-it-works.md"


def path_of_a_batch(setting, batch_size):
    """Return the files on the call stack, between `fit` and what is the user's, in order."""
    stacks = []

    def note():
        frames = traceback.extract_stack()
        files = [Path(frame.filename) for frame in frames]
        names = [frame.name for frame in frames]
        start = names.index("train")  # the function that `fit` calls for each batch
        own = [file for file in files[start:] if SOURCE in file.parents]
        stacks.append([str(file.relative_to(SOURCE)) for file in own])

    class Model(keras.Sequential):
        def train_step(self, data):
            note()
            return super().train_step(data)

    class SGD(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            note()
            super().apply(grads, trainable_variables)

    model = Model([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(SGD(), "mse")
    bigbatch.accumulate(model, **setting)
    model.fit(np.ones((16, 3)), np.ones((16, 1)), batch_size=batch_size, verbose=0)
    return list(dict.fromkeys(file for stack in stacks for file in stack))


@pytest.mark.parametrize(
    ("setting", "batch_size"),
    [({"microbatch_size": 4}, 8), ({"accumulation_steps": 2}, 4)],
    ids=["split", "window"],
)
def test_the_path_of_a_batch_is_the_one_in_the_guide(setting, batch_size):
    files = path_of_a_batch(setting, batch_size)
    named = re.findall(r"^\| \d+ \| `([\w/.]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(named) <= 10
    assert files == named
