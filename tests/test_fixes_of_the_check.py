"""What a `NotEqualWarning` says under `Fix:` is done: it gives the full batch."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.engine import planning
from bigbatch.engine.loss_plan import LossPlan
from fixes import warned

from stack import keras

layers, ops = keras.layers, keras.ops
rng = np.random.default_rng(27)
X = rng.normal(size=(24, 5)).astype("float32")
Y = rng.normal(size=(24, 3)).astype("float32")
TOKENS = np.where(np.arange(4) < rng.integers(1, 5, (24, 1)), rng.integers(1, 6, (24, 4)), 0)


class Network(keras.Model):
    """Two layers, and one between them."""

    def __init__(self, inner=None):
        super().__init__()
        self.hidden, self.inner = layers.Dense(4, "tanh"), inner
        self.out = layers.Dense(3)

    def call(self, x, training=False):
        x = self.hidden(x)
        return self.out(x if self.inner is None else self.inner(x))


class Step(Network):
    """A custom `train_step`."""

    def inputs(self, x, y):
        return x, y

    def loss_of(self, x, y, z):
        return tf.reduce_mean(tf.square(y - z))

    def changed(self, gradients):
        return gradients

    def logs(self, loss, z):
        return {"my_loss": loss}

    def train_step(self, data):
        x, y = self.inputs(*data)
        with tf.GradientTape() as tape:
            z = self(x, training=True)
            loss = self.loss_of(x, y, z)
        gradients = self.changed(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.logs(loss, z)


def trained(make, x=X, y=Y, loss="mse", setting=None, **options):
    """Train for two updates; return the model and what it logged."""
    keras.utils.set_random_seed(3)
    model = make()
    if x is not TOKENS and not isinstance(x, tf.data.Dataset):
        model(x[:2])
    options = {"optimizer": keras.optimizers.SGD, "run_eagerly": True, **options}
    model.compile(loss=loss, **{**options, "optimizer": options["optimizer"]()})
    if setting is not None:
        bigbatch.accumulate(model, **{"microbatch_size": 5, **setting})
    fed = {"x": x} if y is None else {"x": x, "y": y, "batch_size": 12}
    history = model.fit(**fed, shuffle=False, verbose=0).history
    return model, history


def wrong(make, *args, setting=(), **options):
    return trained(make, *args, setting=dict(setting), **options)


def equal(make, *args, setting=(), **options):
    """Check that nothing is warned of, and weights and logs are those of the full batch."""
    model, logs = trained(make, *args, setting={"check": "raise", **dict(setting)}, **options)
    expected, its = trained(make, *args, **options)
    for one, two in zip(model.get_weights(), expected.get_weights()):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=2e-6)
    assert logs.keys() == its.keys()
    for name, values in its.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-4)


# What a custom train_step does.


class Contrastive(Step):
    def loss_of(self, x, y, z):
        return contrastive(y, z)


def contrastive(y, z):
    logits = ops.matmul(y, ops.transpose(z))
    labels = ops.arange(ops.shape(z)[0])
    return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, True))


def test_a_loss_of_train_step_that_compares_samples():
    with warned(
        "write the forward pass in call() and the loss in compile(loss=...) or "
        "compute_loss(), and remove train_step: then the loss is computed on the whole "
        "batch"
    ):
        wrong(Contrastive)
    equal(Network, loss=contrastive)


class Mixup(Step):
    def inputs(self, x, y):
        return mixed(x, y)


def mixed(x, y):
    return 0.7 * x + 0.3 * tf.reverse(x, [0]), 0.7 * y + 0.3 * tf.reverse(y, [0])


def batches_of(x, y=Y):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(12)


def test_mixup_in_train_step():
    with warned("do that before fit(), by map() of a data set of whole batches, in split mode"):
        wrong(Mixup)
    equal(Step, batches_of(X).map(mixed), None)


class OfTokens(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = layers.Embedding(6, 4), layers.Dense(6)

    def call(self, tokens, training=False):
        return self.out(self.embedding(tokens))


class TokenMean(OfTokens):
    def loss_of(self, x, y, z):
        each = keras.losses.sparse_categorical_crossentropy(y, z, True)
        counted = ops.cast(ops.not_equal(y, 0), each.dtype)
        return ops.sum(each * counted) / ops.sum(counted)

    inputs, changed, logs = Step.inputs, Step.changed, Step.logs
    train_step = Step.train_step


class OfWeights(OfTokens):
    """Its loss divides by the weights that the data have."""

    def weights_of(self, y, given):
        return given

    def train_step(self, data):
        x, y, given = (*data, None)[:3]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), self.weights_of(y, given))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"my_loss": loss}


class OwnWeights(OfWeights):
    def weights_of(self, y, given):
        return ops.cast(ops.not_equal(y, 0), "float32")


def mean_over_weights():
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )


def weighted_tokens():
    weights = (TOKENS != 0).astype("float32")
    return tf.data.Dataset.from_tensor_slices((TOKENS, TOKENS, weights)).batch(12)


def test_a_mean_over_tokens_in_train_step():
    with warned(
        "put a weight for each token into the data as sample weights, zero for what does not "
        "count, call self.compute_loss(x, y, y_pred, sample_weight) with them, and compile a "
        'loss with reduction="mean_with_sample_weight"'
    ):
        wrong(TokenMean, TOKENS, TOKENS)
    equal(OfWeights, weighted_tokens(), None, mean_over_weights())


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_weights_that_train_step_computes(run_eagerly):
    """Micro-batches count for what was counted before: that would be the samples here."""
    options = {"run_eagerly": run_eagerly}
    with warned(
        "put these numbers into the data as sample weights, and call self.compute_loss(x, y, "
        "y_pred, sample_weight) with the weights that train_step is given"
    ):
        model, _ = wrong(OwnWeights, TOKENS, TOKENS, mean_over_weights(), **options)
    expected, _ = trained(OwnWeights, TOKENS, TOKENS, mean_over_weights(), **options)
    assert np.max(np.abs(model.get_weights()[0] - expected.get_weights()[0])) > 1e-4
    equal(OfWeights, weighted_tokens(), None, mean_over_weights(), **options)


class Clipped(Step):
    def changed(self, gradients):
        return tf.clip_by_global_norm(gradients, 0.1)[0]


class ClippedSGD(keras.optimizers.SGD):
    def __init__(self):
        super().__init__(global_clipnorm=0.1)


def test_gradients_that_are_clipped_by_hand():
    with warned("let the optimizer do it: global_clipnorm=, clipnorm= or clipvalue="):
        wrong(Clipped)
    equal(Step, optimizer=ClippedSGD)


class LogsLargest(Step):
    def logs(self, loss, z):
        return {"my_loss": loss, "largest": tf.reduce_max(z)}


class LogsMean(Step):
    def __init__(self):
        super().__init__()
        self.largest = keras.metrics.Mean("largest")

    def logs(self, loss, z):
        self.largest.update_state(tf.reduce_max(z, 1))
        return {"my_loss": loss, "largest": self.largest.result()}


def test_a_logged_value_that_is_no_mean():
    with warned(
        "update a metric of the model with one value per sample and return its result()"
    ):
        wrong(LogsLargest)
    equal(LogsMean)


class Perturbed(Step):
    """Sharpness-aware: the gradient is that of weights moved along another gradient."""

    def gradients(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y, self(x, training=True))
        return loss, tape.gradient(loss, self.trainable_variables)

    def train_step(self, data):
        variables = self.trainable_variables
        _, moves = self.gradients(data)
        for variable, move in zip(variables, moves):
            variable.assign_add(0.1 * move)
        loss, gradients = self.gradients(data)
        for variable, move in zip(variables, moves):
            variable.assign_sub(0.1 * move)
        self.optimizer.apply(gradients, variables)
        return {"my_loss": loss}


class PerturbedByOptimizers(Perturbed):
    def __init__(self):
        super().__init__()
        self.there, self.back = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)

    def train_step(self, data):
        variables = self.trainable_variables
        _, moves = self.gradients(data)
        self.there.apply([-move for move in moves], variables)
        loss, gradients = self.gradients(data)
        self.back.apply(moves, variables)
        self.optimizer.apply(gradients, variables)
        return {"my_loss": loss}


def test_weights_that_train_step_assigns():
    with warned(
        "change weights with optimizer.apply: there may be several calls, and each gets "
        "the gradient of the whole batch"
    ):
        wrong(Perturbed)
    equal(PerturbedByOptimizers, run_eagerly=False)


# What layers do.


class Stddev(layers.Layer):
    """The minibatch standard deviation of a discriminator."""

    def call(self, x):
        return x * ops.mean(ops.std(x, 0))


class SummedStddev(layers.Layer):
    def call(self, x):
        count = tf.cast(tf.shape(x)[0], x.dtype)
        parts = [tf.reduce_sum(x, 0), tf.reduce_sum(tf.square(x), 0), count[None]]
        sums = bigbatch.cross_microbatch_sum(tf.concat(parts, 0))
        mean, square = sums[:4] / sums[-1], sums[4:8] / sums[-1]
        return x * tf.reduce_mean(tf.sqrt(square - tf.square(mean)))


def spread(y, z):
    return ops.mean(ops.square(y - z * ops.mean(ops.std(z, 0))))


def test_a_layer_that_mixes_samples():
    with warned(
        "compute every sample separately in call(), and compare samples in the loss "
        "passed to compile(), which is computed on the whole batch; or, with Keras 3 on "
        "TensorFlow or JAX, mix them with bigbatch.cross_microbatch_sum and "
        'batch_norm="exact"'
    ):
        wrong(lambda: Network(Stddev()))
    equal(Network, loss=spread)
    exact = {"run_eagerly": False, "setting": {"batch_norm": "exact"}}
    equal(lambda: Network(SummedStddev()), **exact)
    with warned(
        "pass coupled=True if it is the loss of compile() or compute_loss(); otherwise "
        'find the layer with batch_norm="pooled" and check="raise", and use '
        "bigbatch.cross_microbatch_sum or bigbatch.cross_microbatch_gather in it"
    ):
        wrong(lambda: Network(Stddev()), **exact)
    with pytest.raises(bigbatch.errors.BigbatchError, match=r"\(Stddev\): it mixes"):
        wrong(lambda: Network(Stddev()), setting={"check": "raise"})


class Truncated(layers.Layer):
    draw = staticmethod(keras.random.truncated_normal)

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x):
        return x + self.draw(ops.shape(x), seed=self.seed_generator)


class Normal(Truncated):
    draw = staticmethod(keras.random.normal)


def test_draws_that_cannot_be_those_of_the_full_batch():
    with warned(
        "draw uniform or normal numbers with keras.random and a SeedGenerator, or use a "
        "layer that mixes samples (MixUp, CutMix) before fit(), by map() of a data set of"
        " whole batches in split mode, or ignore this if other numbers of the same "
        "distribution are good enough"
    ):
        wrong(lambda: Network(Truncated()))
    equal(lambda: Network(Normal()))


IMAGES = rng.integers(0, 255, (24, 4, 4, 1)).astype("float32")


def of_images(*first):
    return keras.Sequential([*first, layers.Flatten(), layers.Dense(3)])


def test_images_that_are_equalized():
    equalize = layers.Equalization(bins=8)
    with warned(
        "apply it to whole batches before fit(), with map() of a data set in split mode"
    ):
        wrong(lambda: of_images(layers.Equalization(bins=8)), IMAGES / 255)
    batches = batches_of(IMAGES / 255).map(lambda x, y: (equalize(x), y))
    equal(of_images, batches, None)


class Balances(layers.Layer):
    """As a mixture of experts: it penalises that all samples use the same features."""

    def call(self, x):
        self.add_loss(ops.sum(ops.square(ops.mean(x, 0))))
        return x


class ReturnsUse(Network):
    def call(self, x, training=False):
        x = self.hidden(x)
        return {"out": self.out(x), "use": x}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        balance = ops.sum(ops.square(ops.mean(y_pred["use"], 0)))
        return ops.mean(ops.square(y - y_pred["out"])) + balance


def test_an_added_loss_that_is_no_mean():
    with warned(
        "pass a mean over samples to add_loss(); let call() return what compares samples, and "
        "add that to the loss in compute_loss(), which is computed on the whole batch; or "
        "compute sums of the whole batch with bigbatch.cross_microbatch_sum, and pass "
        'batch_norm="exact"'
    ):
        wrong(lambda: Network(Balances()))
    equal(ReturnsUse, loss=None)


class Bank(layers.Layer):
    """A memory bank: every call writes its samples."""

    gather = staticmethod(lambda x: x)

    def build(self, shape):
        self.bank = self.add_weight(
            shape=(12, shape[-1]), initializer="random_normal", trainable=False, name="bank"
        )

    def call(self, x):
        outputs = x + 0.1 * tf.reduce_mean(tf.convert_to_tensor(self.bank), 0)
        rows = tf.concat([tf.stop_gradient(self.gather(x)), self.bank], 0)
        self.bank.assign(tf.ensure_shape(rows[:12], self.bank.shape))
        return outputs


class WholeBank(Bank):
    gather = staticmethod(bigbatch.cross_microbatch_gather)


def test_state_that_every_micro_batch_changes():
    with warned(
        "assign it once per update, in a callback; or, with Keras 3 on TensorFlow, compute it "
        "from all samples by bigbatch.cross_microbatch_sum or cross_microbatch_gather, with "
        'batch_norm="exact"'
    ):
        wrong(lambda: Network(Bank()))
    exact = {"run_eagerly": False, "setting": {"batch_norm": "exact"}}
    equal(lambda: Network(WholeBank()), **exact)


class MixesInGraphs(Stddev):
    """It does not, where Python looks at one layer after the other."""

    def call(self, x):
        return x if tf.executing_eagerly() else super().call(x)


def test_two_passes_and_a_layer_that_mixes_samples():
    with warned("compute every sample separately in call()"):
        wrong(lambda: Network(MixesInGraphs()), loss=contrastive, run_eagerly=False)
    equal(Network, loss=contrastive, run_eagerly=False)


# What is compiled.


def of_labels(y, z):
    weights = ops.abs(y)
    return ops.sum(weights * ops.square(y - z)) / ops.sum(weights)


def test_a_compiled_loss_by_micro_batches():
    with warned("leave coupled out"):
        wrong(Network, loss=of_labels, setting={"coupled": False})
    equal(Network, loss=of_labels)


def nothing_found(self):
    return LossPlan()


def of_positives(y, z):
    positive = ops.cast(y > 0, z.dtype)
    return ops.sum(positive * ops.square(y - z)) / (ops.sum(positive) + 1)


def test_a_compiled_loss_that_the_first_look_took_for_a_mean(monkeypatch):
    monkeypatch.setattr(planning.LossTrial, "plan", nothing_found)  # in too few positive labels
    with warned("pass coupled=True to accumulate(), which computes it on the whole batch"):
        wrong(Network, loss=of_positives)
    equal(Network, loss=of_positives, setting={"coupled": True})


class OwnLoss(Network):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        return of_labels(y, y_pred)


class ReadsCall(Network):
    """Its loss reads what `call` has kept."""

    def call(self, x, training=False):
        self.kept = super().call(x)
        return self.kept

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        return of_labels(y, self.kept)


class StepOfOwnLoss(Step):
    compute_loss = OwnLoss.compute_loss

    def loss_of(self, x, y, z):
        return self.compute_loss(x, y, z)


class Scaled(Network):
    """It returns a scale, one number for the batch."""

    def scale(self, z):
        return 0.5

    def call(self, x, training=False):
        z = super().call(x)
        return {"each": z, "scale": ops.convert_to_tensor(self.scale(z), z.dtype)}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        return of_labels(y, y_pred["each"] * y_pred["scale"])


class ScaledRows(Scaled):
    def scale(self, z):
        return 0.5 * ops.ones_like(z)


def test_losses_that_two_passes_cannot_compute():
    with warned("write the loss in compute_loss() or compile(loss=...), without a train_step"):
        wrong(StepOfOwnLoss, loss=None)
    equal(OwnLoss, loss=None)
    with warned("let call() return them"):
        wrong(ReadsCall, loss=None)
    equal(OwnLoss, loss=None)
    with warned("return one row per sample"):
        wrong(Scaled, loss=None)
    equal(ScaledRows, loss=None)
    with warned("compute every sample separately in it"):
        wrong(lambda: Network(Stddev()), loss=of_labels)
    equal(Network, loss=of_labels)


def test_outputs_that_are_too_large_to_hold(monkeypatch):
    monkeypatch.setattr(planning, "_ALWAYS_HELD", 10)
    with warned(
        "pass coupled=True to hold them anyway, or use smaller batches; for a mean over "
        'tokens pass a Keras loss with reduction="mean_with_sample_weight", and sample '
        "weights of zero for padding, which holds nothing"
    ):
        wrong(OfTokens, TOKENS, TOKENS, token_mean)
    equal(OfTokens, TOKENS, TOKENS, token_mean, setting={"coupled": True})
    equal(OfTokens, weighted_tokens(), None, mean_over_weights())


def token_mean(y, z):
    each = keras.losses.sparse_categorical_crossentropy(y, z, True)
    counted = ops.cast(ops.not_equal(y, 0), each.dtype)
    return ops.sum(each * counted) / ops.sum(counted)


class Largest(keras.metrics.Metric):
    """Its state adds up: the largest of all."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.kept = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y, z, sample_weight=None):
        self.kept.assign(ops.maximum(self.kept, ops.max(ops.abs(z))))

    def result(self):
        return 1 * self.kept


def largest(y, z):
    return ops.max(ops.abs(z))


def test_a_metric_that_is_one_number(monkeypatch):
    monkeypatch.setattr(planning, "_ALWAYS_HELD", 10)
    with warned("use a metric whose state adds up, a subclass of keras.metrics.Metric"):
        wrong(Network, metrics=[largest])
    equal(Network, metrics=[Largest()])


class Last(keras.metrics.Metric):
    """What it returns depends on how samples come."""

    def __init__(self):
        super().__init__(name="last")
        self.kept = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y, z, sample_weight=None):
        self.kept.assign(0.5 * self.kept + ops.mean(ops.abs(z)))

    def result(self):
        return 1 * self.kept


def test_a_metric_that_micro_batches_do_not_give(monkeypatch):
    monkeypatch.setattr(planning.LossTrial, "plan", nothing_found)
    with warned("read it from evaluate(); the weights are correct"):
        model, _ = wrong(Network, metrics=[Last()])
    expected, _ = trained(Network, metrics=[Last()])
    for one, two in zip(model.get_weights(), expected.get_weights()):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=2e-6)
    values = [one.evaluate(X, Y, verbose=0, return_dict=True) for one in (model, expected)]
    assert values[0]["last"] == pytest.approx(values[1]["last"], rel=1e-4)


# Sparse gradients.


def test_rows_that_are_summed():
    def make():
        return keras.Sequential([layers.Embedding(6, 4), layers.Flatten(), layers.Dense(3)])

    adam = functools.partial(dict, optimizer=keras.optimizers.Adam, run_eagerly=False)
    with warned(
        'leave sparse_gradients="dense" out, or use SGD; or ignore this if you want the '
        "update of a dense gradient"
    ):
        wrong(make, TOKENS, setting={"sparse_gradients": "dense"}, **adam())
    equal(make, TOKENS, **adam())
    equal(make, TOKENS, setting={"sparse_gradients": "dense"})
