"""Promise 13: sparse gradients are those of the full batch.

Rows that samples have looked up are listed, one for each; rows that every micro-batch looks up
in the same way, such as positions, are summed. If they are confused, an update of Keras' Adam
is off by tens of percent.
"""

from __future__ import annotations

import numpy as np
import pytest

import bigbatch
from bigbatch.errors import ArgumentError
from comparison import check_equals_full_batch, check_same
from fit_cases import BATCH, TOKEN_Y, TOKENS, Case

from problems import TOLERANCE, built_in_optimizers
from stack import IS_KERAS_3, keras

pytestmark = pytest.mark.skipif(not IS_KERAS_3, reason="written with keras.ops")
layers = keras.layers


class Positions(layers.Layer):
    """Adds learned positions, looked up in a table by their numbers."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(9, 4)

    def build(self, shape):
        self.table.build(shape)

    def call(self, x):
        return x + self.table(keras.ops.arange(keras.ops.shape(x)[1]))


class PositionsOfEachSample(Positions):
    """As many lookups as there are tokens in the batch: what each gives is a row."""

    def call(self, x):
        shape = keras.ops.shape(x)[:2]
        return x + self.table(keras.ops.broadcast_to(keras.ops.arange(shape[1]), shape))


class RelativePositions(layers.Layer):
    """Mixes tokens by a table of distances, as T5 and Swin do."""

    def build(self, shape):
        self.bias = self.add_weight(shape=(13, 1), initializer="normal")

    def call(self, x):
        places = np.arange(7)
        distances = places[:, None] - places[None, :] + 6
        weights = keras.ops.take(self.bias, distances, axis=0)[..., 0]
        return keras.ops.einsum("ij,bjc->bic", weights, x)


class TokensAndPositions(layers.Layer):
    """One table for both: its gradient has rows of two kinds."""

    def build(self, shape):
        self.table = layers.Embedding(9, 4)
        self.table.build(shape)

    def call(self, tokens):
        positions = keras.ops.arange(keras.ops.shape(tokens)[1])
        return self.table(tokens) + self.table(positions)


def model_with(*parts, length=7):
    def make():
        tokens = keras.Input((length,), dtype="int32")
        x = layers.Embedding(6, 4)(tokens)
        for part in parts:
            x = part()(x)
        return keras.Model(tokens, layers.Dense(2)(layers.Dense(6, "tanh")(x)))

    return make


def tied(length=7):
    def make():
        tokens = keras.Input((length,), dtype="int32")
        return keras.Model(tokens, layers.Dense(2)(TokensAndPositions()(tokens)))

    return make


def case_of(make, optimizer=lambda: keras.optimizers.Adam(0.01)):
    return Case(make, TOKENS, TOKEN_Y, optimizer=optimizer)


CASES = {
    "positions": case_of(model_with(Positions)),
    "positions, clipped": case_of(
        model_with(Positions), lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.01)
    ),
    "positions, any length": case_of(model_with(Positions, length=None)),
    "positions of each sample": case_of(model_with(PositionsOfEachSample)),
    "relative positions": case_of(model_with(RelativePositions)),
    "one table for tokens and positions": case_of(tied()),
    "one table, any length": case_of(tied(None)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_full_batch(name, float64):
    check_equals_full_batch(CASES[name], TOLERANCE["float64"])


@pytest.mark.parametrize("name", ["positions", "one table for tokens and positions"])
def test_eagerly(name, float64):
    case = CASES[name].compiled(run_eagerly=True)
    check_equals_full_batch(case, TOLERANCE["float64"], sizes=(8,), windows=(3,))


def test_under_xla(mode):
    case = CASES["positions"].compiled(jit_compile=True)
    check_same(case.accumulate(mode), case.train(), TOLERANCE["float32"])


# ScheduleFreeAdamW starts from other values if Keras builds it while tracing.
OPTIMIZERS = [name for name in built_in_optimizers() if name != "ScheduleFreeAdamW"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.01])
def test_every_optimizer(name, clip, float64):
    make = built_in_optimizers()[name]

    def optimizer():
        made = make()
        made.global_clipnorm = clip
        return made

    case = case_of(model_with(Positions), optimizer)
    check_equals_full_batch(case, TOLERANCE["float64"], sizes=(8,), windows=(3,))


def test_on_replicas(mode, mirrored):
    """The reference is plain Keras under the same strategy: every replica has its own rows."""
    case = CASES["positions"]
    with mirrored.scope():
        expected = case.train(batch_size=2 * BATCH)
    setting = {"microbatch_size": 8} if mode == "split" else {"accumulation_steps": 1}
    with mirrored.scope():
        found = case.train(lambda m: bigbatch.accumulate(m, **setting), batch_size=2 * BATCH)
    check_same(found, expected, TOLERANCE["float32"])


@pytest.mark.parametrize("name", ["positions", "positions of each sample"])
def test_rows_of_the_wrong_kind_are_found(name, monkeypatch, float64):
    """Listed where they are to be summed, and the reverse."""
    from bigbatch.backends.tensorflow import sparse_rows

    check_equals_full_batch(CASES[name], TOLERANCE["float64"], sizes=(5,), windows=())
    right = sparse_rows._parts_of

    def wrong(*arguments):
        indices, parts = right(*arguments)
        return indices, [sparse_rows._Part(not one.is_repeated, one.count) for one in parts]

    monkeypatch.setattr(sparse_rows, "_parts_of", wrong)
    with pytest.raises((AssertionError, ArgumentError)):  # nothing to sum
        check_equals_full_batch(CASES[name], TOLERANCE["float64"], sizes=(5,), windows=())
