"""Keras 3 on JAX."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, Callable, Iterator

import jax

from bigbatch.backends.exact_refusals import refuse_exact
from bigbatch.backends.jax.compat import leave_on_host
from bigbatch.backends.jax.devices import current_shards, shards_of_all
from bigbatch.backends.jax.exact.moments import moments_of_batch
from bigbatch.backends.jax.mechanics import JaxBackend
from bigbatch.backends.jax.processes import number_of_processes
from bigbatch.backends.jax.state import (
    Cell,
    assign,
    of_microbatches,
    of_updates,
    packed,
    scope_of,
    values_of,
    variables_of,
    without_repetitions,
)
from bigbatch.backends.keras import layers_of, optimizers_of
from bigbatch.backends.keras3 import Keras3
from bigbatch.core.patching import replaced
from bigbatch.core.size_search import AUTO
from bigbatch.errors import ArgumentError, ContextError, explain

_WITH_HOST_BATCHES: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models whose `fit` has begun, and has not built them yet."""


class Keras3OnJax(Keras3, JaxBackend):
    """The backend of Keras 3 models on JAX."""

    def methods(self, model: Any, hooks: Any) -> dict[str, Any]:
        is_nnx_enabled = getattr(self.keras.config, "is_nnx_enabled", lambda: False)
        if is_nnx_enabled():
            raise ArgumentError(
                explain(
                    received="a model whose variables are those of flax.nnx",
                    expected="variables of Keras",
                    fix="unset KERAS_NNX_ENABLED",
                )
            )
        self._check_processes(hooks)
        return super().methods(model, hooks)

    def _check_processes(self, hooks: Any) -> None:
        """Raise if several processes train a model in another way than with parts of data."""
        if number_of_processes() > 1 and shards_of_all() is None:
            name = type(self.keras.distribution.distribution()).__name__
            raise ArgumentError(
                explain(
                    received=f"a model that {number_of_processes()} processes train together, "
                    f"under {name}",
                    expected="keras.distribution.DataParallel with devices in one dimension",
                    fix="use DataParallel, or the devices of one process",
                )
            )
        if number_of_processes() > 1 and hooks.setting.microbatch_size == AUTO:
            raise ArgumentError(
                explain(
                    received='microbatch_size="auto" for a model that '
                    f"{number_of_processes()} processes train together",
                    expected="a number: a process without memory would keep the others waiting",
                    fix='find it with "auto" in one process: bigbatch.microbatch_size(model)',
                )
            )

    def fit(
        self, hooks: Any, fit: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call `fit`; batches stay on the host if devices share micro-batches."""
        self._check_processes(hooks)
        if current_shards() is not None:
            _WITH_HOST_BATCHES.add(model)
        try:
            return super().fit(hooks, fit, model, *args, **kwargs)
        finally:
            _WITH_HOST_BATCHES.discard(model)

    def build_before_fit(self, model: Any, iterator: Any, data_batch: Any) -> None:
        if iterator is not None and model in _WITH_HOST_BATCHES:
            _WITH_HOST_BATCHES.discard(model)  # those that validate are Keras' own
            leave_on_host(iterator)
        super().build_before_fit(model, iterator, data_batch)

    def build(self, model: Any, data: Any) -> bool:
        """Create the state of a model for such data, as `fit` has done before."""
        is_built = model.built and all(layer.built for layer in layers_of(model))
        if not is_built or not model.optimizer.built:
            self.build_before_fit(model, None, data)
        return True

    def state_of(self, model: Any) -> list[Any]:
        """Return the variables of a model that training changes beside its weights."""
        return of_microbatches(model)

    def native(self, variable: Any) -> Any:
        return variable

    def train_step_of(self, model: Any) -> Callable[[Any], Any]:
        """Return the model's `train_step` as a function of data, on variables in a scope."""

        def train_step(data: Any) -> Any:
            parts = variables_of(model)
            state = tuple(values_of(part) for part in parts)
            with contextlib.ExitStack() as stack:
                kept = {id(one) for one in of_updates(model)}
                for optimizer in optimizers_of(model):
                    if any(id(one) not in kept for one in optimizer.variables):
                        refuse = functools.partial(_refuse, self.name_of(optimizer))
                        methods = {"apply": refuse, "stateless_apply": refuse}
                        stack.enter_context(replaced(optimizer, **methods))
                logs, new = model.train_step(state, data)
            for variables, values in zip(parts, new):
                assign(variables, values)
            return logs

        return train_step

    def capturing(
        self,
        optimizer: Any,
        apply: Callable[[list[Any], list[Any]], None],
        weigh: Callable[[Any], Any],
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a block in which an optimizer calls functions and changes nothing."""
        inner = getattr(optimizer, "inner_optimizer", optimizer)

        def stateless_apply(
            optimizer_variables: Any, grads: Any, trainable_variables: Any
        ) -> Any:
            weights = list(inner._trainable_variables)
            variables = [*weights, *optimizer.variables]
            values = [*trainable_variables, *optimizer_variables]
            with scope_of(variables, values) as current:
                apply(list(grads), weights)
                values = current()
            return values[: len(weights)], values[len(weights) :]

        stack = contextlib.ExitStack()
        stack.enter_context(super().capturing(optimizer, apply, weigh))
        stack.enter_context(replaced(optimizer, stateless_apply=stateless_apply))
        return stack

    def refuse_exact(self, model: Any, layers: list[Any]) -> None:
        moments = self.keras.layers.BatchNormalization._moments
        others = [layer for layer in layers if type(layer)._moments is not moments]
        refuse_exact(model, layers, others)
        if current_shards() is not None or not model.jit_compile:
            raise ArgumentError(
                explain(
                    received='batch_norm="exact" and several devices, or jit_compile=False',
                    expected="one device, and programs that JAX compiles",
                    fix='leave that out, or use batch_norm="pooled"',
                )
            )

    def statistics_of_batch(self, layer: Any) -> contextlib.AbstractContextManager[None]:
        def moments(inputs: Any, mask: Any) -> tuple[Any, Any]:
            epsilon = self.keras.config.epsilon()
            return moments_of_batch(inputs, layer._reduction_axes, mask, epsilon)

        return replaced(layer, _moments=moments)

    # What diagnostics ask for.

    def longest(self, x: Any, y: Any, sample_weight: Any) -> Any:
        """Return a batch whose samples are as large as they get in the data."""
        return self.data.longest(x, y, sample_weight)

    def build_under_strategy(self, model: Any, iterator: Any, data_batch: Any) -> None:
        """Build a model, as `fit` does."""
        self.build_before_fit(model, iterator, data_batch)

    def plain_train_function(self, model: Any) -> Callable[[Any], dict[str, Any]]:
        """Return what Keras itself trains a model with, on one batch."""
        step = model.train_step
        # As a function of its own: JAX would remember a trace in which layers did otherwise.
        with replaced(model, train_step=lambda state, data: step(state, data)):
            type(model).make_train_function(model, force=True)
        train = model.train_function

        def train_on(data: Any) -> dict[str, Any]:
            parts = variables_of(model)
            state = without_repetitions([value for part in parts for value in values_of(part)])
            logs, new = train(packed(parts, state), iter([data]))
            for part, values in zip(parts, new):
                assign(part, values)
            return logs

        return train_on

    @contextlib.contextmanager
    def noting_gradients(self, model: Any) -> Iterator[dict[int, Cell]]:
        """Return a block in which the gradients that optimizers are given are noted."""
        noted: dict[int, Cell] = {}

        def note(keys: list[int], gradients: list[Any]) -> None:
            noted.update((key, Cell(value)) for key, value in zip(keys, gradients))

        def noting(optimizer: Any, apply: Any, slots: Any, grads: Any, weights: Any) -> Any:
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            pairs = zip(inner._trainable_variables, grads)
            given = {id(one): gradient for one, gradient in pairs if gradient is not None}
            jax.debug.callback(functools.partial(note, [*given]), [*given.values()])
            return apply(slots, grads, weights)

        with contextlib.ExitStack() as stack:
            for one in optimizers_of(model):
                instead = functools.partial(noting, one, one.stateless_apply)
                stack.enter_context(replaced(one, stateless_apply=instead))
            yield noted
            jax.effects_barrier()  # or some may still be on their way


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise ContextError(
        explain(
            received=f"a train_step that applies gradients of the optimizer {name!r}",
            expected="optimizers whose variables the model has: Keras on JAX keeps the "
            "state of no others",
            fix="compile the model with this optimizer; build a second one, and keep its "
            "variables in an attribute of the model: self.slots = optimizer.variables",
        )
    )
