"""The loss of the whole batch, with one micro-batch in memory at a time: two passes.

The first pass calls the model on each micro-batch and keeps its outputs. Then the model's
`train_step` runs once on the whole batch, with those outputs in place of a call: loss and
metrics are computed as they are for the full batch. The second pass calls the model again and
takes the gradients of the outputs back to the weights.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, NamedTuple

from bigbatch.backends.keras import backend_of, mask_of, set_mask
from bigbatch.core.patching import replaced
from bigbatch.engine.batch_norm import batch_norms_of
from bigbatch.engine.captured import CapturedGradients, Capturing
from bigbatch.engine.loss_plan import Kind
from bigbatch.engine.loss_terms import ONE, OWN, SharedDimensions, denominator
from bigbatch.engine.microbatch import MicroBatch
from bigbatch.errors import ArgumentError, explain


class FullBatchTotals(NamedTuple):
    """What one replica has of a batch, to be summed over replicas."""

    gradients: list[Any]
    moments: list[Any]
    logs: dict[str, Any]
    samples: Any
    microbatches: Any


class FullBatchLoss:
    """Trains a model with the loss of whole batches.

    Args:
        model: a Keras model that leaves `train_step` to Keras.
        microbatch: holds the sums of gradients.
        say: called with what there is to know of how micro-batches run.
    """

    def __init__(
        self, model: Any, microbatch: MicroBatch, say: Callable[[list[str]], None]
    ) -> None:
        self._model = model
        self._backend = backend_of(model)
        self._microbatch = microbatch
        self._say = say
        self._capturing = Capturing(model, microbatch.held)
        self._whole = self._backend.loss_of_whole_batch(model, self._running)
        self._passes: Any = None
        if self._whole is None:
            self._passes = self._backend.two_passes(model, microbatch.kept)
        self._outputs: Any = None

    def trying(self, count: int) -> contextlib.AbstractContextManager[None]:
        """Return a block in which this is tried on `count` samples, to be undone."""
        return self._backend.trying_two_passes(self._whole or self._passes, count)

    def local(self, data: Any, size: Any) -> FullBatchTotals:
        """Run this replica's part of a batch; return what adds up over replicas."""
        ops, microbatch = self._backend.ops, self._microbatch
        if self._whole is not None:
            return self._local_by_itself(data, size)
        passes = self._passes((data,), size)
        count = 0

        def forward(data: Any) -> tuple[list[Any], list[Any], list[Any]]:
            nonlocal count
            outputs, masks, losses, moments = self._call(passes.replica_rows, data)
            count = len(outputs)
            return [*outputs, *masks], losses, moments

        def loss(rows: list[Any], losses: list[Any]) -> Any:
            (whole,) = passes.batch.arguments(passes.batch.leaves)
            return self._loss(passes, whole, rows[:count], rows[count:], losses)

        def keep(gradients: list[Any]) -> list[Any]:
            (captured,) = microbatch.captured
            captured.gradients = self._backend.unscaled(captured.optimizer, gradients)
            captured.is_weighted = True
            microbatch.keep(captured)
            left, captured.gradients = captured.gradients, []
            return left

        result, left = passes.run(forward, loss, keep, microbatch.open)
        self._say(self._backend.remarks_of_two_passes(self._passes))
        gradients = microbatch.summed(microbatch.captured[0], left)
        samples = ops.weight(passes.batch.count)
        return FullBatchTotals(
            gradients=passes.with_those_in_loss(result, gradients),
            moments=passes.sums,
            logs=result.result,
            samples=samples,
            microbatches=ops.ceil(samples / ops.weight(size)),
        )

    def _local_by_itself(self, data: Any, size: Any) -> FullBatchTotals:
        ops, microbatch = self._backend.ops, self._microbatch
        microbatch.captured = [CapturedGradients(self._model.optimizer)]
        microbatch.captured[0].variables = list(self._model.trainable_variables)
        gradients, moments, logs = self._whole.run(data, size)
        samples = ops.weight(self._backend.data.sample_count(data))
        microbatches = ops.ceil(samples / ops.weight(size))
        return FullBatchTotals(gradients, moments, logs, samples, microbatches)

    def apply(self, totals: FullBatchTotals) -> dict[str, Any]:
        """Update the model from what `local` returned, summed over replicas; return logs."""
        backend, microbatch = self._backend, self._microbatch
        with backend.updating(self._model, microbatch.captured, totals) as apply:
            variables = microbatch.captured[0].variables
            gradients = map(backend.ops.as_gradient_of, variables, totals.gradients)
            if microbatch.statistics is not None:
                microbatch.statistics.note(totals.microbatches, totals.samples, [])
            apply([list(gradients)])
            microbatch.norm.update(totals.moments)
        backend.on_replicas(self._model, microbatch.close)
        return totals.logs

    def _call(self, share: Any, data: Any) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Call the model; return outputs, masks, added losses, and moments of layers."""
        ops, backend = self._backend.ops, self._backend
        x, _, _ = backend.unpacked(data)

        def parts() -> Any:
            return ops.weight(share.total) / ops.weight(backend.data.sample_count(data))

        with self._running(parts) as moments:
            self._outputs = backend.call(self._model, x, training=True)
        outputs = ops.flatten(self._outputs)
        masks = [mask_of(output) for output in outputs]
        return outputs, masks, backend.losses_of_layers(self._model), moments

    @contextlib.contextmanager
    def _running(self, parts: Callable[[], Any]) -> Iterator[list[Any]]:
        """Return a block in which the model is called on a part of a batch.

        It gives the moments of layers. `parts` returns how many such parts a batch has.
        """
        ops, plan = self._backend.ops, self._microbatch.plan

        def as_mean(layer: Any, position: int, loss: Any) -> Any:
            is_sum = plan.kind_of_added(id(layer), position) is Kind.SUM
            if not is_sum and not ops.rank(loss):
                return loss
            # The mean over micro-batches is taken of it, which then is the sum.
            return ops.times(ops.sum(loss), parts())

        added = self._backend.changing_added_losses(self._model, as_mean)
        with self._microbatch.norm.watching() as moments, added:
            yield moments

    def _loss(
        self, passes: Any, data: Any, outputs: list[Any], masks: list[Any], losses: list[Any]
    ) -> Any:
        """Run `train_step` with outputs that are there already; return a `LossOfBatch`."""
        backend, model, share = self._backend, self._model, passes.replica_rows
        tape = passes.recording([*outputs, *losses])
        of: list[Any] = []
        # Recording, from the call of the model to the loss, ends even if one of them fails.
        recording = contextlib.ExitStack()

        @passes.unconverted
        def call(*_: Any, **__: Any) -> Any:
            recording.enter_context(tape)
            for loss in losses:
                backend.add_loss(model, loss)
            for output, mask in zip(outputs, masks):
                if mask is not None:
                    set_mask(output, mask)
            return backend.ops.pack(self._outputs, outputs)

        def scale(loss: Any) -> Any:
            recording.close()
            of.append(loss)
            return loss

        x, y, sample_weight = backend.unpacked(data)
        y, sample_weight = share.whole((y, sample_weight))
        if backend.uses_inputs_after_call(model):
            x = share.whole(x)
        none = {backend.ACTIVITY_REGULARIZER: None}
        with contextlib.ExitStack() as stack:
            stack.enter_context(recording)
            stack.enter_context(replaced(model, call=call, **none))
            stack.enter_context(self._one_replica(share))
            stack.enter_context(backend.metrics_on_replicas(model))
            stack.enter_context(backend.without_losses(model))
            captured: list[CapturedGradients] = []
            stack.enter_context(self._capturing.gradients(scale, captured.append))
            logs = model.train_step(backend.packed(x, y, sample_weight))
        (in_loss,), (loss,) = captured, of
        self._microbatch.captured = [
            CapturedGradients(in_loss.optimizer, is_in_pairs=in_loss.is_in_pairs)
        ]
        self._microbatch.captured[0].variables = in_loss.variables
        one = backend.scale_loss(in_loss.optimizer, backend.ops.like(backend.ops.ones(), loss))
        if share.replicas > 1:
            where = backend.ops.where
            logs = {name: where(share.is_first, value, 0) for name, value in logs.items()}
        seeds = tape.gradients(loss, one)
        return passes.loss_of_batch(
            logs,
            in_loss.variables,
            in_loss.gradients,
            [*seeds[: len(outputs)], *(None for _ in masks)],
            seeds[len(outputs) :],
        )

    @contextlib.contextmanager
    def _one_replica(self, share: Any) -> Iterator[None]:
        """Return a block in which Keras computes as if this replica, with all, were alone.

        Every replica has the outputs of all, and computes the same. Metrics, which are added
        up over replicas, change on the first one only.
        """
        if share.replicas == 1:
            yield
            return
        backend, ops = self._backend, self._backend.ops
        variables = backend.metrics_variables(self._model)
        before = [ops.tensor(variable) for variable in variables]
        divided = backend.divides_by_replicas(share.replicas)

        def undivided(loss: Any) -> Any:
            def call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
                by = denominator(
                    backend, loss, y_true, y_pred, sample_weight, SharedDimensions.SAME
                )
                value = loss(y_true, y_pred, sample_weight)
                is_divided = not (isinstance(by, str) and by in (OWN, ONE))
                return value * divided if is_divided else value

            return call

        def record(metric: Any, value: Any) -> None:
            metric.update_state(value / share.replicas)

        losses = backend.losses_of_one_replica(self._model, share.replicas, share.total)
        with losses, backend.watching_loss(self._model, undivided, record):
            yield
        for variable, value in zip(variables, before):
            variable.assign(ops.where(share.is_first, ops.tensor(variable), value))


def check_two_passes(model: Any, batch_norm: Any) -> None:
    """Raise if two passes over a batch would not be exact for a model."""
    if backend_of(model).has_custom_train_step(model):
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
        raise ArgumentError(mixes_samples(norms[0]))


def mixes_samples(layer: Any) -> str:
    """Say that a layer mixes samples, not only the loss."""
    return explain(
        received=f"coupled=True and the layer {layer.name!r} ({type(layer).__name__}), which "
        "mixes the samples of a batch in the forward pass",
        expected="samples that are compared in the loss only",
        fix='pass batch_norm="frozen" for BatchNormalization (or "exact", with Keras 3 on '
        "TensorFlow), or use LayerNormalization or "
        "GroupNormalization; move what mixes samples from call() to the loss",
    )
