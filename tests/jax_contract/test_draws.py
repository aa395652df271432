"""Random draws of micro-batches are the rows of the full batch's, bit by bit."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import bigbatch
from bigbatch.backends.jax import draws
from comparison import check_same
from fit_cases import Case

from problems import TOLERANCE, largest_difference

KEY = jnp.asarray([3, 4], jnp.uint32)
ROWS = 64
DRAWN = {
    "uniform": lambda shape: keras.random.uniform(shape, seed=KEY),
    "uniform in a range": lambda shape: keras.random.uniform(shape, -1, 3, seed=KEY),
    "normal": lambda shape: keras.random.normal(shape, seed=KEY),
    "half precision": lambda shape: keras.random.normal(shape, dtype="bfloat16", seed=KEY),
    "truncated normal": lambda shape: keras.random.truncated_normal(shape, seed=KEY),
    "integers": lambda shape: keras.random.randint(shape, 0, 1000, seed=KEY),
    "dropout": lambda shape: keras.random.dropout(jnp.ones(shape), 0.3, seed=KEY),
}


def rows_of(draw, start, count, inner):
    rows = draws.MicrobatchRows(jnp.uint32(start), count, [draws.FIRST])
    with draws.drawing(rows):
        return jax.jit(lambda: draw((count, *inner)))()


@pytest.mark.parametrize("inner", [(), (7,), (3, 5)])
@pytest.mark.parametrize("name", DRAWN)
def test_rows_of_a_draw(name, inner):
    draw = DRAWN[name]
    whole = np.asarray(draw((ROWS, *inner)), "float32")
    for start, count in ((0, 5), (5, 5), (33, 31)):
        found = np.asarray(rows_of(draw, start, count, inner), "float32")
        # The bits are the same; XLA rounds the error function at the end of a vector by itself.
        rtol = 5e-7 if "normal" in name else 0
        np.testing.assert_allclose(found, whole[start : start + count], rtol=rtol)
    # Not the first rows again.
    assert not np.array_equal(found, whole[: len(found)])


def test_more_numbers_than_32_bits_count():
    """The number of an element is the start times the elements of a row: up to 64 bits."""
    for start, per_row in ((2**31 + 5, 3), (7, 2**30 + 11), (2**20 + 1, 2**20 + 3)):
        upper, lower = map(int, draws._product(jnp.uint32(start), per_row))
        assert upper * 2**32 + lower == start * per_row


def test_where_the_samples_are_in_a_shape():
    shapes, others = [(8, 3), (3, 8), (8,), (16, 2)], [(9, 3), (3, 9), (8,), (18, 2)]
    expected = [draws.FIRST, draws.ELSEWHERE, None, draws.FIRST]
    assert draws.places_of(shapes, others, 8) == expected
    assert draws.places_of(shapes, others[1:], 8) is None


class Noise(keras.layers.Layer):
    """Draws for samples, once for all of them, and as often as there are micro-batches."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(7)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        own = keras.random.normal(keras.ops.shape(x), seed=self.seed_generator)
        shared = keras.random.uniform((8, x.shape[1]), seed=self.seed_generator)
        return x + 0.3 * own + keras.ops.mean(shared, 0) + 0.01 * self.calls


def noisy():
    layers = keras.layers
    noise = [
        layers.Dropout(0.4),
        layers.GaussianNoise(0.2),
        Noise(),
        layers.GaussianDropout(0.2),
    ]
    return keras.Sequential([keras.Input((5,)), *noise, layers.Dense(3)])


@pytest.mark.parametrize("setting", [{}, {"jit_compile": False}], ids=["jit", "eager"])
@pytest.mark.parametrize("mode", ["split", "window"])
def test_random_layers_equal_the_full_batch(mode, setting):
    """Micro-batches of eight, as many as the shared draw has rows, and a counter."""
    case = Case(noisy).compiled(**setting)
    check_same(case.accumulate(mode), case.train(), TOLERANCE["float32"])


def test_what_is_not_drawn_by_rows_differs_and_is_told():
    """The negative control, and the limit: gamma draws take a varying count of numbers."""

    class Gamma(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed_generator = keras.random.SeedGenerator(7)

        def call(self, x):
            return x * keras.random.gamma(keras.ops.shape(x), 2.0, seed=self.seed_generator)

    case = Case(lambda: keras.Sequential([keras.Input((5,)), Gamma(), keras.layers.Dense(3)]))
    with pytest.warns(bigbatch.NotEqualWarning, match=r"\(Gamma\): it draws random numbers"):
        accumulated = case.accumulate("split")
    assert largest_difference(accumulated.model, case.train().model) > 1e-4


@pytest.mark.filterwarnings("ignore::bigbatch.NotEqualWarning")
@pytest.mark.parametrize("is_apart", [False, True])
def test_draws_of_python_are_told_but_not_those_of_other_threads(is_apart, capsys):
    """Which load data while a micro-batch is traced."""

    class Draws(keras.layers.Layer):
        def call(self, x):
            numbers = []
            draw = lambda: numbers.append(np.random.rand())  # noqa: E731
            if is_apart:
                thread = threading.Thread(target=draw)
                thread.start()
                thread.join()
            else:
                draw()
            return x if is_apart else x * numbers[0]

    case = Case(lambda: keras.Sequential([keras.Input((5,)), Draws(), keras.layers.Dense(3)]))
    case.accumulate("split", verbose=2)
    assert ("Python's random or numpy.random" in capsys.readouterr().out) is not is_apart
