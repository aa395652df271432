"""Keras 2: `tf_keras`, and `tf.keras` of TensorFlow 2.10 to 2.15."""
