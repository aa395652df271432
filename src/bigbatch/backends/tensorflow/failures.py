"""Explain errors of TensorFlow about the number of samples."""

from __future__ import annotations

import re
from pathlib import Path

import tensorflow as tf

from bigbatch.backends.tensorflow.batch import cannot_be_cut
from bigbatch.errors import ArgumentError, BigbatchError, explain

_OF_SHAPES = re.compile(
    r"((?:Incompatible shapes|Dimensions must be equal|ConcatOp|Dimension 0 in both shapes"
    r"|Arguments `target` and `output`).*)"
)
_OF_A_CONSTANT = re.compile(r"((?:Input to reshape is|Dimension size must be evenly).*)")
_OF_ROWS = re.compile(
    r"(Matrix size-incompatible: In\[0\]: \[(\d+),(\d+)\], In\[1\]: \[(\d+),\d+\])"
)
_FIRST_DIMENSION = re.compile(r"[\[(](\d+),")
_MULTIPLE = re.compile(r"(?:a multiple of|divisible by) (\d+)")
_NODE = re.compile(r"\{\{node (.+?)\}\}|\[Op:(\w+)\]")
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\w+)')
_LIBRARIES = ("site-packages", str(Path(__file__).parents[2]))


def explained(error: BaseException) -> Exception | None:
    """Return an error that says what to do, if `error` is about the number of samples."""
    kinds = (tf.errors.InvalidArgumentError, ValueError, TypeError)
    if not isinstance(error, kinds) or isinstance(error, BigbatchError):
        return None
    message = str(error)
    text = cannot_be_cut(message)
    if text is not None:
        return ArgumentError(text)
    text = _constant_size(message)
    return None if text is None else ArgumentError(text)


def _constant_size(message: str) -> str | None:
    """Return an error text for an operation whose inputs differ in their first dimension.

    Their first dimension is that of samples: one of them is not from the micro-batch.
    """
    found, sizes = _OF_A_CONSTANT.search(message), set()
    shapes, rows = _OF_SHAPES.search(message), _OF_ROWS.search(message)
    if shapes is not None:
        sizes = {int(one) for one in _FIRST_DIMENSION.findall(shapes[1])}
        found = found or (shapes if len(sizes) > 1 else None)
    if rows is not None and int(rows[4]) > int(rows[3]) and not int(rows[4]) % int(rows[3]):
        found, sizes = rows, {int(rows[2])}  # as many numbers, in more and shorter rows
    if found is None:
        return None
    multiple = _MULTIPLE.search(found[1])
    size = int(multiple[1]) if multiple else max(sizes, default=None)
    instead = f"microbatch_size={size}" if size else "the batch size as microbatch_size"
    node = _NODE.search(message[found.start() :])
    name = (node[1] or node[2]) if node else None
    operation = f"the operation {name!r}" if name else "an operation"
    reason = found[1].split(" for '{{")[0].split(" [Op:")[0]
    return explain(
        received=f"{operation}{_place(message)} fails on a micro-batch: {reason}",
        expected="layers, a loss and a train_step that take any number of samples",
        fix="if the number of samples is written as a constant, read it from the data: "
        f"tf.shape(x)[0]; or pass {instead}, with batches that are multiples of it",
    )


def _place(message: str) -> str:
    """Return where the user's code is that has made the operation, if that is known."""
    frames = _FRAME.findall(message)
    own = [one for one in frames if not any(place in one[0] for place in _LIBRARIES)]
    if not own:
        return ""
    path, line, function = own[-1]
    return f" ({Path(path).name}, line {line}, in {function})"
