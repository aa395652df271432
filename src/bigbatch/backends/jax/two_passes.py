"""The loss of the whole batch, with one micro-batch in memory at a time: two passes, as calls.

The first pass calls the model on each micro-batch and keeps its outputs. One program then
computes the loss of the whole batch, its gradients by the outputs, and those of variables that
stand in the loss itself. The second pass takes the gradients of outputs back to the weights.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator

import jax
import jax.numpy as jnp
from keras import tree

from bigbatch.backends.base import Backend
from bigbatch.backends.jax import data as batches
from bigbatch.backends.jax.compat import (
    losses_replaced,
    quickly,
    stateless_call,
    update_metrics,
)
from bigbatch.backends.jax.devices import current_shards
from bigbatch.backends.jax.draws import MicrobatchRows, drawing, places_of
from bigbatch.backends.jax.memory import noticing
from bigbatch.backends.jax.ops import widened
from bigbatch.backends.jax.state import assign, scope_of, values_of, variables_of
from bigbatch.backends.keras import mask_of, set_mask
from bigbatch.core.patching import replaced


class TwoPasses:
    """Two passes over the micro-batches of a batch, with a loss of the whole between them.

    Args:
        backend: the backend of the model.
        model: a built and compiled Keras model that leaves `train_step` to Keras.
        running: returns a block in which the model is called on one of so many parts.
        is_eager: whether to compile nothing.
    """

    def __init__(
        self, backend: Backend, model: Any, running: Callable[..., Any], *, is_eager: bool
    ) -> None:
        self._backend = backend
        self._model = model
        self._running = running
        self._places: list[str | None] | None = None
        self._drawn: list[Any] = []
        self._structure: Any = None
        self._is_eager = is_eager
        self._programs = self._made()

    def _made(self, **options: Any) -> tuple[Any, Any, Any]:
        """Return programs that are yet to be traced: a pass, the loss, the other pass."""
        # Functions of their own, or traces of others with other switches would be remembered.
        forward, loss, back = (
            functools.partial(lambda function, *all: function(*all), one)
            for one in (self._forward, self._loss, self._back)
        )
        if self._is_eager:
            return forward, loss, back
        first, between = jax.jit(forward, **options), jax.jit(loss, **options)
        return first, between, jax.jit(back, donate_argnums=0, **options)

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Return a block in which a few samples are tried, and programs are not kept.

        They read the switch of batch normalisation when they are traced.
        """
        with replaced(self, _programs=self._made(compiler_options=quickly())):
            yield

    def run(self, data: Any, size: int) -> tuple[list[Any], Any, dict[str, Any]]:
        """Return the gradients of the loss by the weights, moments of layers, and the logs."""
        run_first, run_loss, run_second = self._programs
        count = batches.checked_count(data)
        size = min(size, count)
        if self._structure is None:
            self._look_at(data, size)
        parts = variables_of(self._model)
        weights, others, slots, metrics = map(values_of, parts)
        starts = range(0, count, size)
        cuts = [(start, min(size, count - start)) for start in starts]
        outputs: list[Any] = []
        losses: list[Any] = []
        of_layers: Any = None
        new: Any = others
        with noticing():
            for start, rows in cuts:
                x = self._inputs(batches.rows(data, start, rows))
                share = rows / count
                first = run_first(weights, others, jnp.uint32(start), x, share)
                found, new, moments = first
                of_layers = plus(of_layers, moments)
                outputs.append(found[0])
                losses.append([share * one for one in found[1]])
            whole = jax.tree.map(lambda *rows: jnp.concatenate(rows), *outputs)
            del outputs
            means = [sum(some) for some in zip(*losses)]
            state = weights, new, slots, metrics
            logs, metrics, gradients, seeds = run_loss(state, whole, means, data)
            sums = jax.tree.map(lambda g: g.astype(widened(g.dtype)), gradients)
            for start, rows in cuts:
                x = self._inputs(batches.rows(data, start, rows))
                seed = batches.rows(seeds[0], start, rows), seeds[1]
                arguments = weights, others, jnp.uint32(start), x, rows / count, seed
                sums = run_second(sums, *arguments)
        assign([*parts[1], *parts[3]], [*new, *metrics])
        return sums, of_layers, logs

    def _inputs(self, data: Any) -> Any:
        shards, x = current_shards(), self._backend.unpacked(data)[0]
        return x if shards is None else shards.placed(x)

    def _look_at(self, data: Any, size: int) -> None:
        """Find out which draws follow the samples."""
        weights, others, _, _ = map(values_of, variables_of(self._model))

        def drawn(count: int) -> list[Any]:
            def micro(leaf: Any) -> Any:
                return jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype)

            x = self._backend.unpacked(data)[0]
            x = jax.tree.map(micro, jax.tree.map(batches.type_of, x))
            start = jax.ShapeDtypeStruct((), jnp.uint32)
            # As a function of its own, or a trace with other places would be remembered.
            jax.eval_shape(lambda *all: self._forward(*all), weights, others, start, x, 1.0)
            return self._drawn

        shapes = drawn(size)
        if shapes:
            with contextlib.suppress(Exception):  # a model may be made for one size only
                self._places = places_of(shapes, drawn(size + 1), size)

    def _call(self, *arguments: Any) -> Any:
        """Return outputs with their masks, what layers add to the loss, and new state."""
        weights, others, start, x, share = arguments
        model = self._model
        rows = MicrobatchRows(start, batches.sample_count(x), self._places)
        with self._running(lambda: 1 / share) as moments, drawing(rows):
            outputs, new, losses = stateless_call(model, weights, others, x)
        self._drawn = rows.drawn
        self._structure = tree.map_structure(lambda _: 0, outputs)
        flat = tree.flatten(outputs)
        return (flat, losses), ([mask_of(one) for one in flat], new, moments)

    def _forward(self, *arguments: Any) -> Any:
        (flat, losses), (masks, new, moments) = self._call(*arguments)
        return ((flat, masks), losses), new, moments

    def _loss(self, state: Any, whole: Any, losses: Any, data: Any) -> Any:
        """Return logs, metrics, and gradients of the loss by weights and by outputs."""
        model = self._model
        weights, others, slots, metrics = state
        flat, masks = whole
        x, y, sample_weight = self._backend.unpacked(data)

        def loss_of(flat: Any, losses: Any, weights: Any) -> Any:
            for output, mask in zip(flat, masks):
                if mask is not None:
                    set_mask(output, mask)
            y_pred = tree.pack_sequence_as(self._structure, flat)
            with losses_replaced(model, losses):
                loss, (_, _, new) = model.stateless_compute_loss(
                    weights,
                    others,
                    metrics,
                    x=x,
                    y=y,
                    y_pred=y_pred,
                    sample_weight=sample_weight,
                    training=True,
                )
            with scope_of(model.optimizer.variables, slots):
                scaled = model.optimizer.scale_loss(loss)
            return scaled, (loss, new)

        differentiated = jax.value_and_grad(loss_of, argnums=(0, 1, 2), has_aux=True)
        (_, (loss, new)), gradients = differentiated(flat, losses, weights)
        y_pred = tree.pack_sequence_as(self._structure, flat)
        for output, mask in zip(flat, masks):
            if mask is not None:
                set_mask(output, mask)
        logs, new = update_metrics(model, new, loss, (x, y, y_pred, sample_weight))
        return logs, new, gradients[2], (gradients[0], gradients[1])

    def _back(self, sums: Any, weights: Any, *arguments: Any) -> Any:
        """Add the gradients that the outputs of a micro-batch have."""
        *rest, share, (of_rows, of_means) = arguments

        def outputs_of(weights: Any) -> Any:
            return self._call(weights, *rest, share)

        _, back, _ = jax.vjp(outputs_of, weights, has_aux=True)
        means = [one * jnp.asarray(share, one.dtype) for one in of_means]
        (gradients,) = back((of_rows, means))
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, gradients)


def plus(sums: Any, values: Any) -> Any:
    """Add what a micro-batch gave to sums, or begin them."""
    return values if sums is None else jax.tree.map(jnp.add, sums, values)
