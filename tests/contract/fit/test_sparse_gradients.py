"""`sparse_gradients`: rows of the full batch, or one dense sum, which never differs silently.

For most optimizers of Keras repeated rows and their sum are different updates.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.core.sparse_gradients import SparseGradients, Table
from bigbatch.errors import ArgumentError, DifferenceError
from comparison import check_same, largest_difference
from fit_cases import BATCH, TOKEN_Y, TOKENS, Case

from problems import TOLERANCE, built_in_optimizers
from stack import BACKEND, IS_KERAS_3, keras

pytestmark = pytest.mark.skipif(
    not IS_KERAS_3 or BACKEND != "tensorflow", reason="gradients are sparse on TensorFlow"
)
layers = keras.layers if IS_KERAS_3 else None
SETTINGS = [{"microbatch_size": 8}, {"accumulation_steps": 3}]


class DenseTable(layers.Layer if IS_KERAS_3 else object):
    """Looks up rows by a product of matrices: the gradient is dense."""

    def build(self, shape):
        self.table = self.add_weight(shape=(6, 4), initializer="uniform", name="embeddings")

    def call(self, tokens):
        return keras.ops.one_hot(tokens, 6, dtype=self.table.dtype) @ self.table


class Positions(layers.Layer if IS_KERAS_3 else object):
    """Looks up each row once."""

    def build(self, shape):
        self.table = layers.Embedding(9, 4, name="positions")
        self.table.build(shape)

    def call(self, x):
        return x + self.table(keras.ops.arange(keras.ops.shape(x)[1]))


def model_of(table):
    def make():
        tokens = keras.Input((7,), dtype="int32")
        x = Positions()(table()(tokens))
        return keras.Model(tokens, layers.Dense(2)(layers.Dense(6, "tanh")(x)))

    return make


def table_of_rows():
    return layers.Embedding(6, 4, name="tokens")


def case_of(optimizer, table=table_of_rows, **options):
    return Case(model_of(table), TOKENS, TOKEN_Y, optimizer=optimizer, compile=options)


def train(case, setting, **arguments):
    batch = 7 if "accumulation_steps" in setting else BATCH
    prepare = lambda model: bigbatch.accumulate(model, **setting, **arguments)  # noqa: E731
    return case.train(prepare, batch_size=batch)


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01, use_ema=True)


def adam():
    return keras.optimizers.Adam(0.01)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("choice", ["rows", "dense"])
def test_the_same_update_for_optimizers_that_add_up_rows(setting, choice, float64):
    case = case_of(sgd)
    found = train(case, setting, sparse_gradients=choice, check="raise")
    check_same(found, case.train(), TOLERANCE["float64"])


OPTIONS = [{}, {"run_eagerly": True}, {"jit_compile": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dense_is_the_update_of_a_dense_gradient_and_warns(options, float64):
    case = case_of(adam, **options)
    model = case.build()
    bigbatch.accumulate(model, microbatch_size=8, sparse_gradients="dense")
    with pytest.warns(bigbatch.NotEqualWarning, match=r"embeddings.*Adam treats them diff"):
        model.fit(case.x, case.y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    dense = case_of(adam, DenseTable).train().model.get_weights()
    assert largest_difference(model.get_weights(), dense) < 1e-6
    rows = case.train().model.get_weights()
    assert largest_difference(model.get_weights(), rows) > 1e-3


@pytest.mark.parametrize("coupled", [False, True])
def test_dense_can_be_refused(coupled):
    with pytest.raises(DifferenceError, match=r'leave sparse_gradients="dense" out'):
        train(
            case_of(adam), SETTINGS[0], sparse_gradients="dense", check="raise", coupled=coupled
        )


def test_rows_that_do_not_repeat_are_equal(float64):
    """A table of positions is looked up once in each row: nothing is said, nothing differs."""
    case = case_of(adam, DenseTable)
    found = train(case, SETTINGS[0], sparse_gradients="dense", check="raise")
    check_same(found, case.train(), TOLERANCE["float64"])


def test_the_smaller_one_is_taken_where_both_are_the_same_update(capsys):
    def tables(optimizer):
        setting = {"microbatch_size": 8}
        model = case_of(optimizer).build(lambda m: bigbatch.accumulate(m, **setting))
        model.fit(TOKENS, TOKEN_Y, batch_size=BATCH, verbose=2)
        sparse = vars(model)["_bigbatch_hooks"].trainer.sparse
        return {t.name.split("/")[-2]: sparse.is_summed(t) for t in sparse.tables.values()}

    assert tables(sgd) == {"tokens": True, "positions": False}
    assert "sparse_gradients" not in capsys.readouterr().out
    assert tables(adam) == {"tokens": False, "positions": False}
    said = " ".join(capsys.readouterr().out.split())
    assert "the rows of tokens/embeddings take 2.3 KiB until the update" in said
    assert '"dense" takes less memory, and gives another update with Adam' in said


class TwoOptimizers(keras.Model if IS_KERAS_3 else object):
    """Updates one table by Adam, then by SGD."""

    def __init__(self):
        super().__init__()
        self.table, self.top = table_of_rows(), layers.Dense(2)
        self.second = keras.optimizers.SGD(0.1)

    def call(self, tokens):
        return self.top(self.table(tokens))

    def train_step(self, data):
        x, y = data
        for optimizer in (self.optimizer, self.second):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x) - y))
            variables = self.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_one_table_of_two_optimizers(run_eagerly):
    case = Case(TwoOptimizers, TOKENS, TOKEN_Y, loss=None, optimizer=adam)
    case = case.compiled(run_eagerly=run_eagerly)
    check_same(train(case, SETTINGS[0]), case.train(), TOLERANCE["float32"])
    with pytest.raises(DifferenceError, match="Adam treats them differently"):
        train(case, SETTINGS[0], sparse_gradients="dense", check="raise")


def test_dense_is_no_hazard_without_sparse_gradients():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("adam", "mse", run_eagerly=True)
    bigbatch.accumulate(model, microbatch_size=3, sparse_gradients="dense", check="raise")
    history = model.fit(np.ones((7, 3)), np.ones((7, 1)), batch_size=7, verbose=0).history
    assert np.isfinite(history["loss"]).all()


def test_what_is_larger():
    table = Table("t", "SGD", 10, 16, rows_per_sample=2, has_repeats=True, adds_up=True)
    assert not SparseGradients().is_summed(table)  # nobody knows how large a batch is
    assert not SparseGradients(samples=5).is_summed(table)
    assert SparseGradients(samples=6).is_summed(table)
    assert SparseGradients("dense").is_summed(table)


def updated(optimizer, *, dense):
    """Return what two updates with repeated rows give a table and a vector."""
    rng = np.random.default_rng(2)
    table = keras.Variable(rng.normal(size=(6, 3)), dtype="float64", name="table")
    vector = keras.Variable(np.ones(2), dtype="float64", name="vector")
    optimizer.build([table, vector])
    for rows in ([1, 1, 2, 4, 1], [3, 3, 0, 1, 2]):
        slices = tf.IndexedSlices(tf.constant(rng.normal(size=(5, 3))), rows, [6, 3])
        gradient = tf.convert_to_tensor(slices) if dense else slices
        optimizer.apply([gradient, tf.constant([0.1, 0.2], tf.float64)], [table, vector])
    return [table.numpy(), vector.numpy()]


def is_same(make):
    return largest_difference(updated(make(), dense=False), updated(make(), dense=True)) < 1e-12


ONE_UPDATE = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "SGD, everything": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, nesterov=True, weight_decay=0.1, use_ema=True, ema_momentum=0.5
    ),
    "SGD, scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    "Lion": lambda: keras.optimizers.Lion(0.1, weight_decay=0.1, use_ema=True),
}
CLIPPING = [{"clipnorm": 0.5}, {"global_clipnorm": 0.5}, {"clipvalue": 0.3}]


@pytest.mark.parametrize("name", ONE_UPDATE)
def test_optimizers_that_add_up_rows(name, float64):
    from bigbatch.backends.tensorflow.keras3_optimizers import adds_up_rows

    assert adds_up_rows(ONE_UPDATE[name]())
    assert is_same(ONE_UPDATE[name])


def test_optimizers_that_do_not(float64):
    """All others of Keras, and those that clip; Muon does so for some shapes only."""
    from bigbatch.backends.tensorflow.keras3_optimizers import adds_up_rows

    others = {n: make for n, make in built_in_optimizers().items() if n not in ("SGD", "Lion")}
    clipping = [lambda clip=clip: keras.optimizers.SGD(0.1, **clip) for clip in CLIPPING]
    for make in (*others.values(), *clipping):
        assert not adds_up_rows(make())
    apart = ("Muon", "MultiOptimizer")
    same = [name for name, make in others.items() if name not in apart and is_same(make)]
    assert same == []
    assert not any(map(is_same, clipping))

    class Own(keras.optimizers.SGD):
        pass

    assert not adds_up_rows(Own())


def test_the_argument_is_checked():
    with pytest.raises(ArgumentError, match="sparse_gradients='sparse'"):
        train(case_of(adam), SETTINGS[0], sparse_gradients="sparse")


@pytest.mark.parametrize("coupled", [False, True])
def test_value_and_gradients(coupled):
    table, ids = tf.Variable(tf.random.normal([5, 2])), tf.constant([1, 1, 2, 4, 1])

    def run(**options):
        forward = lambda ids: tf.gather(table, ids)  # noqa: E731
        if coupled:
            loss, options["forward"] = lambda rows, _: tf.reduce_mean(rows**2), forward
        else:
            loss = lambda ids: tf.reduce_mean(forward(ids) ** 2)  # noqa: E731
        options.update(coupled=coupled, microbatch_size=2)
        return bigbatch.value_and_gradients(loss, [table], (ids,), **options)[1][0]

    rows, dense = run(), run(sparse_gradients="dense")
    assert isinstance(rows, tf.IndexedSlices)
    assert isinstance(dense, tf.Tensor)
    np.testing.assert_allclose(dense, tf.convert_to_tensor(rows), rtol=1e-6)
    with pytest.raises(ArgumentError, match="'rows', 'dense'"):
        run(sparse_gradients=True)
