"""How the engine runs on TensorFlow: graphs, strategies, sums, copies."""

from __future__ import annotations

import contextlib
import functools
import weakref
from dataclasses import replace
from typing import Any, Callable, Iterable, Iterator

import tensorflow as tf

from bigbatch.backends.base import Backend
from bigbatch.backends.keras import layers_of
from bigbatch.backends.tensorflow import (
    applies,
    data,
    draws,
    failures,
    few_samples,
    ops,
    replicas,
    rollback,
)
from bigbatch.backends.tensorflow.accumulation import Accumulation
from bigbatch.backends.tensorflow.compat import outside_strategy_scope, unoptimised
from bigbatch.backends.tensorflow.dependence import effects_in
from bigbatch.backends.tensorflow.keras3_optimizers import adds_up_rows
from bigbatch.backends.tensorflow.memory import Memory
from bigbatch.backends.tensorflow.optimizers import adapted
from bigbatch.backends.tensorflow.sample import TensorFlowSample, sample_of
from bigbatch.backends.tensorflow.sparse_rows import table_of
from bigbatch.backends.tensorflow.sums import GradientSums
from bigbatch.backends.tensorflow.table import Table
from bigbatch.backends.tensorflow.two_passes import TwoPasses
from bigbatch.backends.tensorflow.values import WEIGHT_DTYPE, after, shaped
from bigbatch.backends.tensorflow.variables import local_variable, on_this_replica
from bigbatch.core.exact import Storage
from bigbatch.core.passes import Order
from bigbatch.core.patching import attributes_kept, contents_kept
from bigbatch.core.sparse_gradients import SparseGradients

_SWITCHES: Any = weakref.WeakKeyDictionary()
"""The switch of each model: a `tf.function` of the user's may keep it for good."""


class TensorFlowBackend(Backend):
    """The part of a backend that Keras 2 and Keras 3 share on TensorFlow."""

    ops = ops
    data = data
    few_samples = few_samples
    TELLS_ORDER = True
    OUT_OF_MEMORY = tf.errors.ResourceExhaustedError
    LOST_WORKER = (
        tf.errors.UnavailableError,
        tf.errors.AbortedError,
        tf.errors.CancelledError,
    )

    def compiled(
        self, model: Any, function: Callable[..., Any], *, is_optimised: bool = True
    ) -> Callable[..., Any]:
        if self.runs_in_python(model):
            return function
        # Or TensorFlow would warn that methods of many models are traced many times.
        function = functools.partial(function)
        graph = tf.function(function, reduce_retracing=True, autograph=False)
        return graph if is_optimised else _AsItIs(graph)

    @contextlib.contextmanager
    def eager_if_asked(self, model: Any) -> Iterator[None]:
        before = model.run_eagerly
        if before or not tf.config.functions_run_eagerly():
            yield
            return
        model.run_eagerly = True
        try:
            yield
        finally:
            model.run_eagerly = before

    def explained(self, error: BaseException) -> Exception | None:
        return failures.explained(error)

    def runs_in_python(self, model: Any) -> bool:
        return bool(model.run_eagerly)

    def is_traced(self, model: Any) -> bool:
        return not model.run_eagerly

    def trace_now(self) -> Any:
        return tf.compat.v1.get_default_graph()

    def replicas(self, model: Any) -> int:
        return model.distribute_strategy.num_replicas_in_sync

    def is_multi_worker(self, model: Any) -> bool:
        strategy = model.distribute_strategy
        return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)

    def is_first_worker(self, model: Any) -> bool:
        strategy = model.distribute_strategy
        return not self.is_multi_worker(model) or not strategy.cluster_resolver.task_id

    def on_replicas(self, model: Any, function: Callable[..., Any], *args: Any) -> Any:
        return model.distribute_strategy.run(function, args=args)

    def local_results(self, model: Any, value: Any) -> list[Any]:
        return list(model.distribute_strategy.experimental_local_results(value))

    def reduce(self, model: Any, function: Callable[..., Any], *args: Any) -> Any:
        structure: Any = None

        def flat(*args: Any) -> list[Any]:
            nonlocal structure
            result = function(*args)
            structure = tf.nest.map_structure(lambda _: 0, result)
            return tf.nest.flatten(result)

        strategy, variables = model.distribute_strategy, model.trainable_variables
        sums = replicas.sum_from_outside(strategy, variables, flat, args)
        return tf.nest.pack_sequence_as(structure, sums)

    def sum_over_replicas(self, values: list[Any]) -> list[Any]:
        return replicas.sum_from_inside(values)

    def largest_of_all(self, model: Any, value: int) -> int:
        return replicas.largest_of_all(model.distribute_strategy, value)

    def gradient_sums(self, model: Any, *, apart: bool) -> GradientSums | None:
        del apart  # the gradients of a micro-batch are there before they are added up
        if self.runs_in_python(model):
            return None
        with model.distribute_strategy.scope():
            return GradientSums(model.trainable_variables)

    def summed_rows(
        self,
        sparse: SparseGradients,
        optimizer: Any,
        variables: list[Any],
        gradients: list[Any],
    ) -> list[bool]:
        summed, sparse.is_known = [], True
        for variable, gradient in zip(variables, gradients):
            table = None
            if isinstance(gradient, tf.IndexedSlices):
                name = getattr(variable, "path", None) or variable.name
                key = name, id(optimizer)
                table = sparse.tables.get(key)
                if table is None or not tf.executing_eagerly():  # a graph tells more
                    table = table_of(variable, name, gradient, type(optimizer).__name__)
                    table = replace(table, adds_up=self.adds_up_rows(optimizer))
                    sparse.tables[key] = table
            summed.append(table is not None and sparse.is_summed(table))
        return summed

    def draws_by_total(self, accumulation: Accumulation) -> bool:
        return accumulation.draws_by_total

    def adds_up_rows(self, optimizer: Any) -> bool:
        return adds_up_rows(optimizer)

    def accumulation(
        self,
        model: Any,
        compute: Callable[[Any, Any], Any],
        kept: Callable[[], list[Any]],
        before: Callable[[Any], Any],
        exact: Storage | None = None,
        made: Callable[[], list[Any]] = list,
    ) -> Accumulation:
        del made
        return Accumulation(
            model.distribute_strategy,
            compute,
            run_eagerly=self.runs_in_python(model),
            jit_compile=self.jit_compile(model),
            kept=kept,
            before=before,
            unharmed=lambda: _unharmed((model, *layers_of(model))),
            exact=exact,
        )

    def remarks(self, accumulation: Accumulation) -> list[str]:
        return accumulation.remarks()

    def effects_of(self, graph: Any) -> set[str]:
        return effects_in(graph.graph)

    def two_passes(self, model: Any, kept: Callable[[], list[Any]]) -> Any:
        several = self.replicas(model) > 1
        return lambda nest, size: TwoPasses(
            nest, size, may_be_empty=several, jit_compile=self.jit_compile(model), kept=kept()
        )

    def replica_vector(self, model: Any) -> Any:
        with model.distribute_strategy.scope():
            return local_variable(tf.zeros([0], WEIGHT_DTYPE), tf.TensorShape([None]))

    def rollback(
        self, model: Any, others: Iterable[Any], weights: Iterable[Any] = ()
    ) -> rollback.Rollback:
        weights = [self.native(one) for one in weights]
        variables = [*self.state_of(model), *others]
        return rollback.Rollback(model.distribute_strategy, variables, weights)

    def unchanged(self, variables: Iterable[Any]) -> Any:
        return rollback.unchanged(variables)

    def build_optimizers(self, model: Any, captured: list[Any]) -> list[Any]:
        with tf.init_scope(), model.distribute_strategy.scope():
            # Optimizers that Keras does not know of make their variables here.
            return [adapted(one.optimizer, one.variables) for one in captured]

    @contextlib.contextmanager
    def updating(
        self, model: Any, captured: list[Any], results: Any
    ) -> Iterator[Callable[..., None]]:
        strategy = model.distribute_strategy
        optimizers = self.build_optimizers(model, captured)

        def apply(
            gradients: list[list[Any]], made: Callable[[int], None] = lambda _: None
        ) -> None:
            for one, optimizer, mean in zip(captured, optimizers, gradients):
                if one.is_in_pairs:
                    optimizer.apply(strategy, mean)
                else:
                    one.optimizer.apply(mean, one.variables)
                made(one.number)

        # Or an update counter would count one that then fails for want of its gradients.
        with outside_strategy_scope(), after(tf.nest.flatten(results)):
            yield apply

    def changed_by_apply(self, optimizer: Any) -> list[Any]:
        return self.optimizer_variables(optimizer)

    def place_in_trace(self) -> int | None:
        return applies.place_now()

    def order_of_updates(
        self,
        model: Any,
        captured: list[tuple[Any, list[Any]]],
        values: Any,
        apart: Any,
        same: Any,
    ) -> Order | None:
        if not captured or captured[0][0].place is None:
            return None
        strategy, traced = model.distribute_strategy, []
        for one, gradients in captured:
            variables = [*one.variables, *self.changed_by_apply(one.optimizer)]
            handles = {
                id(on_this_replica(strategy, self.native(variable)).handle): variable
                for variable in variables
            }
            traced.append(applies.TracedApply(one.place, gradients, handles))
        if tf.executing_eagerly():
            return applies.order_of_reads(traced)
        graph = tf.compat.v1.get_default_graph()
        # Of a known number of samples it does not show what depends on it.
        is_any_size = draws.running() is not None
        return applies.order_of(graph, traced, values, apart, [same] if is_any_size else None)

    def noting_reads(self) -> Any:
        return applies.noting_reads()

    def discarding(self, model: Any, updates: Iterable[Any]) -> Any:
        if not tf.executing_eagerly():
            return applies.discarding()
        weights = {id(one): one for update in updates for one in update.variables}
        here = functools.partial(on_this_replica, model.distribute_strategy)
        return rollback.unchanged(map(here, weights.values()))

    def update_results(
        self, model: Any, variables: Iterable[Any], before: Callable[[Any], Any]
    ) -> rollback.UpdateResults:
        native = [self.native(variable) for variable in variables]
        return rollback.UpdateResults(model.distribute_strategy, native, before)

    def out_of_memory(self, message: str) -> Exception:
        return tf.errors.ResourceExhaustedError(None, None, message)

    def table(self, *, rows: int, columns: int) -> Table:
        return Table(rows=rows, columns=columns)

    def memory(self, variables: Iterable[Any]) -> Memory:
        return Memory(variable.device for variable in variables)

    def sample(self, model: Any, data: Any, rows: int) -> TensorFlowSample:
        return sample_of(self, model, data, rows)

    def rows_of_samples(self, value: Any, samples: Any) -> Any:
        if not tf.is_tensor(value) or not value.shape.rank:
            return None
        known = int(samples) if tf.executing_eagerly() else None
        return ops.rows(value) if value.shape[0] == known else None

    def switch(self, model: Any) -> Any:
        if model not in _SWITCHES:
            with model.distribute_strategy.scope():
                _SWITCHES[model] = local_variable(tf.constant(False), summed=False)
        return _SWITCHES[model]

    def shaped(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        return list(map(shaped, gradients, variables))


@contextlib.contextmanager
def _unharmed(owners: tuple[Any, ...]) -> Iterator[None]:
    """Return a block in which code is traced, to be looked at: objects stay as they are."""
    with attributes_kept(owners), contents_kept(owners):
        yield


class _AsItIs:
    """A function of a graph that TensorFlow runs as it was built, without optimising it."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with unoptimised():
            return self._function(*args, **kwargs)
