"""Random draws of the full batch, row by row, in each micro-batch.

TensorFlow's stateless draws are a sequence of blocks, numbered by a counter (Philox). The rows
[s, s + n) of a draw of r numbers per row are the numbers [s·r, (s + n)·r) of that sequence. So
the draw of a micro-batch begins s·r numbers later, and equals, bit by bit, its rows of the draw
of the full batch. This holds for uniform, normal and integer draws of every type; under XLA
normal ones are made of uniform ones (`xla_normals.py`). Truncated normal, gamma, binomial,
Poisson and categorical draws take a varying count of numbers: there every micro-batch draws its
own. Decision 0017 has the experiment.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from typing import Any, Callable, Iterable, Iterator

import tensorflow as tf

from bigbatch.backends.tensorflow.compat import (
    DRAWS_BY_ROW,
    NORMAL,
    PHILOX,
    UNIFORM,
    drawing_operation,
    inlined_functions,
    replaced_draws,
)
from bigbatch.backends.tensorflow.dependence import Dependence
from bigbatch.backends.tensorflow.xla_normals import normal_rows

_BITS_PER_BLOCK = 128
_BITS_PER_NUMBER = 32  # at least: a number of a narrower type takes as many
FIRST, ELSEWHERE = "first", "elsewhere"
_local = threading.local()  # replicas are traced in threads


class MicrobatchRows:
    """Where a micro-batch stands in its batch.

    Args:
        start: the samples of the batch before this micro-batch.
        samples: the samples of this micro-batch.
        dependence: what depends on the samples, if the micro-batch is traced into a graph.
        places: for each draw in turn, where the samples are in its shape: what a trace has
            told, for a micro-batch that runs eagerly.
        total: the samples of the batch, if they can be known before it runs.
        in_blocks: whether a draw of several rows for each sample has blocks: the rows of real
            and fake samples that are concatenated are two. Else those of a sample follow each
            other.
        is_compiled: whether XLA compiles the micro-batch.
    """

    def __init__(
        self,
        start: Any,
        samples: Any,
        dependence: Dependence | None = None,
        places: Iterable[str | None] = (),
        total: Any = None,
        *,
        in_blocks: bool = False,
        is_compiled: bool = False,
    ) -> None:
        self.start = tf.cast(start, tf.int64)
        self._total = None if total is None else tf.cast(total, tf.int64)
        self._in_blocks, self._is_compiled = in_blocks, is_compiled
        self.needs_total = False
        """Whether a draw depends on the samples of the batch."""
        self._samples = samples
        self.dependence = dependence
        places = list(places)
        self._told = iter(places)
        self.is_told = any(places)
        """Whether a trace has told of draws that follow the samples."""
        self.places: list[str | None] = []
        """For each draw in turn, where the samples are in its shape."""
        self.is_flat = True
        """Whether no draw stands in a branch, where it may not happen."""

    def rows_before(self, count: Any) -> Any:
        """Return the rows before those of a tensor that has `count` rows for these samples."""
        return self.start * (tf.cast(count, tf.int64) // self._any_samples())

    def place_of(self, shape: Any) -> str | None:
        """Say where the samples are in the shape of the next draw.

        `FIRST`, `ELSEWHERE` (in another dimension), or `None`: the draw is the same for all.
        """
        # Nothing is told of what follows the last update of a pass, and is not used.
        place = next(self._told, FIRST if self.is_told else None)
        if self.dependence is not None:
            inside = self.dependence.inside_now()
            self.is_flat = self.is_flat and inside is self.dependence
            if inside is None:
                return None
            is_first = inside.first_dimension(shape)
            place = FIRST if is_first else ELSEWHERE if inside.of(shape) else None
        self.places.append(place)
        return place

    def draw(self, draw: Callable[..., Any], shape: Any, counter: Any, dtype: Any) -> Any:
        """Return this micro-batch's rows of what `draw(shape, counter)` is for the batch."""
        shape = tf.convert_to_tensor(shape)
        count = tf.reduce_prod(tf.cast(shape, tf.int64))
        if self._in_blocks:
            self.needs_total = True
            return self._blocks(draw, shape, counter, dtype)
        first = self.rows_before(count)
        per_block = _numbers_per_block(dtype)
        inner = tf.get_static_value(tf.reduce_prod(shape[1:]))
        if inner is not None and inner % per_block == 0:  # every row begins with a block
            return draw(shape, _advanced(counter, first // per_block))
        return tf.reshape(_numbers(draw, counter, first, count, dtype), shape)

    def draws_pairs(self, operation: str, shape: Any) -> bool:
        """Say whether a draw pairs numbers in an order that depends on its whole shape."""
        if operation != NORMAL or not self._is_compiled or self._total is None:
            return False
        return _inner(shape).is_fully_defined() and not self._in_blocks

    def draw_pairs(self, draw: Callable[..., Any], shape: Any, counter: Any, dtype: Any) -> Any:
        """Return this micro-batch's rows of a normal draw, of uniform draws of XLA."""
        self.needs_total = True
        shape = tf.convert_to_tensor(shape)
        rows = tf.cast(shape[0], tf.int64)

        def uniform(first: Any, count: Any) -> Any:
            return _numbers(draw, counter, first, count, dtype)

        total = self._total * (rows // self._any_samples())
        inner: Any = _inner(shape).as_list()
        return normal_rows(uniform, shape, inner, self.rows_before(rows), total, dtype)

    def _any_samples(self) -> Any:
        return tf.maximum(tf.cast(self._samples, tf.int64), 1)

    def _blocks(self, draw: Callable[..., Any], shape: Any, counter: Any, dtype: Any) -> Any:
        """Return a draw in which each sample has a row in every block."""
        inner, samples = tf.reduce_prod(tf.cast(shape[1:], tf.int64)), self._any_samples()
        count = samples * inner

        def block(number: Any) -> Any:
            first = (number * self._total + self.start) * inner
            return _numbers(draw, counter, first, count, dtype)

        blocks = tf.range(tf.cast(shape[0], tf.int64) // samples)
        spec = tf.TensorSpec([None], draw(tf.zeros([1], tf.int32), counter).dtype)
        return tf.reshape(tf.map_fn(block, blocks, fn_output_signature=spec), shape)


def running() -> MicrobatchRows | None:
    """Return where the micro-batch stands that this thread runs or traces, if it does."""
    return getattr(_local, "rows", None)


@contextlib.contextmanager
def drawing(rows: MicrobatchRows) -> Iterator[None]:
    """Return a block in which draws that follow the samples are rows of the full batch's."""
    before = running()
    _local.rows = rows
    try:
        with replaced_draws(_draw), _without_other_graphs(rows):
            yield
    finally:
        _local.rows = before


def _without_other_graphs(rows: MicrobatchRows) -> contextlib.AbstractContextManager[None]:
    """Return a block in which draws inside a `tf.function` are seen like others.

    A graph of its own would keep the rows of the micro-batch that it was traced for.
    """
    needs_all = rows.dependence is not None or rows.is_told
    return inlined_functions() if needs_all else contextlib.nullcontext()


def _draw(operation: str, *args: Any, **options: Any) -> Any:
    """Do what a drawing operation of TensorFlow does, in this thread for a micro-batch."""
    draw = drawing_operation(operation)
    rows = running()
    if rows is None:
        return draw(*args, **options)
    given = inspect.signature(draw).bind(*args, **options).arguments
    # A categorical draw has one row for each row of its logits.
    shape = given["shape"] if "shape" in given else tf.shape(given["logits"])
    place = rows.place_of(tf.convert_to_tensor(shape))
    if place is None:
        return draw(**given)
    is_philox = "alg" in given and tf.get_static_value(given["alg"]) in PHILOX
    if place is FIRST and operation in DRAWS_BY_ROW and is_philox:
        dtype = given["minval"].dtype if "minval" in given else given.get("dtype", tf.float32)

        if rows.draws_pairs(operation, shape):
            uniform = drawing_operation(UNIFORM)

            def draw_uniform(shape: Any, counter: Any) -> Any:
                return uniform(**{**given, "shape": shape, "counter": counter})

            return rows.draw_pairs(draw_uniform, shape, given["counter"], dtype)

        def draw_from(shape: Any, counter: Any) -> Any:
            return draw(**{**given, "shape": shape, "counter": counter})

        return rows.draw(draw_from, shape, given["counter"], dtype)
    # Other numbers than the full batch's, but not the same in every micro-batch.
    word = "counter" if "counter" in given else "seed"
    first, *others = tf.unstack(given[word])
    given[word] = tf.stack([first, *(one + tf.cast(rows.start, one.dtype) for one in others)])
    return draw(**given)


def _numbers(draw: Callable[..., Any], counter: Any, first: Any, count: Any, dtype: Any) -> Any:
    """Return `count` numbers of a draw, from number `first` on."""
    per_block = _numbers_per_block(dtype)
    counter = _advanced(counter, first // per_block)
    flat = draw(tf.reshape(count + per_block - 1, [1]), counter)
    return tf.slice(flat, [first % per_block], [count])


def _inner(shape: Any) -> tf.TensorShape:
    """Return what is known of the dimensions of a draw, but for the first."""
    return tf.zeros(shape, tf.bool).shape[1:]


def _numbers_per_block(dtype: Any) -> int:
    return _BITS_PER_BLOCK // max(8 * tf.as_dtype(dtype).size, _BITS_PER_NUMBER)


def _advanced(counter: Any, blocks: Any) -> Any:
    """Return a counter of 128 bits, low word first, advanced by a number of blocks."""
    low = counter[0] + tf.cast(blocks, counter.dtype)
    return tf.stack([low, counter[1] + tf.cast(low < counter[0], counter.dtype)])
