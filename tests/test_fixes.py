"""A test does what the `Fix:` of every message says, if it can be done here, and it works."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.backends.tensorflow.longest import longest
from bigbatch.cli import main
from bigbatch.core.memory import bytes_of
from bigbatch.planner import measure
from fixes import FOLDERS, SOURCE, Site, followed, not_followed, printed, refused, sites

from stack import keras

layers = keras.layers
rng = np.random.default_rng(28)
X, Y = rng.normal(size=(18, 5)), rng.normal(size=(18, 3))
SPLIT = {"microbatch_size": 4}

BROKEN = "the installation would have to be a broken one"
LOST = "memory has to run out in the middle of an update"
PROCESSES = "there have to be several processes"
KERAS_2 = "of Keras 2"
EXCEPTIONS = {
    "__init__.py": BROKEN,
    "planner/plan.py": BROKEN,
    "demo/story.py": BROKEN,
    "backends/keras2/fit.py": KERAS_2 + ": test_last_window.py",
    "bigbatch.accumulate works for both": KERAS_2,
    "loops/tf1.py": "of TensorFlow 1: test_eager1.py",
    "unset KERAS_NNX_ENABLED": "it has to be set before Keras is imported",
    "some weights are updated and some are not": LOST,
    "the weights are lost": LOST,
    "use a smaller model, mixed precision": "it asks for another model or device",
    "use a GPU, whose allocator": "it asks for another device",
    "use a CUDA device": "it asks for another device",
    "leave that out, or train in one process": PROCESSES,
    "train in one process": PROCESSES,
    "use DataParallel": PROCESSES + ": test_processes.py of jax_contract",
    'find it with "auto" in one process': PROCESSES,
    "engine/workers.py": PROCESSES,
    "read the last output of the other worker": PROCESSES + ": test_workers.py",
    'find it with "auto" on one worker': PROCESSES,
    'pass the size that "auto" finds': PROCESSES,
    "plan for the same model in one process": PROCESSES,
    "set TF_CPU_ALLOCATOR_USE_BFC=true": "before TensorFlow starts: test_plan.py",
    "set KERAS_BACKEND=tensorflow, or add": "all backends make several updates by now",
    "backends/jax/exact/": "on JAX: test_exact.py of jax_contract",
    'leave that out, or use batch_norm="pooled"': "on JAX: test_exact.py of jax_contract",
    "use tf.GradientTape in train_step": "no step is known that needs it",
    "report this model": "there is no such model, or it would have been mended",
}
"""Fixes that cannot be followed or tried here, by how they or their places begin."""


def linear(loss="mse", optimizer="sgd", *inner, **options):
    model = keras.Sequential([keras.Input((5,)), *inner, layers.Dense(3)])
    model.compile(optimizer, loss, **{"run_eagerly": True, **options})
    return model


def trains(model, x=X, y=Y, **setting):
    """Train; `accumulate` is called first if there are settings for it."""
    if setting:
        assert bigbatch.accumulate(model, **setting) is model
    history = model.fit(x, y, batch_size=9, verbose=0).history
    assert np.all(np.isfinite(history["loss"]))


def test_every_fix_is_followed_or_has_a_reason_not_to_be():
    every = sites()
    assert len(every) > 110
    assert not not_followed(every, followed(), EXCEPTIONS)
    places = [site.place for site in every]
    texts = [text for site in every for text in site.texts]
    for start in EXCEPTIONS:
        assert any(one.startswith(start) for one in [*places, *texts]), start


def test_a_fix_that_nobody_follows_is_found(tmp_path):
    """The negative controls."""
    (tmp_path / "new.py").write_text('explain(received=r, expected=e, fix=f"pass {name}=1")')
    (tmp_path / "named.py").write_text("Cause(where, what, size, TODO)\nTODO = 'rest'")
    (site, named) = (found := sites(tmp_path))[::-1]
    assert (site.place, site.texts) == ("new.py:1", ("pass .*=1",))
    assert (named.place, named.texts) == ("named.py:1", ("rest",))
    assert not not_followed(found, {"tests": ["pass x=1", "rest"]}, {})
    assert len(not_followed(found, {"tests": ["pass x=2"]}, {})) == 2
    assert not not_followed(found, {"tests": []}, {"new.py": "a reason", "re": "a reason"})
    # What is expected and not followed, or on another backend, does not count.
    (tmp_path / "test_one.py").write_text("def test():\n  with refused('pass x=1'):\n    f()\n")
    assert followed(tmp_path) == {"tests": []}
    assert not_followed([Site("backends/jax/a.py:1", ("b",))], {"tests": ["b"]}, {})
    assert set(FOLDERS) <= {str(one.relative_to(SOURCE)) for one in SOURCE.glob("*/*")}


def test_another_fix_than_the_expected_one_fails():
    with pytest.raises(AssertionError), refused("leave it out"):
        bigbatch.accumulate(linear(), **SPLIT, coupled="yes")


# What is passed to accumulate() and to the functions beside it.


def test_neither_or_both():
    for wrong in ({}, {"microbatch_size": 4, "accumulation_steps": 2}):
        with refused(
            "pass microbatch_size to cut the batches of fit(), or accumulation_steps to group"
            " the batches of the data set"
        ):
            bigbatch.accumulate(linear(), **wrong)
    trains(linear(), microbatch_size=4)
    trains(linear(), accumulation_steps=2)


def test_choices():
    for wrong in ({"batch_norm": "synced"}, {"check": "never"}):
        with refused("leave it out, or choose one of these"):
            bigbatch.accumulate(linear(), **SPLIT, **wrong)
    with refused('leave it out: "auto" finds by trying whether the loss needs the whole batch'):
        bigbatch.accumulate(linear(), **SPLIT, coupled="yes")
    trains(linear(), **SPLIT)
    trains(linear(), **SPLIT, batch_norm="pooled", check="raise")


def test_spelling():
    model = linear()
    with refused('write microbatch_size="auto"'):
        bigbatch.accumulate(model, microbatch_size="Auto")
    with refused("write microbatch_size=4"):
        bigbatch.accumulate(model, microbatch_size="4")
    with refused("pass accumulation_steps=1 or more, for example accumulation_steps=4"):
        bigbatch.accumulate(model, accumulation_steps=0)
    with refused("call accumulate(model, accumulation_steps=2)"):
        bigbatch.accumulate(model, gradient_accumulation_steps=2)
    with refused("leave x out"):
        bigbatch.accumulate(model, x=2, **SPLIT)
    bigbatch.accumulate(model, microbatch_size="auto")
    for setting in ({"accumulation_steps": 2}, {"microbatch_size": 4}):
        trains(model, **setting)


def test_not_a_model():
    with refused(
        "pass the model whose fit() is to accumulate; set KERAS_BACKEND to one of these"
    ):
        bigbatch.accumulate(layers.Dense(3), **SPLIT)
    trains(linear(), **SPLIT)


def test_an_optimizer_that_accumulates():
    model = linear(optimizer=keras.optimizers.SGD(gradient_accumulation_steps=2))
    with refused("remove gradient_accumulation_steps: bigbatch accumulates"):
        bigbatch.accumulate(model, **SPLIT)
    assert "fit" not in vars(model)
    trains(linear(optimizer=keras.optimizers.SGD()), **SPLIT)


def test_schedules_and_rates():
    with refused("for example piecewise({0: 1, 1000: 4})"):
        bigbatch.piecewise({1000: 4})
    assert bigbatch.piecewise({0: 1, 1000: 4})(1000) == 4
    with refused("for example grow(to=16, every=1000), which doubles every 1000 updates"):
        bigbatch.grow(to=16, every=1000, factor=1)
    assert bigbatch.grow(to=16, every=1000)(2000) == 4
    sizes = {"batch_size": 64, "reference_batch_size": 16}
    with refused("'linear' for SGD, 'sqrt' for Adam"):
        bigbatch.scale_learning_rate(0.1, **sizes, rule="cubic")
    with refused("pass the value that you would pass to the optimizer as learning_rate"):
        bigbatch.scale_learning_rate("0.1", **sizes)
    for rule, expected in (("linear", 0.4), ("sqrt", 0.2)):
        scaled = bigbatch.scale_learning_rate(0.1, **sizes, rule=rule)
        assert scaled == pytest.approx(expected)


def test_memory():
    with refused('leave it out, or pass storage="host" to use the memory of the host'):
        bigbatch.ExactBatchNorm(storage="disk")
    bigbatch.ExactBatchNorm(storage="host")
    with refused("pass the memory of the training device, for example '8GiB'"):
        bytes_of("much")
    assert bytes_of("8GiB") == 8 * 2**30


def test_one_micro_batch_has_no_noise():
    estimator = bigbatch.NoiseScaleEstimator()
    with refused("cut batches into micro-batches: one alone does not show the noise"):
        estimator.add([4], [1.0], 1.0)
    estimator.add([2, 2], [1.0, 1.0], 1.0)


# The model, and callbacks.


def test_not_compiled():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(3)])
    with refused("call model.compile(...) first"):
        bigbatch.verify(model, X, Y, **SPLIT, verbose=False)
    model.compile("sgd", "mse")
    assert bigbatch.verify(model, X, Y, **SPLIT, verbose=False).ok


def test_noise_of_what_has_none():
    model = linear()
    with refused("call bigbatch.accumulate(model, ...) before fit()"):
        model.fit(X, Y, callbacks=[bigbatch.NoiseScale()], verbose=0)
    bigbatch.accumulate(model, **SPLIT, coupled=True)
    with refused("leave NoiseScale out: a micro-batch has no gradient of its own then"):
        model.fit(X, Y, callbacks=[bigbatch.NoiseScale()], verbose=0)
    trains(model)
    bigbatch.accumulate(model, **SPLIT)
    model.fit(X, Y, callbacks=[bigbatch.NoiseScale()], verbose=0)


def test_a_callback_that_comes_too_late():
    class Evaluates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.evaluate(X, Y, callbacks=[bigbatch.NoiseScale()], verbose=0)

    model = bigbatch.accumulate(linear(), **SPLIT)
    with refused("pass NoiseScale to fit(), not to evaluate() or predict()"):
        model.fit(X, Y, callbacks=[Evaluates()], verbose=0)
    model.fit(X, Y, callbacks=[bigbatch.NoiseScale()], verbose=0)


class Fills(layers.Layer):
    """A device whose memory holds four samples."""

    def call(self, x):
        if x.shape[0] is not None and x.shape[0] > 4:
            raise tf.errors.ResourceExhaustedError(None, None, "out of memory")
        return x


def test_micro_batches_that_are_too_large():
    model = linear("mse", "sgd", Fills())
    with refused('pass microbatch_size="auto", or a smaller number'):
        trains(model, microbatch_size=8, check="off")
    trains(model, microbatch_size=4)


class Plain(keras.Sequential):
    """The training step of a custom loop; those below do something to it."""

    def gradients(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data[0], training=True) - data[1]))
        return loss, tape.gradient(loss, self.trainable_variables)

    def apply(self, gradients):
        self.optimizer.apply(gradients, self.trainable_variables)

    def train_step(self, data):
        loss, gradients = self.gradients(data)
        self.apply(gradients)
        return {"loss": loss}


def custom(kind, *inner, **options):
    model = kind([keras.Input((5,)), *inner, layers.Dense(3)])
    model.compile("sgd", "mse", **options)
    return model


class InTensorFlow(Plain):
    def train_step(self, data):
        def apply(index, _):
            loss, gradients = self.gradients(data)
            self.apply(gradients)
            return index + 1, loss

        start = (0, tf.zeros([], self.compute_dtype))
        return {"loss": tf.while_loop(lambda index, _: index < 2, apply, start)[1]}


class InPython(Plain):
    def train_step(self, data):
        for _ in range(2):
            logs = super().train_step(data)
        return logs


def test_updates_that_have_no_number():
    with refused(
        "call optimizer.apply in train_step itself, in a Python loop if there are several "
        "updates"
    ):
        trains(custom(InTensorFlow), **SPLIT)
    trains(custom(InPython), **SPLIT, check="raise")


class Elsewhere(Plain):
    def apply(self, gradients):
        OPTIMIZERS[0].apply(gradients, self.trainable_variables)


OPTIMIZERS = [keras.optimizers.SGD()]


def test_an_optimizer_that_the_model_does_not_know():
    with refused(
        "use optimizers of Keras that are attributes of the model or its layers; updates by "
        "hand, or by torch.optim, cannot be accumulated"
    ):
        trains(custom(Elsewhere), **SPLIT)
    model = custom(Elsewhere)
    OPTIMIZERS[0] = model.mine = keras.optimizers.SGD()
    trains(model, **SPLIT)


def test_an_optimizer_without_variables():
    def make():
        model = custom(Elsewhere)
        OPTIMIZERS[0] = model.mine = keras.optimizers.SGD()
        model.other = keras.optimizers.SGD()
        return model

    model = make()
    with refused("call build() of each with the variables that train_step updates by it"):
        bigbatch.verify(model, X, Y, **SPLIT, verbose=False)
    for optimizer in (model.optimizer, model.mine, model.other):
        optimizer.build(model.trainable_variables)
    assert bigbatch.verify(model, X, Y, **SPLIT, verbose=False).ok


class ByStructure(Plain):
    """Makes two updates where samples have weights."""

    def train_step(self, data):
        for _ in range(len(data) - 1):
            logs = super().train_step(data)
        return logs


def test_other_updates_for_other_data():
    model = custom(ByStructure)
    trains(model, **SPLIT)
    with refused("call accumulate once more before training on other data"):
        model.fit(X, Y, sample_weight=np.ones(18), batch_size=9, verbose=0)
    bigbatch.accumulate(model, **SPLIT)
    model.fit(X, Y, sample_weight=np.ones(18), batch_size=9, verbose=0)


def test_two_passes_need_a_forward_pass():
    with refused(
        "write the forward pass in call() and the loss in compute_loss() or in "
        "compile(loss=...), and remove train_step"
    ):
        trains(custom(Plain), **SPLIT, coupled=True)
    trains(linear(), **SPLIT, coupled=True)


def test_two_passes_need_samples_by_themselves():
    model = linear("mse", "sgd", layers.BatchNormalization())
    with refused(
        'pass batch_norm="frozen" for BatchNormalization (or "exact", with Keras 3 on '
        "TensorFlow), or use LayerNormalization or GroupNormalization; move what mixes "
        "samples from call() to the loss"
    ):
        trains(model, **SPLIT, coupled=True)
    trains(model, **SPLIT, coupled=True, batch_norm="frozen")
    trains(linear("mse", "sgd", layers.LayerNormalization()), **SPLIT, coupled=True)


class Noise(layers.Layer):
    def call(self, x, training=False):
        return x + tf.random.normal(tf.shape(x), dtype=x.dtype)


def test_draws_of_a_second_pass():
    def model(noise):
        return linear("mse", "sgd", noise, run_eagerly=False)

    with refused(
        "draw them with keras.random and a keras.random.SeedGenerator, or with a "
        "tf.random.Generator; for layers of Keras 2 call "
        "tf.keras.backend.experimental.enable_tf_random_generator() first"
    ):
        trains(model(Noise()), **SPLIT, coupled=True)
    trains(model(layers.GaussianNoise(1.0)), **SPLIT, coupled=True)


class Constant(layers.Layer):
    size = 9

    def call(self, x):
        return x + tf.ones([self.size, 5], x.dtype)


class OfAnySize(layers.Layer):
    def call(self, x):
        return x + tf.ones([tf.shape(x)[0], 5], x.dtype)


def test_a_number_of_samples_in_the_model():
    with refused(
        "if the number of samples is written as a constant, read it from the data: "
        "tf.shape(x)[0]; or pass microbatch_size=9, with batches that are multiples of it"
    ):
        trains(linear("mse", "sgd", Constant()), **SPLIT)
    trains(linear("mse", "sgd", OfAnySize()), **SPLIT)
    model = bigbatch.accumulate(linear("mse", "sgd", Constant()), microbatch_size=9)
    model.fit(X, Y, batch_size=18, verbose=0)


class Unlike(keras.Model):
    """Takes tables whose rows are other things than samples."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(1)

    def call(self, inputs):
        owners = tf.cast(inputs["owners"], tf.int32)
        return tf.math.segment_sum(self.out(inputs["rows"]), owners)


def test_tensors_of_other_lengths():
    rows = {"rows": np.ones((6, 5)), "owners": np.array([0, 0, 1, 1, 2, 2])}
    batches = tf.data.Dataset.from_tensors((rows, np.ones((3, 1)))).repeat(2)
    model = Unlike()
    model.compile("sgd", "mse", run_eagerly=True)
    bigbatch.accumulate(model, microbatch_size=2)
    with refused(
        "slice or stack the tensors of the batch to one length; or pass accumulation_steps in "
        "place of microbatch_size: each batch of the data set is a micro-batch, and not cut"
    ):
        model.fit(batches, shuffle=False, verbose=0)
    bigbatch.accumulate(model, accumulation_steps=2)
    model.fit(batches, shuffle=False, verbose=0)
    w = tf.Variable(1.0)
    for y in (tf.ones([3]), tf.ones([6])[:3]):
        bigbatch.value_and_gradients(
            lambda x, y: tf.reduce_mean(w * x * y), [w], (tf.ones([3]), y), microbatch_size=2
        )


# Exact batch normalisation, which runs micro-batches in stages.

EXACT = {**SPLIT, "batch_norm": "exact"}


class Centred(layers.Layer):
    """Mixes samples by a sum over the whole batch."""

    def call(self, x):
        count = tf.cast(tf.shape(x)[0], x.dtype)
        sums = bigbatch.cross_microbatch_sum(tf.concat([tf.reduce_sum(x, 0), [count]], 0))
        return x - sums[:-1] / sums[-1]


class InBranch(Centred):
    def call(self, x):
        return tf.cond(tf.reduce_sum(x) < 1e9, lambda: super(InBranch, self).call(x), lambda: x)


def traced(*inner):
    return linear("mse", "sgd", *inner, run_eagerly=False)


def test_sums_over_micro_batches():
    with refused(
        'bigbatch.accumulate(model, ..., batch_norm="exact"), also if the model has no '
        "BatchNormalization"
    ):
        trains(linear("mse", "sgd", Centred()), **SPLIT)
    with refused('call the layer outside, or use batch_norm="pooled"'):
        trains(traced(InBranch()), **EXACT)
    trains(traced(Centred()), **EXACT)


class Moments(layers.BatchNormalization):
    def _moments(self, inputs, mask):
        return super()._moments(inputs, mask)


def test_exact_statistics_that_are_refused():
    normalised = lambda **options: linear(  # noqa: E731
        "mse", "sgd", layers.BatchNormalization(), **options
    )
    renormalised = traced(layers.BatchNormalization(renorm=True))
    with refused(
        "leave renorm out: statistics of the whole batch do not need it; or use "
        'batch_norm="pooled"'
    ):
        trains(renormalised, **EXACT)
    trains(traced(layers.BatchNormalization()), **EXACT)
    with refused('compile without run_eagerly, or use batch_norm="pooled"'):
        trains(normalised(), **EXACT)
    with refused(
        "compute them with bigbatch.cross_microbatch_sum in a layer that is not a "
        'BatchNormalization, or use batch_norm="pooled"'
    ):
        trains(traced(Moments()), **EXACT)
    trains(normalised(), **SPLIT)
    trains(linear("mse", "sgd", Moments()), **SPLIT)


def test_rows_of_all_replicas_have_a_shape(mirrored):
    class Gathers(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(), initializer="ones")

        def call(self, x):
            return x + self.scale * tf.reduce_mean(bigbatch.cross_microbatch_gather(x))

    def trained(batches):
        with mirrored.scope():
            model = keras.Sequential([keras.Input((None,)), Gathers()])
            model.compile("sgd", "mse")
        bigbatch.accumulate(model, **EXACT)
        model.fit(batches, shuffle=False, verbose=0)

    of_no_shape = [tf.TensorSpec([None, None]), tf.TensorSpec([None, None])]
    batches = tf.data.Dataset.from_generator(
        lambda: iter([(X, X)]), output_signature=tuple(of_no_shape)
    ).apply(tf.data.experimental.assert_cardinality(1))
    with refused(
        "give the data a full shape, by tf.ensure_shape in map() of the data set, or train on "
        "one device"
    ):
        trained(batches)
    shaped = lambda x: tf.ensure_shape(x, (None, 5))  # noqa: E731
    trained(batches.map(lambda x, y: (shaped(x), shaped(y))))


class Weighted(Plain):
    """Takes a batch apart itself."""

    def gradients(self, data):
        with tf.GradientTape() as tape:
            z = self(data["x"], training=True)
            loss = self.compute_loss(data["x"], data["y"], z, data["weight"])
        return loss, tape.gradient(loss, self.trainable_variables)


class OfWeights(Weighted):
    def gradients(self, data):
        return super().gradients(dict(zip(("x", "y", "weight"), data)))


def test_sums_of_weights_that_cannot_be_counted():
    named = {"x": X, "y": Y, "weight": np.arange(18.0)}
    by_name = tf.data.Dataset.from_tensor_slices(named).batch(9)
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")

    def trained(kind, batches, **options):
        model = kind([keras.Input((5,)), layers.Dense(3)])
        model.compile("sgd", loss, **options)
        bigbatch.accumulate(model, **SPLIT, check="raise")
        model.fit(batches, shuffle=False, verbose=0)

    for run_eagerly in (True, False):
        with refused(
            "leave run_eagerly=True out, pass x, y and sample_weight to fit(), and call "
            "self.compute_loss(x, y, y_pred, sample_weight) with these"
        ):
            trained(Weighted, by_name, run_eagerly=run_eagerly)
    trained(OfWeights, by_name.map(lambda data: (data["x"], data["y"], data["weight"])))


# verify(), plan() and the command line.


def test_verify_takes_one_device(mirrored):
    with mirrored.scope():
        model = linear(run_eagerly=False)
    with refused("build and compile the same model outside strategy.scope(), in one process"):
        bigbatch.verify(model, X, Y, **SPLIT, verbose=False)
    assert bigbatch.verify(linear(), X, Y, **SPLIT, verbose=False).ok


def test_a_plan_needs_a_limit(monkeypatch):
    plan = functools.partial(bigbatch.plan, linear(), X, Y, batch_size=2, verbose=False)
    monkeypatch.setattr(measure._Trials, "_here", lambda self: math.inf)
    with refused("pass memory_limit, for example '8GiB'"):
        plan()
    monkeypatch.undo()
    assert plan(memory_limit="8GiB").microbatch_size == 2


FACTORY = """
import keras, numpy
def make():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse", run_eagerly=True)
    return model, numpy.ones((8, 5)), numpy.ones((8, 3))
def forgets():
    return make()[0]
"""


def test_what_verify_is_given_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "made_here.py").write_text(FACTORY)
    verify = lambda name: main(["verify", name, "--microbatch-size", "4"])  # noqa: E731
    with printed("for a function make() in train.py of this directory: train:make", capsys):
        assert verify("made_here.py") == 2
    with printed("return model, x, y", capsys):
        assert verify("made_here:forgets") == 2
    assert verify("made_here:make") == 0


def test_what_is_run_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text("print('started')")
    run = lambda *script: main(["run", *script, "--microbatch-size", "auto"])  # noqa: E731
    with printed(
        "pass the path of a file: bigbatch run train.py --microbatch-size auto", capsys
    ):
        assert run("program") == 2
    with printed(
        "bigbatch run -m package.module --microbatch-size auto, in the directory that holds "
        "the package",
        capsys,
    ):
        assert run("-m", "nowhere") == 2
    assert run("program.py") == run("-m", "program") == 0
    assert capsys.readouterr().out == "started\nstarted\n"


def test_a_data_set_has_its_targets():
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(9)
    with refused("leave y and sample_weight out"):
        longest(batches, Y, None)
    assert longest(batches, None, None)[0].shape[0] == 9


def test_a_data_set_without_end():
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(9)
    with refused("pass a part of the training data"):
        longest(batches.repeat(), None, None)
    assert longest(batches.repeat().take(100), None, None)[0].shape[0] == 9
    with refused("pass a part of the training data"):
        longest(batches.take(0), None, None)
    assert longest(batches, None, None)[0].shape[0] == 9
