"""Batches, logs and layers as real programs have them: trained as in plain Keras."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.errors import ArgumentError
from comparison import Fitted, check_same, largest_difference
from fit_cases import mostly_matrix
from programs import PROGRAMS, SAMPLES, Program, X, Y, compiled, layers, network, rng

from problems import TOLERANCE
from stack import IS_KERAS_3, keras

pytestmark = [
    pytest.mark.skipif(not IS_KERAS_3, reason="programs for Keras 3"),
    # Keras says so of every model with a layer that `call` does not use.
    pytest.mark.filterwarnings("ignore:.*unbuilt state"),
]

SETTINGS = {
    "split": (21, {"microbatch_size": 8}),  # 8 + 8 + 5 samples, then 8
    "window": (7, {"accumulation_steps": 3}),  # 7 + 7 + 7 samples, then 7 + 1
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", mostly_matrix(PROGRAMS, [*PROGRAMS][:-1]))  # speech is slow
@pytest.mark.parametrize(
    "run_eagerly",
    [False, pytest.param(True, marks=pytest.mark.matrix)],
    ids=["graph", "eager"],
)
def test_programs_equal_the_full_batch(name, mode, run_eagerly):
    program, (size, setting) = PROGRAMS[name], SETTINGS[mode]
    if program.draws and run_eagerly:
        pytest.skip("eagerly, micro-batches of a custom train_step draw their own numbers")
    found = program.train(size, run_eagerly, **setting)
    check_same(found, program.train(21, run_eagerly), program.tolerance)


@pytest.mark.usefixtures("float64")
def test_the_comparison_sees_logs_of_single_micro_batches():
    """A negative control: one batch of the data set per update is not the full batch."""
    program = PROGRAMS["autoencoder"]
    with pytest.raises(AssertionError, match="logs: loss"):
        check_same(program.train(7), program.train(21), TOLERANCE["float32"])


# Tensors of different first dimensions: graphs of atoms, bonds and molecules.

MOLECULES = 26
ATOMS = rng.integers(2, 5, MOLECULES)
GRAPHS = [
    (rng.normal(size=(n, 3)), rng.integers(0, n, (n + 1, 2)), rng.normal(size=(n + 1, 2)))
    for n in ATOMS
]
ENERGIES = rng.normal(size=(MOLECULES, 1))


def molecules(size: int) -> Iterator[Any]:
    """Yield batches of molecules as one graph each: atoms, pairs of atoms, bonds."""
    for start in range(0, MOLECULES, size):
        part = GRAPHS[start : start + size]
        counts = [len(atoms) for atoms, _, _ in part]
        first = np.cumsum([0, *counts[:-1]])
        pairs = np.concatenate([pair + at for (_, pair, _), at in zip(part, first)])
        of_atoms = np.repeat(np.arange(len(part)), counts)
        atoms, bonds = (np.concatenate([one[i] for one in part]) for i in (0, 2))
        yield (atoms, bonds, pairs, of_atoms), ENERGIES[start : start + size]


def molecule_data(size: int) -> Any:
    types = (((None, 3), "float64"), ((None, 2), "float64"), ((None, 2), "int64"))
    graph = (*(tf.TensorSpec(*one) for one in types), tf.TensorSpec((None,), "int64"))
    signature = (graph, tf.TensorSpec((None, 1), "float64"))
    return tf.data.Dataset.from_generator(
        lambda: molecules(size), output_signature=signature
    ).apply(tf.data.experimental.assert_cardinality(-(-MOLECULES // size)))


class MessagePassing(keras.Model):
    """One step of messages along bonds, then the mean over the atoms of a molecule."""

    def __init__(self):
        super().__init__()
        self.embed, self.message = layers.Dense(4, "tanh"), layers.Dense(4, "tanh")
        self.update, self.out = layers.Dense(4, "tanh"), layers.Dense(1)

    def call(self, inputs):
        atoms, bonds, pairs, of_atoms = inputs
        state = self.embed(atoms)
        messages = self.message(tf.concat([tf.gather(state, pairs[:, 1]), bonds], -1))
        received = tf.math.unsorted_segment_sum(messages, pairs[:, 0], tf.shape(state)[0])
        state = self.update(tf.concat([state, received], -1))
        return self.out(tf.math.segment_mean(state, of_atoms))


class OwnMessagePassing(MessagePassing):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(self(x, training=True) - y))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def train_on_molecules(
    kind: type, size: int, run_eagerly: bool = False, **setting: Any
) -> Fitted:
    keras.utils.set_random_seed(3)
    metrics = ["mse"] if kind is MessagePassing else None
    model = compiled(kind(), "mae", metrics=metrics, run_eagerly=run_eagerly)
    if setting:
        bigbatch.accumulate(model, **setting)
    history = model.fit(molecule_data(size), epochs=2, shuffle=False, verbose=0).history
    return Fitted(model, history)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("kind", [MessagePassing, OwnMessagePassing])
def test_windows_of_graphs(kind, run_eagerly):
    """Windows of 7 + 7 + 7 molecules, then of 5; with other numbers of atoms and bonds."""
    found = train_on_molecules(kind, 7, run_eagerly, accumulation_steps=3)
    check_same(found, train_on_molecules(kind, 21, run_eagerly), TOLERANCE["float64"])


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("size", [4, "auto"])
def test_a_graph_cannot_be_cut(size, run_eagerly):
    """The message names the tensor, in one line; following it trains."""
    counts = [len(one) for one in next(molecules(21))[0]]
    with pytest.raises(ArgumentError) as error:
        train_on_molecules(MessagePassing, 21, run_eagerly, microbatch_size=size)
    first, *_, fix = str(error.value).splitlines()
    assert re.fullmatch(
        r"Received: batch\[0\]\[\d\] with (\d+) samples in a batch of \d+", first
    )
    assert {*map(int, re.findall(r" (\d+)", first))} <= {*counts, 21}
    assert "accumulation_steps" in fix
    train_on_molecules(MessagePassing, 7, run_eagerly, accumulation_steps=3)


class SemiSupervised(keras.Model):
    """Many images without labels and few with: a loss of each, one after the other."""

    def __init__(self):
        super().__init__()
        self.encoder = network(3)
        self.probe = layers.Dense(2)
        self.contrastive = keras.metrics.Mean(name="c_loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [self.contrastive, self.accuracy]

    def train_step(self, data):
        unlabeled, (labeled, labels) = data
        noisy = unlabeled * 1.1
        with tf.GradientTape() as tape:
            apart = tf.square(self.encoder(unlabeled) - self.encoder(noisy))
            contrastive = tf.reduce_mean(tf.reduce_sum(apart, -1))
            logits = self.probe(self.encoder(labeled))
            loss = contrastive + tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            )
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        self.contrastive.update_state(contrastive)
        self.accuracy.update_state(labels, logits)
        return {m.name: m.result() for m in self.metrics}


@pytest.mark.usefixtures("float64")
def test_windows_of_images_with_and_without_labels():
    unlabeled, labeled = rng.normal(size=(60, 5)), rng.normal(size=(9, 5))
    labels = rng.integers(0, 2, 9)

    def train(parts, **setting):
        keras.utils.set_random_seed(3)
        model = compiled(SemiSupervised())
        if setting:
            bigbatch.accumulate(model, **setting)
        of = tf.data.Dataset.from_tensor_slices
        without = of(unlabeled).batch(60 // parts)
        data = tf.data.Dataset.zip((without, of((labeled, labels)).batch(9 // parts)))
        return Fitted(model, model.fit(data, epochs=2, shuffle=False, verbose=0).history)

    check_same(train(3, accumulation_steps=3), train(1), TOLERANCE["float64"])


class MoreUnlabeled(SemiSupervised):
    """Consistency training: what comes last are the images without labels."""

    def train_step(self, data):
        labeled, unlabeled = data
        return super().train_step((unlabeled, labeled))


@pytest.mark.usefixtures("float64")
def test_windows_with_more_images_without_labels():
    unlabeled, labeled = rng.normal(size=(24, 5)), rng.normal(size=(12, 5))
    labels = rng.integers(0, 2, 12)

    def train(parts, **setting):
        keras.utils.set_random_seed(3)
        model = compiled(MoreUnlabeled())
        if setting:
            bigbatch.accumulate(model, **setting)
        of = tf.data.Dataset.from_tensor_slices
        without = of(unlabeled).batch(24 // parts)
        data = tf.data.Dataset.zip((of((labeled, labels)).batch(12 // parts), without))
        return Fitted(model, model.fit(data, epochs=2, shuffle=False, verbose=0).history)

    check_same(train(3, accumulation_steps=3), train(1), TOLERANCE["float64"])


# Sparse and ragged tensors, words, inputs that are left out.


def bag_of_words() -> Any:
    words = keras.Input((6,), sparse=True)
    return compiled(keras.Model(words, layers.Dense(1)(layers.Dense(4, "tanh")(words))), "mse")


class Ragged(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = layers.Embedding(9, 4), layers.Dense(1)

    def call(self, tokens):
        embedded = tf.ragged.map_flat_values(self.embedding, tokens)
        return self.out(tf.reduce_mean(embedded, 1))


def words_and_numbers() -> Any:
    word, numbers = (
        keras.Input((1,), dtype="string", name="word"),
        keras.Input((6,), name="numbers"),
    )
    embedded = layers.Flatten()(layers.Embedding(8, 3)(layers.Hashing(8)(word)))
    return compiled(
        keras.Model(
            {"word": word, "numbers": numbers},
            layers.Dense(1)(layers.concatenate([embedded, numbers])),
        ),
        "mse",
    )


class Both(layers.Layer):
    def call(self, numbers, others=None):
        return numbers if others is None else numbers + others


def optional_input() -> Any:
    numbers = keras.Input((6,), name="numbers")
    others = keras.Input((6,), name="others", optional=True)
    inputs = {"numbers": numbers, "others": others}
    return compiled(keras.Model(inputs, layers.Dense(1)(Both()(numbers, others))), "mse")


WORDS = rng.normal(size=(SAMPLES, 6)) * (rng.random((SAMPLES, 6)) < 0.4)
TOKENS = [list(rng.integers(0, 9, rng.integers(1, 6))) for _ in range(SAMPLES)]
OTHER_TENSORS = {
    "sparse": (bag_of_words, lambda: tf.sparse.from_dense(WORDS)),
    "ragged": (lambda: compiled(Ragged(), "mse"), lambda: tf.ragged.constant(TOKENS)),
    "words": (
        words_and_numbers,
        lambda: {"word": [[f"word {len(row)}"] for row in TOKENS], "numbers": WORDS},
    ),
    "left out": (optional_input, lambda: {"numbers": WORDS, "others": None}),
}


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", OTHER_TENSORS)
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
def test_other_kinds_of_inputs(name, mode, run_eagerly):
    make, tensor = OTHER_TENSORS[name]
    size, setting = SETTINGS[mode]
    program = Program(make, (tensor(), Y))
    found = program.train(size, run_eagerly, **setting)
    check_same(found, program.train(21, run_eagerly), TOLERANCE["float64"])


@pytest.mark.usefixtures("float64")
def test_sparse_matrices_column_by_column(mode):
    """SciPy's are, in most of its formats."""

    def train(size, **setting):
        def batches():
            for start in range(0, 42, size):
                part = WORDS[start : start + size]
                columns, rows = np.nonzero(part.T)
                indices = np.stack([rows, columns], 1)
                yield (
                    tf.SparseTensor(indices, part[rows, columns], part.shape),
                    Y[start:][:size],
                )

        keras.utils.set_random_seed(3)
        model = bag_of_words()
        if setting:
            bigbatch.accumulate(model, **setting)
        return Fitted(
            model,
            model.fit(batches(), steps_per_epoch=42 // size, shuffle=False, verbose=0).history,
        )

    size, setting = SETTINGS[mode]
    check_same(train(size, **setting), train(21), TOLERANCE["float64"])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("size", [8, "auto"])
def test_arrays_in_train_on_batch(size):
    def train(**setting):
        keras.utils.set_random_seed(3)
        model = compiled(network(), "mse", metrics=["mae"])
        if setting:
            bigbatch.accumulate(model, **setting)
        logs = [model.train_on_batch(X[:20], Y[:20], return_dict=True) for _ in range(2)]
        return Fitted(model, logs[-1])

    check_same(train(microbatch_size=size), train(), TOLERANCE["float64"])


@pytest.fixture
def eager_functions():
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


@pytest.mark.usefixtures("float64", "eager_functions")
# Or `tf.data`, whose functions stay graphs, warns.
@pytest.mark.filterwarnings("ignore:Even though")
def test_functions_that_run_eagerly(mode):
    seen = []

    class Looks(keras.Sequential):
        def train_step(self, data):
            seen.append(data[0].numpy().shape)  # what it is switched on for
            return super().train_step(data)

    program = Program(lambda: compiled(Looks([keras.Input((5,)), layers.Dense(1)]), "mse"))
    size, setting = SETTINGS[mode]
    found = program.train(size, **setting)
    assert len(seen) > 4
    check_same(found, program.train(21), TOLERANCE["float64"])
    tf.config.run_functions_eagerly(False)  # for a model that has its train function already
    found.model.train_step = type(found.model).__bases__[0].train_step.__get__(found.model)
    found.model.fit(X, Y, batch_size=size, verbose=0)


# A number of samples that is written as a constant.


def ones_as_labels(model: Any, x: Any) -> Any:
    return tf.reduce_mean(tf.square(model(x) - tf.ones((21, 1))))


def reshaped(model: Any, x: Any) -> Any:
    return tf.reduce_mean(tf.square(model(tf.reshape(x, [21, -1]))))


def of_the_data(model: Any, x: Any) -> Any:
    return tf.reduce_mean(tf.square(model(x) - tf.ones((tf.shape(x)[0], 1))))


class ConstantSize(keras.Sequential):
    loss_of: Any = None

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = type(self).loss_of(self, data[0])
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def constant_size(loss: Any) -> Any:
    kind = type("Constant", (ConstantSize,), {"loss_of": staticmethod(loss)})
    return compiled(kind([keras.Input((5,)), layers.Dense(1)]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize(
    ("loss", "operation"), [(ones_as_labels, "sub"), (reshaped, "reshape")]
)
def test_a_constant_batch_size(loss, operation, run_eagerly, drop_remainder, mode):
    """The message has the operation, the sizes and two ways out; nothing has changed."""
    model = constant_size(loss)
    model.run_eagerly = run_eagerly
    size, setting = SETTINGS[mode]
    bigbatch.accumulate(model, **setting)
    data = tf.data.Dataset.from_tensor_slices((X[:21], Y[:21]))
    before = [weight.copy() for weight in model.get_weights()]
    with pytest.raises(ArgumentError) as error:
        model.fit(data.batch(size, drop_remainder=drop_remainder), shuffle=False, verbose=0)
    received, _, fix = str(error.value).splitlines()
    assert operation in received.lower().split(" fails on ")[0]
    assert "21" in received
    assert largest_difference(model.get_weights(), before) == 0
    assert int(model.optimizer.iterations) == 0
    for advice in ("tf.shape(x)[0]", "microbatch_size=21"):
        assert advice in fix
    bigbatch.accumulate(model, microbatch_size=21)
    model.fit(data.batch(21), shuffle=False, verbose=0)  # all of it is one batch
    assert int(model.optimizer.iterations) == 1


def test_a_batch_size_of_the_data():
    """The other way out of the message."""
    model = bigbatch.accumulate(constant_size(of_the_data), microbatch_size=8)
    model.fit(X, Y, batch_size=21, verbose=0)
    assert int(model.optimizer.iterations) == 2
