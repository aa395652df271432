"""The ways to make one update from k micro-batches, in `fit` and in loops.

Every candidate trains on the same arrays: `run(x, y, k)` makes `len(x) / (k · MICROBATCH)`
updates and returns how long that took; or `x` is a data set of batches of `batch_size(k)`.
What there is to trace is traced in the first call.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import keras
import tensorflow as tf

import bigbatch
from benchmarks.work import Work, loss, time_of_epoch

MICROBATCH = 16

FULL_BATCH, LIMIT = "full batch", "limit"
SPLIT, WINDOW = "bigbatch, split", "bigbatch, window"
KERAS = "Keras' own"
LOOP_LIMIT, LOOP_FULL = "limit (loop)", "full batch (loop)"
BATCHES, ACCUMULATOR = "bigbatch, value_and_gradients", "bigbatch, GradientAccumulator"
IN_GRAPH = "bigbatch, GradientAccumulator, updates in the graph"
BY_HAND = "loop by hand"


class InFit:
    """Trains with `model.fit`, in batches of the size that an update has."""

    def __init__(self, work: Work, jit_compile: bool, **options: Any) -> None:
        self.model = self._model(work)
        self._jit_compile = jit_compile
        self._options = options
        self._k = 0

    def _model(self, work: Work) -> Any:
        return work.make_model()

    def _prepare(self, k: int) -> None:
        del k
        if not self._k:
            self.model.compile(_optimizer(), loss(), jit_compile=self._jit_compile)

    def batch_size(self, k: int) -> int:
        """Return the size of the batches that are trained on."""
        return MICROBATCH * k

    def kept(self) -> list[Any]:
        """Return the sums that are kept from one update to the next."""
        return []

    def run(self, x: Any, y: Any, k: int) -> float:
        """Train for one epoch."""
        if k != self._k:
            self._prepare(k)
            self._k = k
        size = {} if y is None else {"batch_size": self.batch_size(k)}
        return time_of_epoch(self.model, x, y, **size, **self._options)


class Split(InFit):
    """Trains with batches that are cut into micro-batches."""

    setting: Any = MICROBATCH
    coupled = False

    def __init__(
        self, work: Work, jit_compile: bool, *, sparse_gradients: Any = "rows", **options: Any
    ) -> None:
        self._sparse_gradients = sparse_gradients
        super().__init__(work, jit_compile, **options)

    def _model(self, work: Work) -> Any:
        return bigbatch.accumulate(
            work.make_model(),
            microbatch_size=self.setting,
            coupled=self.coupled,
            sparse_gradients=self._sparse_gradients,
        )


class Window(InFit):
    """Trains with windows of k batches; replicas share the batches of a window."""

    def __init__(
        self, work: Work, jit_compile: bool, *, sparse_gradients: Any = "rows"
    ) -> None:
        super().__init__(work, jit_compile)
        self._sparse_gradients = sparse_gradients
        self._replicas = tf.distribute.get_strategy().num_replicas_in_sync

    def _prepare(self, k: int) -> None:
        super()._prepare(k)
        bigbatch.accumulate(
            self.model,
            accumulation_steps=k // self._replicas,
            sparse_gradients=self._sparse_gradients,
        )

    def batch_size(self, k: int) -> int:
        """Return the size of the batches that are trained on."""
        del k
        return MICROBATCH * self._replicas


class KerasOwn(Window):
    """Trains with the optimizer's `gradient_accumulation_steps`."""

    def _prepare(self, k: int) -> None:
        steps = k if k > 1 else None  # Keras does not take 1
        optimizer = _optimizer(gradient_accumulation_steps=steps)
        self.model.compile(optimizer, loss(), jit_compile=self._jit_compile)

    def kept(self) -> list[Any]:
        """Return the sums that are kept from one update to the next."""
        return [v for v in self.model.optimizer.variables if "accumulator" in v.name]


class Limit(InFit):
    """Runs the passes of a batch without adding them up: nothing can be faster.

    The passes are compiled, if anything is; the loop over them is not, which would be slow.
    """

    def _model(self, work: Work) -> Any:
        inner = work.make_model()

        class WithoutSum(keras.Model):
            def call(self, x: Any, training: Any = None) -> Any:
                return inner(x, training=training)

            def train_step(self, data: Any) -> dict[str, Any]:
                loss_fn = lambda x, y: self.compute_loss(x, y, self(x, training=True))  # noqa: E731
                value, gradients = passes(loss_fn, inner, data, self.compiles_passes)
                self.optimizer.apply(gradients, inner.trainable_variables)
                return {"loss": value}

        model = WithoutSum()
        model.built = True
        return model

    def _prepare(self, k: int) -> None:
        if not self._k:
            self.model.compiles_passes, self._jit_compile = self._jit_compile, False
        super()._prepare(k)


def passes(loss_fn: Any, model: Any, data: Any, jit_compile: bool) -> tuple[Any, Any]:
    """Return loss and gradients of the last micro-batch, after a pass over all of them."""
    variables = model.trainable_variables

    @tf.function(jit_compile=jit_compile, autograph=False)
    def one(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss_fn(x, y)
        return value, tape.gradient(value, variables)

    def part(index: Any) -> Any:
        rows = [leaf[index * MICROBATCH :][:MICROBATCH] for leaf in data]
        for row, leaf in zip(rows, data):
            row.set_shape([MICROBATCH, *leaf.shape[1:]])
        return one(*rows)

    first = part(0)  # which says what a pass returns: tensors, and rows of sparse gradients
    flat = functools.partial(tf.nest.flatten, expand_composites=True)
    # There is memory for one pass at a time: the second must not run beside the first.
    with tf.control_dependencies(flat(first)):
        second = tf.identity(1)
    *_, last = tf.while_loop(
        lambda index, _: index < tf.shape(data[0])[0] // MICROBATCH,
        lambda index, _: (index + 1, flat(part(index))),
        (second, flat(first)),
        parallel_iterations=1,
    )
    return tf.nest.pack_sequence_as(first, last, expand_composites=True)


class InLoop:
    """Trains with a loop over batches, one call of a `tf.function` for each."""

    microbatches = False

    def __init__(self, work: Work, jit_compile: bool) -> None:
        self.model = work.make_model()
        self.optimizer = _optimizer()
        self.optimizer.build(self.model.trainable_variables)
        self._jit_compile = jit_compile
        self._loss = loss()
        self.loss_fn = tf.function(
            lambda x, y: self._loss(y, self.model(x, training=True)),
            jit_compile=jit_compile,
            autograph=False,
        )
        self._k = 0
        self._step: Any = None

    def batch_size(self, k: int) -> int:
        """Return the size of the batches that are trained on."""
        return MICROBATCH if self.microbatches else MICROBATCH * k

    def kept(self) -> list[Any]:
        """Return the sums that are kept from one update to the next."""
        return []

    def run(self, x: Any, y: Any, k: int) -> float:
        """Train for one epoch."""
        if k != self._k:
            self._k, self._step = k, self.make_step(k)
        data = x
        if y is not None:
            data = tf.data.Dataset.from_tensor_slices((x, y))
            data = data.batch(self.batch_size(k), drop_remainder=True).prefetch(2)
        start = time.perf_counter()
        iterator = iter(data)  # kept until the clock is stopped: it may take long to go away
        for index, batch in enumerate(iterator):
            self._step(index, *batch)
        self.optimizer.iterations.numpy()
        return time.perf_counter() - start

    def make_step(self, k: int) -> Any:
        """Return what is called with the index of a batch and the batch."""
        raise NotImplementedError

    def gradients(self, x: Any, y: Any) -> list[Any]:
        """Return gradients of one pass."""
        with tf.GradientTape() as tape:
            value = self.loss_fn(x, y)
        return tape.gradient(value, self.model.trainable_variables)

    def apply(self, gradients: Any) -> None:
        """Make one update."""
        self.optimizer.apply(gradients, self.model.trainable_variables)


class LoopFull(InLoop):
    """One pass over the whole batch."""

    def make_step(self, k: int) -> Any:
        """Return the step."""
        del k
        step = tf.function(lambda x, y: self.apply(self.gradients(x, y)), autograph=False)
        return lambda _, x, y: step(x, y)


class LoopLimit(InLoop):
    """As `Limit`, in a loop."""

    def make_step(self, k: int) -> Any:
        """Return the step."""
        del k

        @tf.function(autograph=False)
        def step(x: Any, y: Any) -> None:
            loss_fn = lambda x, y: self._loss(y, self.model(x, training=True))  # noqa: E731
            self.apply(passes(loss_fn, self.model, (x, y), self._jit_compile)[1])

        return lambda _, x, y: step(x, y)


class Batches(InLoop):
    """`bigbatch.value_and_gradients` of whole batches."""

    def make_step(self, k: int) -> Any:
        """Return the step."""
        del k

        @tf.function(autograph=False)
        def step(x: Any, y: Any) -> None:
            variables = self.model.trainable_variables
            _, gradients = bigbatch.value_and_gradients(
                self.loss_fn, variables, (x, y), microbatch_size=MICROBATCH
            )
            self.apply(gradients)

        return lambda _, x, y: step(x, y)


class Accumulator(InLoop):
    """`bigbatch.GradientAccumulator`: a `tf.function` per micro-batch, updates outside it."""

    microbatches = True
    in_graph = False

    def make_step(self, k: int) -> Any:
        """Return the step."""
        accumulator = bigbatch.GradientAccumulator(
            self.optimizer, self.model.trainable_variables, accumulation_steps=k
        )

        @tf.function(autograph=False)
        def add(x: Any, y: Any) -> None:
            accumulator.accumulate(self.gradients(x, y))
            if self.in_graph:
                accumulator.apply_when_full()

        def step(_: int, x: Any, y: Any) -> None:
            add(x, y)
            if not self.in_graph:
                accumulator.apply_when_full()

        return step


class AccumulatorInGraph(Accumulator):
    """The same, with the updates in the `tf.function`."""

    in_graph = True


class ByHand(InLoop):
    """What everybody copies: a `tf.function` per micro-batch, variables, `apply`."""

    microbatches = True

    def __init__(self, work: Work, jit_compile: bool) -> None:
        super().__init__(work, jit_compile)
        self._sums = [
            tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
            for variable in self.model.trainable_variables
        ]

    def kept(self) -> list[Any]:
        """Return the sums that are kept from one update to the next."""
        return self._sums

    def make_step(self, k: int) -> Any:
        """Return the step."""
        sums = self._sums

        @tf.function(autograph=False)
        def add(x: Any, y: Any) -> None:
            for total, gradient in zip(sums, self.gradients(x, y)):
                total.assign_add(_dense(gradient) / k)

        @tf.function(autograph=False)
        def update() -> None:
            self.apply([total.read_value() for total in sums])
            for total in sums:
                total.assign(tf.zeros_like(total))

        def step(index: int, x: Any, y: Any) -> None:
            add(x, y)
            if (index + 1) % k == 0:
                update()

        return step


IN_FIT = {FULL_BATCH: InFit, LIMIT: Limit, SPLIT: Split, WINDOW: Window, KERAS: KerasOwn}
IN_LOOPS = {
    LOOP_FULL: LoopFull,
    LOOP_LIMIT: LoopLimit,
    BATCHES: Batches,
    ACCUMULATOR: Accumulator,
    IN_GRAPH: AccumulatorInGraph,
    BY_HAND: ByHand,
}


def _optimizer(**options: Any) -> Any:
    return keras.optimizers.Adam(1e-4, **options)


def _dense(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient)
