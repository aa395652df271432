"""Marks in the graph of a micro-batch: sums over all micro-batches of the batch.

A mark is an identity, and the gradient of a mark is a mark. So the graph of one micro-batch
computes, as it stands, a batch of one micro-batch; cut into stages at the marks, a batch of any
number of them.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Iterator

import tensorflow as tf

from bigbatch.backends.tensorflow.compat import is_branch
from bigbatch.backends.tensorflow.draws import running
from bigbatch.backends.tensorflow.values import WEIGHT_DTYPE
from bigbatch.errors import ContextError, explain

_local = threading.local()  # replicas are traced in threads


class Markers:
    """The marks in one graph, by the names of operations.

    Args:
        replicas: on how many replicas a batch is.
    """

    def __init__(self, replicas: int = 1) -> None:
        self.graph: Any = None
        self.sums: dict[str, str | None] = {}
        """The sums, and for the gradient of a sum, that sum."""
        self.seeds: set[str] = set()
        """Where the backward pass begins."""
        self.rows: dict[str, str] = {}
        """For sums that are rows of all micro-batches, the tensor that says how many rows."""
        self.replicas = replicas

    def sum(self, tensor: Any, gradient_of: str | None = None, rows: Any = None) -> Any:
        """Return the sum of a tensor over all micro-batches.

        Args:
            tensor: the tensor, of the same shape in every micro-batch.
            gradient_of: the sum whose gradient it is.
            rows: how many rows it has, if a replica without samples could not know.
        """
        graph = tf.compat.v1.get_default_graph()
        if graph is not self.graph and not is_branch(graph):
            return tensor  # after the last update of a pass, what follows is discarded
        if graph is not self.graph:
            raise ContextError(
                explain(
                    received="BatchNormalization, or cross_microbatch_sum, inside a tf.cond, "
                    "tf.while_loop, tf.map_fn or the cell of an RNN",
                    expected="sums over the whole batch that every micro-batch needs once, "
                    "whatever its samples are",
                    fix='call the layer outside, or use batch_norm="pooled"',
                )
            )

        @tf.custom_gradient
        def marked(tensor: Any) -> Any:
            result = tf.identity(tensor, name="cross_microbatch_sum")
            name = result.op.name
            self.sums[name] = gradient_of
            if rows is not None:
                self.rows[name] = rows.name
            return result, lambda gradient: self.sum(gradient, name, rows)

        return marked(tensor)


@contextlib.contextmanager
def marking(markers: Markers | None) -> Iterator[None]:
    """Return a block in which a micro-batch is traced, and its sums are marked."""
    before = markers_now()
    _local.markers = markers
    if markers is not None:
        markers.graph = tf.compat.v1.get_default_graph()
    try:
        yield
    finally:
        _local.markers = before


def markers_now() -> Markers | None:
    """Return the marks of the graph that this thread traces, if it does."""
    return getattr(_local, "markers", None)


def cross_microbatch_sum(tensor: Any) -> Any:
    """Return the sum of a tensor over the micro-batches of a batch, and over replicas."""
    tensor, markers = tf.convert_to_tensor(tensor), markers_now()
    if markers is not None:
        return markers.sum(tensor)
    if running() is not None:
        raise ContextError(
            explain(
                received="cross_microbatch_sum or cross_microbatch_gather in a model whose "
                "micro-batches run one after the other",
                expected="micro-batches that run in stages, with sums between them",
                fix='bigbatch.accumulate(model, ..., batch_norm="exact"), also if the model '
                "has no BatchNormalization",
            )
        )
    return tensor


def cross_microbatch_gather(tensor: Any) -> Any:
    """Return the rows of all micro-batches, in the order of the batch."""
    tensor, markers = tf.convert_to_tensor(tensor), markers_now()
    if markers is None:
        return cross_microbatch_sum(tensor)
    if markers.replicas > 1 and None in tensor.shape[1:]:
        raise ContextError(
            explain(
                received=f"cross_microbatch_gather of a tensor of the shape {tensor.shape} on "
                f"{markers.replicas} replicas",
                expected="a shape that is known except for the number of samples: a "
                "replica without samples has to know it, too",
                fix="give the data a full shape, by tf.ensure_shape in map() of the data set, "
                "or train on one device",
            )
        )
    rows, count = running(), tf.shape(tensor)[0]
    assert rows is not None
    place = 0
    if markers.replicas > 1:
        place = tf.distribute.get_replica_context().replica_id_in_sync_group
    is_here = tf.one_hot(place, markers.replicas, dtype=WEIGHT_DTYPE)
    counts = markers.sum(is_here * tf.cast(count, WEIGHT_DTYPE))
    counts = tf.cast(tf.round(counts), tf.int32)
    total, before = tf.reduce_sum(counts), tf.reduce_sum(counts[:place])
    # As a rule one row for each sample.
    first = before + tf.cast(rows.rows_before(count), tf.int32)
    around = [[first, total - first - count]] + [[0, 0]] * (len(tensor.shape) - 1)
    is_float = tensor.dtype.is_floating
    wide = tensor if is_float else tf.cast(tensor, tf.int64)
    return tf.cast(markers.sum(tf.pad(wide, around), rows=total), tensor.dtype)
