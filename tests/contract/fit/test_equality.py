"""`model.fit` accumulated equals `model.fit` with the full batch, whatever is trained."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from comparison import check_equals_full_batch, check_same, paired
from fit_cases import (
    BATCH,
    CASES,
    DENSE_X,
    DENSE_Y,
    MODES,
    SAMPLES,
    Case,
    as_it_is,
    dense,
    mostly_matrix,
    rng,
)

from problems import TOLERANCE, largest_difference
from stack import (
    BACKEND,
    IS_KERAS_2_10,
    IS_KERAS_3,
    PyDataset,
    keras,
    new_optimizers,
    set_policy,
)


@functools.cache
def full_batch(name):
    """Train a case with the full batch; both modes are compared with it."""
    return CASES[name].train()


@functools.cache
def full_batch_in_float64(name):
    return CASES[name].train()


IN_FLOAT64 = 1e-7 if BACKEND == "jax" else TOLERANCE["float64"]
"""On JAX `keras.ops.tanh` of float64 returns float32, in plain Keras, too."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_in_float64(name, mode, float64):
    ways = {"windows": ()} if mode == "split" else {"sizes": ()}
    expected = full_batch_in_float64(name)
    check_equals_full_batch(CASES[name], IN_FLOAT64, expected=expected, **ways)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["dense", "sum", "masked", "own train_step"])
def test_in_float32(name, mode):
    check_same(CASES[name].accumulate(mode), full_batch(name), TOLERANCE["float32"])


@pytest.mark.parametrize("name", ["regularised", "own train_step"])
def test_eager_on_two_replicas(name, mode, mirrored):
    """Without the last sample: Keras fails if a replica that runs eagerly has none."""
    case = replace(CASES[name], x=DENSE_X[:-1], y=DENSE_Y[:-1])
    expected = case.train()
    with mirrored.scope():
        result = case.compiled(run_eagerly=True).accumulate(mode)
    check_same(result, expected, TOLERANCE["float32"])


ON_REPLICAS = [  # each for another way to share a loss, or its logs, among replicas
    "dense",
    "regularised",
    "add_loss",
    "sum",
    "mean with sample weights",
    "masked",
    "metrics of a layer",
    "two outputs",
    "reduced by the loss function",
    "no reduction",
    "own train_step",
    "own tracker",
    "own state in the loss",
    "own compute_loss",
]
# In Keras 2 a layer of a functional model cannot update a metric in a strategy's scope.
ON_REPLICAS = [
    one for one in ON_REPLICAS if one in CASES and (IS_KERAS_3 or "layer" not in one)
]
IN_CI = {"regularised", "metrics of a layer", "two outputs", "own train_step"}


@pytest.mark.parametrize("name", mostly_matrix(ON_REPLICAS, IN_CI & set(ON_REPLICAS)))
def test_on_two_replicas(name, mode, mirrored):
    with mirrored.scope():  # batches of 21 samples: 11 and 10; of 7: 4 and 3; of 1: 1 and none
        result = CASES[name].accumulate(mode)
    check_same(result, full_batch(name), TOLERANCE["float32"])


OPTIONS = {
    "steps_per_execution": {"steps_per_execution": 2},
    "steps_per_execution past a window": {"steps_per_execution": 5},
    "jit_compile": {"jit_compile": True},
    "run_eagerly": {"run_eagerly": True},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    "name", mostly_matrix(["regularised", "two outputs", "own train_step"], ["regularised"])
)
def test_with_compile_options(name, option, mode):
    case = CASES[name].compiled(**OPTIONS[option])
    expected = case.train() if option == "run_eagerly" else full_batch(name)
    check_same(case.accumulate(mode), expected, TOLERANCE["float32"])


def feeds(size):
    def dataset():
        return tf.data.Dataset.from_tensor_slices((DENSE_X, DENSE_Y)).batch(size)

    slices = [slice(start, start + size) for start in range(0, SAMPLES, size)]

    class Sequence(PyDataset):
        def __len__(self):
            return len(slices)

        def __getitem__(self, index):
            return DENSE_X[slices[index]], DENSE_Y[slices[index]]

    def generator():
        while True:
            for rows in slices:
                yield DENSE_X[rows], DENSE_Y[rows]

    steps = {"steps_per_epoch": len(slices)}
    return {
        "tf.data": (dataset, {}),
        "endless tf.data": (lambda: dataset().repeat(), steps),
        "PyDataset": (Sequence, {}),
        "generator": (generator, steps),
    }


@pytest.mark.parametrize("name", feeds(1))
def test_every_way_to_feed_it(name, mode):
    case = CASES["dense"]
    make_data, options = feeds(MODES[mode][1])[name]
    fed = Case(**{**vars(case), "x": make_data(), "y": None, "fit": options})
    check_same(fed.accumulate(mode, batch_size=None), full_batch("dense"), TOLERANCE["float32"])


class Reconstructs(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, x, y_pred, sample_weight)


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 wants targets if there is a loss")
def test_inputs_without_targets(mode):
    case = Case(lambda: Reconstructs([keras.Input((5,)), keras.layers.Dense(5)]), y=None)
    check_same(case.accumulate(mode), case.train(), TOLERANCE["float32"])


def batches_of(*sizes):
    ends = np.cumsum(sizes)
    rows = [slice(end - size, end) for size, end in paired(sizes, ends)]
    return [(DENSE_X[one], DENSE_Y[one]) for one in rows]


def test_train_on_batch():
    case = Case(dense, compile={"metrics": ["mae"]})
    expected = case.train_on_batches(batches_of(30, 20))
    split = case.train_on_batches(
        batches_of(30, 20), lambda model: bigbatch.accumulate(model, microbatch_size=7)
    )
    check_same(split, expected, TOLERANCE["float32"])
    window = case.train_on_batches(
        batches_of(8, 15, 7, 2, 9, 9),
        lambda model: bigbatch.accumulate(model, accumulation_steps=3),
    )
    # What it returns is of the batch it is given, in window mode a part of the window.
    window = replace(window, history=expected.history)
    check_same(window, expected, TOLERANCE["float32"])


def test_validation(mode):
    case = CASES["dense"]
    options = {"validation_data": (DENSE_X[:30], DENSE_Y[:30]), "validation_batch_size": 10}
    result = case.accumulate(mode, **options)
    check_same(result, case.train(**options), TOLERANCE["float32"])


def test_validation_split_and_initial_epoch(mode):
    options = {"validation_split": 0.2, "initial_epoch": 1, "epochs": 3}
    case = CASES["dense"]
    result = case.accumulate(mode, validation_batch_size=10, **options)
    expected = case.train(validation_batch_size=10, **options)
    check_same(result, expected, TOLERANCE["float32"])


@pytest.mark.parametrize(
    "setting",
    [{"microbatch_size": BATCH}, {"microbatch_size": 1000}, {"accumulation_steps": 1}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:bigbatch. nothing is accumulated")
@pytest.mark.parametrize("name", ["regularised", "masked", "own train_step"])
def test_one_micro_batch_is_plain_training_bit_for_bit(name, setting):
    def prepare(model):
        bigbatch.accumulate(model, **setting)

    # Another program of XLA may round what is logged otherwise; weights are the same.
    tolerance = 2e-7 if BACKEND == "jax" else 0
    warns = ["nothing is accumulated"] if "microbatch_size" in setting else []
    check_same(CASES[name].train(prepare), full_batch(name), tolerance, warns=warns)


@pytest.mark.parametrize(
    "policy", mostly_matrix(["mixed_float16", "mixed_bfloat16"], ["mixed_float16"])
)
@pytest.mark.parametrize("devices", ["one device", "two replicas"])
def test_mixed_precision(policy, devices, mode, mirrored):
    def make():
        hidden = keras.layers.Dense(8, "tanh", dtype=policy)
        return keras.Sequential([keras.Input((5,)), hidden, keras.layers.Dense(3)], name="m")

    case = Case(make, fit={"epochs": 3})
    if IS_KERAS_2_10:  # which cannot average weights with loss scaling
        case = replace(case, optimizer=lambda: new_optimizers().SGD(0.1, global_clipnorm=0.1))
    set_policy(policy)
    try:
        expected, _ = case.train()
        if devices == "one device":
            model, _ = case.accumulate(mode)
        else:
            with mirrored.scope():
                model, _ = case.accumulate(mode)
    finally:
        set_policy("float32")
    if policy == "mixed_float16":
        assert type(model.optimizer).__name__.startswith("LossScaleOptimizer")
    assert int(model.optimizer.iterations.numpy()) == int(expected.optimizer.iterations)
    # The gradients of a micro-batch are rounded to 16 bits, those of the batch once: with 11
    # bits of precision, or 8. A mean of means is off by 2e-2.
    tolerance = {"mixed_float16": 2e-5, "mixed_bfloat16": 2e-4}[policy]
    assert largest_difference(model, expected) <= tolerance


def tokens_of_length(length, samples=4):
    return rng.integers(1, 6, (samples, length)), rng.normal(size=(samples, length, 2))


SENTENCES = [tokens_of_length(*shape) for shape in ((3, 4), (7, 4), (5, 2), (2, 4), (6, 3))]


def sentence_model(mask_zero):
    return keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(6, 4, mask_zero=mask_zero),
            keras.layers.Dense(3, "tanh"),
            keras.layers.Dense(2),
        ]
    )


def data_of(sentences):
    signature = (
        tf.TensorSpec([None, None], tf.int32),
        tf.TensorSpec([None, None, 2], tf.float32),
    )
    data = tf.data.Dataset.from_generator(lambda: sentences, output_signature=signature)
    return data.apply(tf.data.experimental.assert_cardinality(len(sentences)))


@pytest.mark.skipif(IS_KERAS_2_10, reason="Keras 2.10 divides by what is masked, too")
@pytest.mark.parametrize("fed_by", ["fit", "train_on_batch"])
def test_micro_batches_of_different_lengths_are_weighted_by_elements(fed_by):
    """The full batch is padded to the longest, with the padding masked."""

    def padded(arrays):
        length = max(array.shape[1] for array in arrays)
        widths = [[(0, 0), (0, length - a.shape[1])] + [(0, 0)] * (a.ndim - 2) for a in arrays]
        return np.concatenate([np.pad(*pair) for pair in paired(arrays, widths)])

    def train(mask_zero, batches, prepare=as_it_is):
        case = Case(lambda: sentence_model(mask_zero), data_of(batches), None)
        if fed_by == "train_on_batch":
            fitted = case.train_on_batches(batches, prepare)
        else:
            fitted = case.train(prepare, batch_size=None, epochs=1)
        bigbatch.restore(fitted.model)  # applies a window that train_on_batch has left open
        return replace(fitted, history={})  # padding does not count, and so logs differ

    windows = [SENTENCES[:3], SENTENCES[3:]]
    whole = [tuple(padded(arrays) for arrays in zip(*window)) for window in windows]
    result = train(
        False, SENTENCES, lambda model: bigbatch.accumulate(model, accumulation_steps=3)
    )
    check_same(result, train(True, whole), TOLERANCE["float32"])
    assert result.training.iterations == 2
