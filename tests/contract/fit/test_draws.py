"""Promise 12: random draws belong to samples, and what does not depend on samples changes once.

Sample r of a batch gets the numbers that it would get in the full batch, whatever the size of
the micro-batches. So a model with dropout is compared like any other.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from apply_cases import gradients_of
from bigbatch.backends.tensorflow.accumulation import Accumulation
from bigbatch.backends.tensorflow.draws import FIRST, MicrobatchRows, drawing
from comparison import check_equals_full_batch, check_same
from fit_cases import BATCH, DENSE_X, TOKEN_Y, TOKENS, Case, rng

from problems import TOLERANCE
from stack import IS_KERAS_3, keras

pytestmark = pytest.mark.skipif(
    not IS_KERAS_3, reason="layers of Keras 2 draw from generators that advance by their size"
)
layers = keras.layers
IMAGES = rng.random((50, 6, 6, 3))


class NoiseOnWeights(layers.Layer):
    """Draws as many numbers as it has weights, which happen to be as many as samples."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(5)

    def build(self, shape):
        self.kernel = self.add_weight(shape=(8, shape[-1]))

    def call(self, x):
        noise = keras.random.normal((8, x.shape[-1]), seed=self.seed_generator)
        return x @ keras.ops.transpose(self.kernel + 0.1 * noise)


class IntegerDraws(layers.Layer):
    """Multiplies every number by an integer that it draws."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(6)

    def call(self, x):
        shape = keras.ops.shape(x)
        drawn = keras.random.randint(shape, 0, 3, seed=self.seed_generator)
        return x * keras.ops.cast(drawn, x.dtype)


class CountsCalls(layers.Layer):
    """Scales by a schedule that counts how often the layer was called in training."""

    def __init__(self):
        super().__init__()
        self.calls = self.add_weight(
            shape=(), initializer="zeros", trainable=False, dtype="float32"
        )

    def call(self, x, training=False):
        if training:
            self.calls.assign(self.calls + 1)
        return x / (1.0 + keras.ops.cast(self.calls, x.dtype))


class Draws(layers.Layer):
    """Adds what a function of its inputs and a seed generator draws."""

    def __init__(self, draw):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(7)
        self.draw = draw

    def call(self, x):
        return x + 0.1 * keras.ops.cast(self.draw(x, self.seed_generator), x.dtype)


def from_the_global_seed(x, _):
    return keras.random.normal(keras.ops.shape(x), dtype=x.dtype)


def in_nested_branches(x, seed):
    def inner():
        y = x * 2.0
        draw = lambda: keras.random.normal(tf.shape(y), dtype=x.dtype, seed=seed)  # noqa: E731
        return tf.cond(tf.random.stateless_uniform([], [1, 2]) < 2, draw, lambda: y)

    return tf.cond(tf.random.stateless_uniform([], [1, 2]) < 2, inner, lambda: x)


def stacked(*between):
    def make():
        keras.utils.set_random_seed(3)
        return keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(8, "tanh"),
                *(one() for one in between),
                layers.Dense(3),
            ]
        )

    return make


def sequences(*between):
    def make():
        tokens = keras.Input((7,), dtype="int32")
        x = layers.Embedding(6, 4)(tokens)
        for one in between:
            x = one()(x)
        return keras.Model(tokens, layers.Dense(2)(x))

    return make


class Attends(layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 3, dropout=0.4, seed=4)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x, training=False):
        return x + self.attention(x, x, training=training)


def augmented():
    return keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            layers.RandomFlip(seed=1),
            layers.RandomRotation(0.2, seed=2),
            layers.RandomTranslation(0.1, 0.1, seed=3),
            layers.RandomBrightness(0.2, value_range=(0, 1), seed=4),
            layers.RandomContrast(0.2, seed=5),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


DROPOUT = stacked(lambda: layers.Dropout(0.4, seed=1))
CASES = {
    "dropout": Case(DROPOUT),
    "rows that do not fill a block": Case(
        lambda: keras.Sequential(
            [keras.Input((5,)), layers.Dense(7), layers.Dropout(0.3, seed=1), layers.Dense(3)]
        )
    ),
    "noise": Case(
        stacked(
            lambda: layers.GaussianNoise(0.3, seed=1),
            lambda: layers.GaussianDropout(0.3, seed=2),
            lambda: layers.AlphaDropout(0.3, seed=3),
        )
    ),
    "spatial dropout": Case(
        sequences(lambda: layers.SpatialDropout1D(0.4, seed=1)), TOKENS, TOKEN_Y
    ),
    "one mask for all samples": Case(
        sequences(lambda: layers.Dropout(0.4, noise_shape=(1, None, 4), seed=1)),
        TOKENS,
        TOKEN_Y,
    ),
    "attention": Case(sequences(Attends), TOKENS, TOKEN_Y),
    "recurrent": Case(
        sequences(
            lambda: layers.LSTM(
                3, return_sequences=True, dropout=0.3, recurrent_dropout=0.3, seed=1
            )
        ),
        TOKENS,
        TOKEN_Y,
    ),
    "time distributed": Case(
        sequences(lambda: layers.TimeDistributed(layers.Dropout(0.4, seed=1))), TOKENS, TOKEN_Y
    ),
    "noise on weights": Case(stacked(NoiseOnWeights)),
    "integers": Case(stacked(IntegerDraws)),
    "a schedule in a layer": Case(stacked(CountsCalls)),
    "a branch in a branch": Case(stacked(lambda: Draws(in_nested_branches))),
    "masked": Case(
        lambda: keras.Sequential(
            [
                keras.Input((7,), dtype="int32"),
                layers.Embedding(6, 4, mask_zero=True),
                layers.Dropout(0.3, seed=1),
                layers.Dense(2),
            ]
        ),
        TOKENS,
        TOKEN_Y,
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_full_batch(name, float64):
    check_equals_full_batch(CASES[name], TOLERANCE["float64"])


def test_augmentation():
    """In float32: Keras' own layers fail in float64."""
    check_equals_full_batch(Case(augmented, IMAGES.astype("float32")), TOLERANCE["float32"])


def rows_drawn(draw, mode, **options):
    """Return what a layer adds to each of 21 equal samples, in one batch."""
    drawn = []

    class Keeps(Draws):
        def call(self, x):
            outputs = super().call(x)
            tf.py_function(lambda rows: drawn.append(rows.numpy()), [outputs - x], [])
            return outputs

    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), Keeps(draw), layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    setting = {"microbatch_size": 7} if mode == "split" else {"accumulation_steps": 3}
    bigbatch.accumulate(model, **setting)
    x, y = np.ones((BATCH, 4), "float32"), np.ones((BATCH, 1), "float32")
    model.fit(x, y, batch_size=BATCH if mode == "split" else 7, shuffle=False, verbose=0)
    return np.concatenate(drawn)


OTHER_DRAWS = {
    "truncated": lambda x, seed: keras.random.truncated_normal(tf.shape(x), seed=seed),
    "gamma": lambda x, seed: keras.random.gamma(tf.shape(x), 2.0, seed=seed),
    "binomial": lambda x, seed: keras.random.binomial(tf.shape(x), 1000.0, 0.5, seed=seed),
    "categorical": lambda x, seed: keras.random.categorical(
        tf.zeros([tf.shape(x)[0], 1000]), 4, seed=seed
    ),
    "samples in the last dimension": lambda x, seed: tf.transpose(
        keras.random.normal(tf.shape(tf.nn.relu(tf.transpose(x))), seed=seed)
    ),
    "from the global seed": from_the_global_seed,
}


@pytest.mark.parametrize("name", OTHER_DRAWS)
def test_draws_without_rows_are_not_the_same_in_every_micro_batch(name, mode):
    rows = rows_drawn(OTHER_DRAWS[name], mode)
    assert len(np.unique(rows, axis=0)) > 2 * BATCH // 3


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}], ids=str)
def test_a_function_that_draws_can_be_used_again(options, mode):
    """It is traced once, and must not keep anything of the micro-batch in which it was."""

    class DrawsInTraining(Draws):
        # Traced while Keras builds the model, plain Keras would never move the seed.
        def call(self, x, training=False):
            return super().call(x) if training else x

    @tf.function(autograph=False)
    def draw(x, seed):
        return keras.random.normal(tf.shape(x), seed=seed)

    case = Case(stacked(lambda: DrawsInTraining(draw))).compiled(**options)
    found = case.accumulate(mode)
    check_same(found, case.train(), TOLERANCE["float32"])
    found.model.compile("sgd", "mse", **options)
    found.model.fit(DENSE_X, case.y, batch_size=BATCH, verbose=0)
    assert np.isfinite(found.model.predict(DENSE_X, verbose=0)).all()


def test_a_draw_without_a_seed_also_in_inference(mode):
    """What is tried beforehand must not move the generator that all such draws share."""
    case = Case(stacked(lambda: Draws(from_the_global_seed)))
    check_same(case.accumulate(mode), case.train(), TOLERANCE["float32"])


def test_a_metric_that_the_model_does_not_list(mode):
    class Hides(keras.Sequential):
        metrics = property(lambda self: [])

        def train_step(self, data):
            logs = super().train_step(data)
            self.hidden.update_state(tf.reduce_mean(data[0]))
            return {**logs, "hidden": self.hidden.result()}

    def make():
        model = Hides([keras.Input((5,)), layers.Dense(3)])
        model.hidden = keras.metrics.Mean(name="hidden")
        return model

    with pytest.warns(bigbatch.NotEqualWarning, match="logged value 'hidden'"):
        model, _ = Case(make).accumulate(mode)
    # Two epochs of 3 + 3 + 1 micro-batches, or of eight batches: each has counted once.
    assert float(model.hidden.count) == (14 if mode == "split" else 16)


@pytest.mark.parametrize("name", ["dropout", "noise", "masked", "a schedule in a layer"])
def test_eagerly(name, float64):
    case = CASES[name].compiled(run_eagerly=True)
    check_equals_full_batch(case, TOLERANCE["float64"], sizes=(8,), windows=(3,))


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_every_type_of_numbers(policy, mode):
    """In 16 bits gradients have three digits; with other draws slots have none in common."""
    keras.config.set_dtype_policy(policy)
    try:
        tolerance = TOLERANCE["float32"] if policy == "float32" else 5e-3
        expected = CASES["dropout"].train()
        check_same(CASES["dropout"].accumulate(mode), expected, tolerance)
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("name", ["dropout", "integers", "noise"])
def test_under_xla(name, mode):
    """The draws of XLA are other numbers, with the same law."""
    case = CASES[name].compiled(jit_compile=True)
    check_same(case.accumulate(mode), case.train(), TOLERANCE["float32"])


PAIRED = [(16,), (16, 5), (15, 4), (15, 5), (5, 15), (7, 3, 7)]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, "float32") for shape in PAIRED), ((15, 5), "float16"), ((15, 5), "float64")],
    ids=str,
)
def test_rows_of_normal_draws_of_xla(shape, dtype):
    """Bit by bit: XLA pairs numbers in the first even dimension, else in the largest."""
    draw = functools.partial(tf.random.stateless_normal, dtype=dtype, alg="philox")

    @tf.function(jit_compile=True, autograph=False)
    def parts(seed, total):
        drawn = []
        for start in range(0, shape[0], 3):
            count = min(3, shape[0] - start)
            # A seed becomes a key by a draw, which is the same for all samples.
            places = [None, FIRST]
            here = MicrobatchRows(start, count, None, places, total, is_compiled=True)
            with drawing(here):
                drawn.append(draw([count, *shape[1:]], seed))
        return tf.concat(drawn, 0)

    seed = tf.constant([3, 4])  # an argument: TensorFlow itself would draw from a constant
    whole = tf.function(lambda seed: draw(shape, seed), jit_compile=True)(seed)
    assert np.array_equal(parts(seed, tf.constant(shape[0])), whole)
    if shape == (15, 4):  # of another batch, in which samples share pairs
        assert not np.array_equal(parts(seed, tf.constant(16)), whole)


def test_on_replicas(mode, mirrored):
    """The reference is plain Keras under the same strategy, where replicas draw the same."""
    # No clipping: plain Keras clips the gradient of each replica by itself.
    case = Case(DROPOUT, optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    with mirrored.scope():
        expected = case.train(batch_size=BATCH * 2)
    setting = {"microbatch_size": 8} if mode == "split" else {"accumulation_steps": 1}
    with mirrored.scope():
        found = case.train(lambda m: bigbatch.accumulate(m, **setting), batch_size=BATCH * 2)
    check_same(found, expected, TOLERANCE["float32"])


def test_a_coupled_loss_draws_the_same(mode, float64):
    def contrast(y_true, y_pred):
        distances = tf.reduce_sum(tf.square(y_pred[:, None] - y_pred[None]), -1)
        return tf.reduce_mean(tf.exp(-distances)) + tf.reduce_mean(tf.square(y_pred - y_true))

    case = Case(DROPOUT, loss=lambda: contrast)
    found = case.accumulate(mode, {"coupled": True})
    check_same(found, case.train(), TOLERANCE["float64"])


def test_a_smaller_micro_batch_in_mid_epoch_changes_nothing(float64):
    """As after an out-of-memory error: the size of the micro-batch is not in the result."""
    results = []
    for sizes in ((None, None), (8, 5), (5, 2)):
        model = CASES["dropout"].build()
        for size in sizes:
            if size is not None:
                bigbatch.accumulate(model, microbatch_size=size)
            model.fit(DENSE_X[:42], CASES["dropout"].y[:42], batch_size=BATCH, verbose=0)
        results.append(model.get_weights())
    for found in results[1:]:
        for one, two in zip(found, results[0]):
            np.testing.assert_allclose(one, two, rtol=0, atol=TOLERANCE["float64"])


@pytest.mark.parametrize("offset", [0, 1], ids=["draws of micro-batches", "off by one row"])
def test_a_wrong_offset_is_found(offset, monkeypatch, float64):
    from bigbatch.backends.tensorflow import draws

    check_equals_full_batch(CASES["dropout"], 1e-12, sizes=(8,), windows=())
    right = draws.MicrobatchRows.__init__

    def wrong(self, start, *args, **kwargs):
        right(self, tf.zeros_like(start) if offset == 0 else start + 1, *args, **kwargs)

    monkeypatch.setattr(draws.MicrobatchRows, "__init__", wrong)
    found = CASES["dropout"].accumulate("split", {"check": "off"})
    with pytest.raises(AssertionError, match="weights: "):
        check_same(found, CASES["dropout"].train(), 1e-12)


class GanOfTheGuide(keras.Model):
    """The GAN of "Customizing fit()": real and fake samples are concatenated."""

    def __init__(self):
        super().__init__()
        hidden = [layers.Dense(6, "tanh"), layers.Dropout(0.3, seed=2)]
        self.critic = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((3,)), layers.Dense(4)])
        self.seed_generator = keras.random.SeedGenerator(7)
        self.of_critic, self.of_generator = keras.optimizers.Adam(), keras.optimizers.Adam()

    def train_step(self, real):
        def code():
            return keras.random.normal((tf.shape(real)[0], 3), seed=self.seed_generator)

        fake = self.generator(code())
        both = tf.concat([fake, real], 0)
        labels = tf.concat([tf.ones_like(real[:, :1]), tf.zeros_like(real[:, :1])], 0)
        labels += 0.05 * keras.random.uniform(tf.shape(labels), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            of_critic = self.loss(labels, self.critic(both, training=True))
        self.of_critic.apply(*gradients_of(tape, of_critic, self.critic))
        with tf.GradientTape() as tape:
            outputs = self.critic(self.generator(code()))
            of_generator = self.loss(tf.zeros_like(outputs), outputs)
        self.of_generator.apply(*gradients_of(tape, of_generator, self.generator))
        return {"critic": of_critic, "generator": of_generator}


class Repeated(keras.Model):
    """Every sample has three rows, one after the other."""

    def __init__(self):
        super().__init__()
        self.dropout, self.out = layers.Dropout(0.4, seed=5), layers.Dense(1)

    def call(self, x, training=False):
        rows = self.dropout(tf.repeat(x, 3, axis=0), training=training)
        return tf.reduce_mean(tf.reshape(self.out(rows), (-1, 3)), 1, keepdims=True)


ROWS = np.random.default_rng(8).normal(size=(50, 4))


def gan_of_the_guide():
    def loss():
        return keras.losses.BinaryCrossentropy(from_logits=True)

    return Case(GanOfTheGuide, x=ROWS, y=None, loss=loss, optimizer=keras.optimizers.SGD)


def test_several_rows_for_each_sample(mode, float64):
    """In blocks, as of samples that are concatenated, or one after the other."""
    repeated = Case(Repeated, x=ROWS, y=ROWS[:, :1])
    for case in (gan_of_the_guide(), repeated):
        check_same(case.accumulate(mode), case.train(), TOLERANCE["float64"])


def test_rows_in_blocks_that_are_not_looked_for_are_found(mode, float64, monkeypatch):
    """The negative control."""
    monkeypatch.setattr(Accumulation, "draw_in_blocks", lambda *_: False)
    with pytest.warns(bigbatch.NotEqualWarning, match="train_step of GanOfTheGuide"):
        found = gan_of_the_guide().accumulate(mode)
    with pytest.raises(AssertionError, match="not the same"):
        check_same(found, gan_of_the_guide().train(), 1e-5)
