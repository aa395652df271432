"""Every private name of Keras 2 in use: runs on every row of `make matrix` that has Keras 2.

In CI it is `tf_keras`, next to Keras 3 in one process, as users may have them.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.backends import keras as compat
from bigbatch.backends.keras2 import backend as keras2
from comparison import check_same
from fit_cases import MODES, Case

from problems import TOLERANCE
from stack import IS_KERAS_3, keras

if IS_KERAS_3:
    keras = pytest.importorskip("tf_keras")

ADAPT = "adapt src/bigbatch/backends/keras2/ to this version of Keras 2"


def model_and_data(*layers, loss="mse", **options):
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), loss, **options)
    return model, (tf.ones([4, 3]), tf.ones([4, 2]))


def known(model):
    found = compat.backend_of(model)
    assert isinstance(found, keras2.Keras2)
    return found


def test_a_model_is_built_before_it_is_trained():
    model, data = model_and_data(metrics=["mae"])
    assert known(model).build(model, data), ADAPT
    assert model.compiled_loss.built, ADAPT
    assert model.compiled_metrics.built, ADAPT
    assert [metric.name for metric in model.metrics] == ["loss", "mae"]
    assert known(model).is_compiled(model), ADAPT
    assert known(model).batches_per_call(model) == 1, ADAPT
    assert not known(model).jit_compile(model), ADAPT
    assert int(model._train_counter) == 0, ADAPT
    assert not known(model).has_custom_train_step(model)


def test_a_model_that_is_built_by_its_first_batch(capsys):
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    bigbatch.accumulate(model, microbatch_size=4)
    model.fit(np.ones((10, 3)), np.ones((10, 2)), batch_size=8, verbose=2)
    assert "bigbatch: batch 8 = 4 samples × 2 micro-batches" in capsys.readouterr().out
    assert int(model.optimizer.iterations) == 2


def test_what_training_changes():
    layers = keras.layers
    frozen = layers.Dense(3)
    frozen.trainable = False
    model, data = model_and_data(layers.BatchNormalization(), layers.Dropout(0.5), frozen)
    known(model).build(model, data)
    shapes = sorted(tuple(variable.shape) for variable in known(model).state_of(model))
    assert shapes == [(), (), (3,), (3,)], ADAPT
    assert [
        type(one).__name__ for one in known(model).layers_with_other_draws(model, is_split=True)
    ] == ["Dropout"]
    (norm,) = filter(known(model).is_batch_norm, compat.layers_of(model))
    assert norm.fused is False, ADAPT
    assert callable(norm._calculate_mean_and_var), ADAPT


def test_the_variance_of_a_fused_batch_normalisation():
    """Its kernel divides by one less than the number of elements."""
    layer = keras.layers.BatchNormalization(momentum=0.0)
    x = np.random.default_rng(0).normal(size=(2, 3, 1, 2)).astype("float32")
    layer(x, training=True)
    assert layer.fused, ADAPT
    count = tf.constant(6.0, tf.float64)
    bias = keras2.Keras2(keras).bias_of_variance(layer, count)
    variance = layer.moving_variance.numpy() * bias
    np.testing.assert_allclose(variance, x.var((0, 1, 2)), rtol=1e-5)


def test_the_terms_of_a_compiled_loss():
    x = keras.Input((3,))
    outputs = [keras.layers.Dense(2, name=name)(x) for name in ("one", "two")]
    model = keras.Model(x, outputs)
    model.compile("sgd", ["mse", "mae"])
    data = (tf.ones([4, 3]), [tf.ones([4, 2])] * 2)
    known(model).build(model, data)
    assert known(model).number_of_terms(model) == 2, ADAPT
    assert known(model).compile_loss_of(model) is model.compiled_loss
    assert known(model).name_of_loss(model) == "'mean_squared_error', 'mean_absolute_error'"
    seen = []

    def replace(loss):
        seen.append(loss.name)
        return lambda y_true, y_pred, sample_weight: tf.constant(3.0)

    with known(model).watching_loss(model, replace, lambda *_: None):
        value = known(model).compute_compiled_loss(model, data[1], model(data[0]), None)
    assert float(value) == 6.0, ADAPT
    assert seen == ["mean_squared_error", "mean_absolute_error"]


def test_what_layers_add_to_the_loss():
    model, (x, _) = model_and_data(
        keras.layers.Dense(3, activity_regularizer="l2", kernel_regularizer="l2")
    )
    model(x)
    assert len(model.losses) == 2
    assert len(known(model).losses_of_layers(model)) == 1, ADAPT


def test_a_loss_where_all_is_masked_is_zero():
    generation = keras2.Keras2(keras)
    loss = keras.losses.MeanSquaredError(reduction="sum_over_batch_size")
    y_pred = tf.ones([2, 1])
    compat.set_mask(y_pred, tf.constant([False, False]))
    with tf.GradientTape() as tape:
        tape.watch(y_pred)
        value = generation.value_of(loss, tf.zeros([2, 1]), y_pred, tf.zeros([2]), tf.zeros([]))
    assert float(value) == 0, ADAPT
    np.testing.assert_array_equal(tape.gradient(value, y_pred), [[0], [0]])


def test_the_result_of_a_metric_on_a_replica():
    metric = keras.metrics.Mean()
    metric.update_state(3.0)
    assert "result" in vars(metric), ADAPT
    assert float(type(metric).result(metric)) == 3, ADAPT


def test_the_state_of_a_loss_scale():
    optimizer = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD())
    variables = keras2.Keras2(keras).optimizer_variables(optimizer)
    assert float(optimizer.loss_scale) in [float(variable) for variable in variables], ADAPT


@pytest.mark.parametrize("mode", MODES)
def test_fit_equals_the_full_batch(mode):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 5, (50, 6))
    x[20:30] = 0  # micro-batches of which everything is masked
    y, weights = rng.normal(size=(50, 6, 2)), rng.random((50, 6))

    def make():
        keras.utils.set_random_seed(3)  # that of this Keras
        layers = [keras.layers.Embedding(5, 4, mask_zero=True), keras.layers.Dense(2)]
        return keras.Sequential([keras.Input((6,), dtype="int32"), *layers])

    case = Case(
        make,
        x,
        y,
        optimizer=lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
        compile={"metrics": ["mae"]},
        # Keras 2 says NaN of a batch where all is masked.
        fit={
            "sample_weight": weights,
            "validation_data": (x, y),
            "validation_batch_size": 50,
        },
    )
    check_same(case.accumulate(mode), case.train(), TOLERANCE["float32"])
