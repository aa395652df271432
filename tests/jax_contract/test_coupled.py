"""On JAX, too, a loss that compares samples is that of the whole batch, by two passes."""

from __future__ import annotations

import numpy as np
import pytest
from keras import layers, ops

import bigbatch
from bigbatch.errors import ArgumentError
from comparison import check_same
from fit_cases import DENSE_X, MODES, Case

from problems import TOLERANCE, largest_difference
from stack import keras

X = DENSE_X.astype("float32")
Y = np.zeros((len(X), 1), "float32")


def contrastive(y_true, y_pred):
    """The other half of a sample's output is to be more like it than that of any other."""
    del y_true
    one, two = ops.split(y_pred, 2, axis=-1)
    logits = ops.matmul(one, ops.transpose(two))
    labels = ops.arange(ops.shape(logits)[0])
    return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, True))


def correlated(y_true, y_pred):
    x, y = ops.sum(y_pred, -1), y_true[:, 0]
    x, y = x - ops.mean(x), y - ops.mean(y)
    return 1 - ops.sum(x * y) / ops.sqrt(ops.sum(x * x) * ops.sum(y * y))


def plain():
    return keras.Sequential([keras.Input((5,)), layers.Dense(8, "tanh"), layers.Dense(6)])


def with_everything():
    """Dropout, a regulariser, an activity regulariser: with two passes all are exact."""
    hidden = layers.Dense(8, "tanh", kernel_regularizer="l2", activity_regularizer="l2")
    return keras.Sequential(
        [keras.Input((5,)), hidden, layers.Dropout(0.3), layers.Dense(6)], name="m"
    )


class Temperature(keras.Model):
    """Has a weight that stands in the loss and not in `call`."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(6)
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return self.out(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return contrastive(y, self.scale * y_pred) + 0.1 * ops.mean(ops.square(x))


SGD = {"optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9)}
CASES = {
    "contrastive": Case(plain, X, Y, loss=lambda: contrastive, **SGD),
    "with everything": Case(with_everything, X, Y, loss=lambda: contrastive, **SGD),
    "a weight in the loss": Case(Temperature, X, Y, loss=None, **SGD),
    "correlation": Case(plain, X, X[:, :1], loss=lambda: correlated, **SGD),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_two_passes_equal_the_full_batch(name, mode):
    case = CASES[name]
    found = case.accumulate(mode, {"coupled": True})
    check_same(found, case.train(), TOLERANCE["float32"])


def test_it_is_found_by_trying(capsys):
    case = CASES["correlation"]
    found = case.accumulate("split", verbose=2)
    assert "is computed on the whole batch, by two passes" in capsys.readouterr().out
    check_same(found, case.train(), TOLERANCE["float32"])


def test_without_them_it_is_another_loss_and_a_warning_says_so():
    """The negative control."""
    case = CASES["contrastive"]
    with pytest.warns(bigbatch.NotEqualWarning, match="neither a mean nor a sum"):
        found = case.accumulate("split", {"coupled": False})
    assert largest_difference(found.model, case.train().model) > 1e-3


@pytest.mark.filterwarnings("ignore::bigbatch.NotEqualWarning")
def test_the_check_leaves_no_programs_behind():
    """In which batch normalisation stands still: of 5, 3 and 2 samples."""

    def make():
        normed = [layers.Dense(4), layers.BatchNormalization(), layers.Dense(6)]
        return keras.Sequential([keras.Input((5,)), *normed])

    case = Case(make, X, X[:, :1], loss=lambda: correlated, **SGD)
    unchecked, checked = (
        case.accumulate("split", {"microbatch_size": 3, "check": one})
        for one in ("off", "warn")
    )
    check_same(checked, unchecked, 0)


def test_a_layer_that_mixes_samples_is_refused():
    class Mixes(layers.Layer):
        def call(self, x):
            return x - ops.mean(x, 0)

    def make():
        return keras.Sequential([keras.Input((5,)), Mixes(), layers.Dense(6)])

    with pytest.raises(ArgumentError, match="'mixes"):
        Case(make, X, Y, loss=lambda: contrastive).accumulate("split", {"coupled": True})
