"""Shapes in the graph of a micro-batch that follow from its count of samples alone.

An operation that asks for the shape of an activation would need the activation, in a stage far
away from the one that makes it. Most shapes are a·n + b in each dimension, n the count of
samples. TensorFlow's own shape inference with three counts shows a and b.
"""

from __future__ import annotations

from typing import Any, List, Tuple

import tensorflow as tf

_COUNTS = (7, 11, 13)
KnownShape = List[Tuple[int, int]]
"""For each dimension a and b."""


def known_shapes(graph: Any, samples: list[Any]) -> dict[str, list[KnownShape]]:
    """Return what operations return that ask for shapes, by their names, where it is known.

    Args:
        graph: a graph.
        samples: the inputs of the graph whose first dimension is the count of samples.
    """
    operations = graph.get_operations()
    asking = [op for op in operations if op.type in ("Shape", "ShapeN")]
    if not asking:
        return {}
    # What an imported variable holds has no shape.
    reads = [op.outputs[0] for op in operations if op.type == "ReadVariableOp"]
    definition = graph.as_graph_def()
    found = []
    for count in _COUNTS:
        with tf.Graph().as_default() as copy:
            given = {tensor.name: _placeholder(tensor, tensor.shape) for tensor in reads}
            given.update((t.name, _placeholder(t, [count, *t.shape[1:]])) for t in samples)
            try:
                tf.graph_util.import_graph_def(definition, input_map=given, name="")
            except ValueError:  # it cannot have so many samples, but may have others
                return {}
            found.append([_shapes(copy.get_operation_by_name(op.name)) for op in asking])
    known = {}
    for op, *shapes in zip(asking, *found):
        laws = [affine(*three) for three in zip(*shapes)]
        if None not in laws:
            known[op.name] = laws
    return known


def affine(*shapes: Any) -> KnownShape | None:
    """Return a and b of each dimension, given a shape with each count of samples.

    `None` if a shape is not known or not of that form.
    """
    if not all(shape.is_fully_defined() for shape in shapes):
        return None
    law = []
    for sizes in zip(*shapes):
        slope = (sizes[1] - sizes[0]) // (_COUNTS[1] - _COUNTS[0])
        law.append((slope, sizes[0] - slope * _COUNTS[0]))
    is_law = all(
        list(shape) == [a * count + b for a, b in law] for shape, count in zip(shapes, _COUNTS)
    )
    return law if is_law else None


def shape_at(law: KnownShape, count: Any, dtype: Any) -> Any:
    """Return the shape that a law says for a count of samples, a tensor."""
    if not law:
        return tf.zeros([0], dtype)
    count = tf.cast(count, dtype)
    return tf.stack([a * count + b if a else tf.constant(b, dtype) for a, b in law])


def _placeholder(tensor: Any, shape: Any) -> Any:
    return tf.compat.v1.placeholder(tensor.dtype, shape)


def _shapes(op: Any) -> list[Any]:
    return [tensor.shape for tensor in op.inputs]
