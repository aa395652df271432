"""Every private name of Keras 3 in use: an upgrade breaks here first; see test_compat_tf.py."""

from __future__ import annotations

import ast
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator

import bigbatch
from bigbatch.backends import keras as keras_compat
from bigbatch.backends import keras3
from bigbatch.backends.tensorflow import compat
from bigbatch.backends.tensorflow.keras3 import Keras3OnTensorFlow
from bigbatch.backends.tensorflow.optimizers import adapted
from bigbatch.core.versions import version_of

SOURCE = Path(bigbatch.__file__).parent
KERAS = Keras3OnTensorFlow(keras)
COMPAT = {
    "keras.py",
    "keras3.py",
    "compat.py",
    "keras2_optimizers.py",
    "v1_optimizers.py",
}
"""Files that may use private names; two more tests pin theirs."""


def test_a_keras_optimizer_lists_its_variables():
    w = tf.Variable(1.0)
    for optimizer in (
        keras.optimizers.SGD(),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    ):
        adapted(optimizer, [w])
        assert optimizer.built
        assert compat.variables_of(optimizer) == [w]


def test_the_trainer_of_keras():
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2, activity_regularizer="l2")]
    )
    model.compile("sgd", "mse", metrics=["mae"])
    data = (tf.zeros([4, 3]), tf.zeros([4, 2]))
    assert model._distribute_strategy is None
    assert model._call_has_training_arg
    KERAS.build(model, data)
    assert model.optimizer.built
    assert model._compile_metrics.built
    assert [type(layer).__name__ for layer in keras_compat.layers_of(model)] == [
        "InputLayer",
        "Dense",
    ]
    assert callable(model._maybe_symbolic_build)
    assert callable(model._aggregate_additional_loss)
    assert isinstance(model._loss_tracker, keras.metrics.Mean)
    assert KERAS.call(model, data[0], training=False).shape == (4, 2)


def test_the_loss_of_a_model():
    layer = keras.layers.Dense(2, activity_regularizer="l2", kernel_regularizer="l2")
    model = keras.Sequential([keras.Input((3,)), layer], name="m")
    model.compile("sgd", "mse")
    data = (tf.ones([4, 3]), tf.ones([4, 2]))
    KERAS.build(model, data)
    outputs = model(data[0])
    assert len(model.losses) == 2
    (activity,) = KERAS.losses_of_layers(model)
    # From Keras 3.14 on it is divided by the samples; `LossTrial` finds which it is.
    samples = 4 if version_of(keras.__version__) >= (3, 14) else 1
    np.testing.assert_allclose(activity * samples, 0.01 * tf.reduce_sum(outputs**2), rtol=1e-6)
    loss = KERAS.compute_loss(model, *data, outputs, None)
    mean = tf.reduce_mean((outputs - 1) ** 2)
    np.testing.assert_allclose(loss, mean + sum(model.losses), rtol=1e-6)
    assert KERAS.name_of_loss(model) == "'mse'"
    assert not KERAS.has_custom_train_step(model)
    assert not KERAS.uses_inputs_after_call(model)


def test_added_losses_are_changed():
    layer = keras.layers.Dense(2, activity_regularizer="l2", kernel_regularizer="l2")
    model = keras.Sequential([keras.Input((3,)), layer])
    x, seen = tf.ones([4, 3]), []

    def change(by, position, loss):
        seen.append((by, position))
        return 3 * loss

    model(x)
    (before,) = KERAS.losses_of_layers(model)
    with KERAS.changing_added_losses(model, change):
        model(x)
        (changed,) = KERAS.losses_of_layers(model)
    np.testing.assert_allclose(changed, 3 * before, rtol=1e-6)
    assert seen == [(layer, 0)]
    assert "add_loss" not in vars(layer)
    np.testing.assert_allclose(KERAS.regularisers_of(model), model.losses[1:])


def test_the_metrics_of_a_model():
    def rmse(y_true, y_pred):
        return tf.sqrt(tf.reduce_mean((y_true - y_pred) ** 2))

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", metrics=[rmse, keras.metrics.AUC()], weighted_metrics=["mae"])
    x, y = tf.ones([4, 3]), tf.ones([4, 2])
    KERAS.build(model, (x, y))
    of_function, auc, weighted = KERAS.compiled_metrics(model)
    assert KERAS.function_of(auc) is None
    np.testing.assert_allclose(KERAS.function_of(of_function)(y, 3 * y), 2)
    KERAS.update_mean(of_function, 5.0)
    assert float(of_function.result()) == 5
    KERAS.update_compiled_metrics(model, y, y, None)
    assert float(weighted.result()) == 0


def test_the_batches_of_an_epoch():
    x = np.zeros((10, 3), "float32")
    for data, size in ((x, 4), (tf.data.Dataset.from_tensor_slices(x).batch(4, True), None)):
        iterator = TFEpochIterator(tf.distribute.get_strategy(), x=data, batch_size=size)
        batches, of, rest = KERAS.batches_of(iterator)
        assert (batches, of, rest) == ((3, 4, 2) if size else (2, 4, None))


def test_the_state_of_a_model():
    layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, name="drop")]
    frozen = keras.layers.Dense(2)
    frozen.trainable = False
    model = keras.Sequential([keras.Input((3,)), *layers, frozen])
    model.compile("sgd", "mse")
    assert callable(getattr(model, keras3.END_OF_EPOCH))
    shapes = sorted(tuple(variable.shape) for variable in KERAS.state_of(model))
    # The loss (total, count), the random state, the moving mean and variance: no frozen weight.
    assert shapes == [(), (), (2,), (3,), (3,)]
    assert KERAS.layers_with_other_draws(model, is_split=True) == []


def test_the_terms_of_a_compiled_loss():
    x = keras.Input((3,))
    outputs = [keras.layers.Dense(2, name=name)(x) for name in ("one", "two")]
    model = keras.Model(x, outputs)
    model.compile("sgd", ["mse", "mae"])
    data = (tf.ones([4, 3]), [tf.ones([4, 2])] * 2)
    KERAS.build(model, data)
    replaced, recorded = [], []

    def replace(loss):
        replaced.append(loss.name)
        return lambda y_true, y_pred, sample_weight: tf.constant(3.0)

    def record(metric, value):
        recorded.append((metric.name, float(value)))

    with KERAS.watching_loss(model, replace, record):
        value = KERAS.compute_compiled_loss(model, data[1], model(data[0]), None)
    assert float(value) == 6.0
    assert replaced == ["mse", "mae"]
    assert recorded == [("one_loss", 3.0), ("two_loss", 3.0)]


def test_masks_are_attributes_of_tensors():
    embedded = keras.layers.Embedding(4, 2, mask_zero=True)(tf.constant([[1, 0]]))
    assert keras_compat.mask_of(embedded).numpy().tolist() == [[True, False]]
    other = tf.ones([1, 2, 2])
    keras_compat.set_mask(other, keras_compat.mask_of(embedded))
    layer = keras.layers.GlobalAveragePooling1D()
    np.testing.assert_array_equal(layer(other), layer(other[:, :1]))
    assert keras_compat.mask_of(tf.zeros([1])) is None


def test_the_moments_of_batch_normalisation():
    layer = keras.layers.BatchNormalization(momentum=0.0, epsilon=0.0)
    layer.build((None, 2))
    assert layer._reduction_axes == [0]
    vars(layer)["_moments"] = lambda inputs, mask: (inputs[0] * 0 + 1.0, inputs[0] * 0 + 4.0)
    outputs = layer(np.ones((3, 2), "float32") * 5, training=True)
    np.testing.assert_allclose(outputs, 2 * np.ones((3, 2)))
    np.testing.assert_allclose(layer.moving_variance, [4.0, 4.0])


def test_private_names_are_used_nowhere_else():
    # `_x` of an object that is not `self` or `cls` is somebody else's.
    found = []
    for path in SOURCE.rglob("*.py"):
        if path.name in COMPAT or path.parent.name == "keras2":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
                continue
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            is_public = node.attr.endswith("__") or node.attr == "_replace"  # of named tuples
            if owner not in ("self", "cls") and not is_public:
                found.append(f"{path.name}:{node.lineno} {node.attr}")
    assert found == []
