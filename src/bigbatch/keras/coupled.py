"""Losses in which samples meet: two passes over a batch, the loss of the whole between them."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any, Iterator

import tensorflow as tf

from bigbatch.core.window import UNBOUNDED, AccumulationSteps
from bigbatch.errors import ArgumentError, explain
from bigbatch.keras import compat
from bigbatch.keras.batch_norm import batch_norms_of
from bigbatch.keras.collector import Collected, collecting
from bigbatch.keras.coupling import FirstLook, refuse_mixing_layers, rows_meet
from bigbatch.keras.data import as_tensor, is_iterator, largest_count, without_optionals
from bigbatch.keras.patching import replaced
from bigbatch.keras.runner import Runner
from bigbatch.keras.split import SplitEngine
from bigbatch.keras.terms import ONE, OWN, Lengths, denominator
from bigbatch.keras.window import WindowEngine
from bigbatch.tf import replicas
from bigbatch.tf.batch import Batch, sample_count
from bigbatch.tf.compat import outside_strategy_scope
from bigbatch.tf.two_passes import Share, TwoPasses, joined_rows, pulled_back, rows
from bigbatch.tf.values import WEIGHT_DTYPE, added, after, as_gradient_of, times


class CoupledRunner(Runner):
    """Trains a model with the loss of whole batches, of which only the outputs are whole.

    The first pass calls the model on each micro-batch and keeps its outputs. Then the model's
    `train_step` runs once on the whole batch, with those outputs in place of a call: loss and
    metrics are computed as they are for the full batch. The second pass calls the model again
    and takes the gradients of the outputs back to the weights.
    """

    def __init__(self, model: Any, batch_norm: str) -> None:
        super().__init__(model, batch_norm, Lengths.SAME)
        self._outputs: Any = None
        self._dtypes: list[Any] = []

    def local(self, batch: Batch, microbatch_size: Any) -> list[Any]:
        """Run this replica's share of a batch; return what adds up over replicas."""
        jit_compile = self._keras.jit_compile(self._model)
        passes = TwoPasses(batch, microbatch_size, jit_compile, self.kept)
        share = Share(batch.count)
        parts = passes.first(functools.partial(self._forward, share))
        outputs = [
            joined_rows(*pair, batch.count) for pair in zip(parts["outputs"], self._dtypes)
        ]
        masks = [mask and joined_rows(mask, tf.bool, batch.count) for mask in parts["masks"]]
        losses = parts["losses"]
        if losses and share.replicas > 1:
            losses = replicas.sum_from_inside(losses)
        losses = [times(value, 1 / tf.cast(share.total, WEIGHT_DTYPE)) for value in losses]
        outputs, masks = share.whole((outputs, masks))
        (data,) = batch.arguments(batch.leaves)
        logs, in_loss, seeds = self._loss(data, share, outputs, masks, losses)
        of_outputs = [share.own(seed) for seed in seeds[: len(outputs)]]
        of_losses = seeds[len(outputs) :]

        def compute(of_outputs: list[Any], data: Any) -> list[Any]:
            # Not the quotient is cast: of a Python number TensorFlow makes float32 first.
            part = tf.cast(sample_count(data), WEIGHT_DTYPE)
            part = part / tf.cast(share.total, WEIGHT_DTYPE)
            seeds = [seed if seed is None else times(seed, part) for seed in of_losses]
            collected = Collected(in_loss.optimizer)
            collected.variables, collected.is_weighted = in_loss.variables, True
            with tf.GradientTape() as tape:
                outputs, _, losses = self._call(share, data)
            gradients = pulled_back(
                tape, [*outputs, *losses], [*of_outputs, *seeds], collected.variables
            )
            collected.gradients = self._keras.unscaled(collected.optimizer, gradients)
            self._keep(collected)
            self._collected = [collected]
            return collected.gradients

        sparse = passes.second(compute, of_outputs, begin=self.open)
        gradients = []
        summed = self._summed(self._collected[0], sparse)
        for variable, gradient, own in zip(in_loss.variables, summed, in_loss.gradients):
            gradient = as_gradient_of(variable, gradient)
            # The same on every replica: each has a part of it.
            own = as_gradient_of(variable, own, 1 / share.replicas)
            gradients.append(added(gradient, own))
        sums: dict[str, Any] = {"gradients": gradients, "logs": logs}
        if self._insight is not None:
            parts = tf.math.ceil(batch.count / microbatch_size)
            sums["insight"] = {"microbatches": tf.cast(parts, WEIGHT_DTYPE)}
            sums["samples"] = tf.cast(batch.count, WEIGHT_DTYPE)
        self._structure = tf.nest.map_structure(lambda _: 0, sums)
        return tf.nest.flatten(sums)

    def update(self, flat: list[Any]) -> dict[str, Any]:
        """Update the model from what `local` returned, summed over replicas; return logs."""
        sums = tf.nest.pack_sequence_as(self._structure, flat)
        (collected,) = self._collected
        self._build_optimizers()
        with outside_strategy_scope(), after(flat):
            gradients = map(as_gradient_of, collected.variables, sums["gradients"])
            if self._insight is not None:
                self._insight.note(sums["insight"], sums["samples"], [], None)
            self._optimizers[0].apply(self.strategy, list(gradients))
        self._close_sums()
        return sums["logs"]

    def _call(self, share: Share, data: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Call the model; return its outputs, their masks, and what layers add to the loss."""
        x, _, _ = self._keras.unpacked(data)

        def parts() -> Any:  # of which a mean is taken; of those that are sums it is the sum
            return tf.cast(share.total, WEIGHT_DTYPE) / tf.cast(
                sample_count(data), WEIGHT_DTYPE
            )

        sums = self._keras.scaling_sums_of_layers(self._model, parts)
        with self._norm.watching(), sums:
            self._outputs = self._keras.call(self._model, x, training=True)
        outputs = tf.nest.flatten(self._outputs)
        self._dtypes = [output.dtype for output in outputs]
        masks = [compat.mask_of(output) for output in outputs]
        return outputs, masks, self._keras.losses_of_layers(self._model)

    def _forward(self, share: Share, data: Any) -> dict[str, list[Any]]:
        outputs, masks, losses = self._call(share, data)
        samples = sample_count(data)
        return {
            "outputs": [rows(output) for output in outputs],
            "masks": [None if mask is None else rows(mask) for mask in masks],
            "losses": [times(loss, samples) for loss in losses],
        }

    def _loss(
        self, data: Any, share: Share, outputs: list[Any], masks: list[Any], losses: list[Any]
    ) -> tuple[dict[str, Any], Collected, list[Any]]:
        """Run `train_step` with outputs that are there already.

        Returns:
            Logs, the gradients of variables that stand in the loss itself, and the gradients
            of `outputs` and `losses`.
        """
        model = self._model
        tape = tf.GradientTape()
        watched = [*outputs, *losses]
        of: list[Any] = []

        # Recording, from the call of the model to the loss, ends even if one of them fails.
        recording = contextlib.ExitStack()

        @tf.autograph.experimental.do_not_convert
        def call(*_: Any, **__: Any) -> Any:
            recording.enter_context(tape)
            tape.watch([one for one in watched if one.dtype.is_floating])
            for loss in losses:
                self._keras.add_loss(model, loss)
            for output, mask in zip(outputs, masks):
                if mask is not None:
                    compat.set_mask(output, mask)
            return tf.nest.pack_sequence_as(self._outputs, outputs)

        def scale(loss: Any) -> Any:
            recording.close()
            of.append(loss)
            return loss

        x, y, sample_weight = self._keras.unpacked(data)
        y, sample_weight = share.whole((y, sample_weight))
        if self._keras.uses_inputs_after_call(model):
            x = share.whole(x)
        whole = self._keras.packed(x, y, sample_weight)
        none = {self._keras.ACTIVITY_REGULARIZER: None}
        instead = replaced(model, call=call, **none)
        gradients = collecting(model, scale, lambda _: None)
        with contextlib.ExitStack() as stack:
            stack.enter_context(recording)
            stack.enter_context(instead)
            stack.enter_context(self._one_replica(share))
            stack.enter_context(self._keras.metrics_on_replicas(model))
            stack.enter_context(self._keras.without_losses(model))
            in_loss = stack.enter_context(gradients)
            logs = model.train_step(whole)
        (collected,), (loss,) = in_loss, of
        one = self._keras.scale_loss(collected.optimizer, tf.ones([], loss.dtype))
        if share.replicas > 1:
            logs = {name: tf.where(share.is_first, value, 0) for name, value in logs.items()}
        return logs, collected, tape.gradient(loss, watched, output_gradients=one)

    @contextlib.contextmanager
    def _one_replica(self, share: Share) -> Iterator[None]:
        """Return a block in which Keras computes as if this replica, with all, were alone.

        Every replica has the outputs of all, and computes the same. Metrics, which are added
        up over replicas, change on the first one only.
        """
        if share.replicas == 1:
            yield
            return
        variables = self._keras.metrics_variables(self._model)
        before = [tf.convert_to_tensor(variable) for variable in variables]

        divided = self._keras.divides_by_replicas(share.replicas)

        def undivided(loss: Any) -> Any:
            def call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
                by = denominator(self._keras, loss, y_true, y_pred, sample_weight, Lengths.SAME)
                value = loss(y_true, y_pred, sample_weight)
                is_divided = not (isinstance(by, str) and by in (OWN, ONE))
                return value * divided if is_divided else value

            return call

        def record(metric: Any, value: Any) -> None:
            metric.update_state(value / share.replicas)

        losses = self._keras.losses_of_one_replica(self._model, share.replicas, share.total)
        with losses, self._keras.watching_loss(self._model, undivided, record):
            yield
        for variable, value in zip(variables, before):
            variable.assign(tf.where(share.is_first, tf.convert_to_tensor(variable), value))


class CoupledEngine(SplitEngine):
    """Trains `model` with batches cut into micro-batches, and a loss in which samples meet."""

    def __init__(self, model: Any, microbatch_size: int, batch_norm: str) -> None:
        _check(model, batch_norm)
        super().__init__(model, microbatch_size, batch_norm)
        self._runner: Any = CoupledRunner(model, batch_norm)
        self._first_look = FirstLook(model, functools.partial(refuse_mixing_layers, batch_norm))

    def _local(self, data: Any, size: Any) -> list[Any]:
        batch = self._batch(data)
        return self._runner.local(batch, self._size_for(batch) if size is None else size)


class CoupledWindowEngine(WindowEngine):
    """Trains `model` with windows of batches, which are held, and joined when all are there."""

    def __init__(
        self, model: Any, accumulation_steps: AccumulationSteps, batch_norm: str
    ) -> None:
        super().__init__(model, accumulation_steps, batch_norm)
        self._engine = CoupledEngine(model, UNBOUNDED, batch_norm)
        self._state = self._engine.state

    def _add(self, iterator: Any, wanted: Any) -> tuple[int, dict[str, Any]]:
        del wanted
        data = tf.nest.map_structure(as_tensor, without_optionals(next(iterator)))
        types = iterator.element_spec if is_iterator(iterator) else data
        self._engine.prepare(types)
        self._engine.look_at(data, sys.maxsize)
        self._held.append(data)
        return 1, self._keras.results(self._model)

    def _update(self) -> dict[str, Any]:
        strategy, parts = compat.strategy_of(self._model), len(self._held)
        joined = strategy.run(_joined, args=tuple(self._held))
        self._held = []  # or inputs would be in memory twice
        return self._engine.train_on(joined, -(-largest_count(strategy, joined) // parts))


def _joined(*batches: Any) -> Any:
    return tf.nest.map_structure(
        lambda *leaves: None if leaves[0] is None else tf.concat(leaves, 0), *batches
    )


def _check(model: Any, batch_norm: str) -> None:
    if compat.keras_of(model).has_own_train_step(model):
        raise ArgumentError(
            explain(
                received=f"coupled=True and the train_step of {type(model).__name__}, in which "
                "the forward pass and the loss cannot be told apart",
                expected="a model that leaves train_step to Keras",
                fix="write the forward pass in call() and the loss in compute_loss() or in "
                "compile(loss=...), and remove train_step",
            )
        )
    norms = [] if batch_norm == "frozen" else batch_norms_of(model)
    if norms:
        raise ArgumentError(rows_meet(norms[0]))
