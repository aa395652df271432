"""Losses in which the samples of a batch meet each other."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def _cross_entropy(labels: Any, logits: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def clip(one: Any, two: Any, temperature: Any = 1.0) -> Any:
    """CLIP's symmetric loss: each row of `one` belongs to that row of `two`."""
    one, two = tf.math.l2_normalize(one, -1), tf.math.l2_normalize(two, -1)
    logits = tf.matmul(one, two, transpose_b=True) * tf.exp(temperature)
    labels = tf.range(tf.shape(logits)[0])
    both = _cross_entropy(labels, logits) + _cross_entropy(labels, tf.transpose(logits))
    return tf.reduce_mean(both) / 2


def sim_clr(y_true: Any, y_pred: Any) -> Any:
    """InfoNCE between two views, the halves of each row."""
    del y_true
    one, two = tf.split(tf.math.l2_normalize(y_pred, -1), 2, axis=-1)
    views = tf.concat([one, two], 0)
    count = tf.shape(one)[0]
    logits = 5 * tf.matmul(views, views, transpose_b=True)
    logits -= 1e9 * tf.eye(2 * count, dtype=logits.dtype)
    labels = tf.concat([tf.range(count) + count, tf.range(count)], 0)
    return _cross_entropy(labels, logits)


def triplet(y_true: Any, y_pred: Any) -> Any:
    """In-batch triplets: the farthest of the same class against the nearest of another."""
    labels = tf.reshape(tf.cast(y_true, tf.int32), [-1])
    distance = tf.reduce_sum(tf.square(y_pred[:, None] - y_pred[None]), -1)
    same = labels[:, None] == labels[None]
    far = tf.reduce_max(tf.where(same, distance, 0), -1)
    near = tf.reduce_min(tf.where(same, tf.cast(1e9, distance.dtype), distance), -1)
    return tf.nn.softplus(far - near)


def correlation(y_true: Any, y_pred: Any) -> Any:
    """One minus the correlation, over the batch, of what is predicted with what is."""
    y_true = tf.reshape(tf.cast(y_true, y_pred.dtype), [-1])
    y_pred = tf.reduce_sum(y_pred, -1)
    x, y = y_pred - tf.reduce_mean(y_pred), y_true - tf.reduce_mean(y_true)
    return 1 - tf.reduce_sum(x * y) / tf.sqrt(tf.reduce_sum(x * x) * tf.reduce_sum(y * y))


def dice(y_true: Any, y_pred: Any) -> Any:
    """One minus the overlap of two sets, over the batch."""
    y_true = tf.reshape(tf.cast(y_true, y_pred.dtype), [-1]) / 3
    y_pred = tf.sigmoid(tf.reduce_sum(y_pred, -1))
    return 1 - 2 * tf.reduce_sum(y_true * y_pred) / tf.reduce_sum(y_true + y_pred)


LOSSES = {one.__name__: one for one in (sim_clr, triplet, correlation, dice)}
