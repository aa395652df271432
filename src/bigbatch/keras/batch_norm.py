"""Batch normalisation under accumulation: three ways, of which pooling is the default."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterator

import keras
import tensorflow as tf

from bigbatch.keras import compat
from bigbatch.keras.patching import replaced

MODES = ("pooled", "microbatch", "frozen")
_EXACT = tf.float64  # these are small vectors


class BatchNorm:
    """The batch normalisation layers of a model during one batch.

    - "pooled": each micro-batch is normalised with its own statistics, and the moving
      statistics are moved once, by those of the whole batch;
    - "microbatch": as Keras has it, the moving statistics are moved by every micro-batch;
    - "frozen": the moving statistics normalise, and are not moved.

    Args:
        model: the model.
        mode: one of `MODES`.
    """

    def __init__(self, model: Any, mode: str) -> None:
        layers = [
            layer
            for layer in compat.layers_of(model)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        ]
        self._frozen = layers if mode == "frozen" else []
        # With renorm a layer reads its moving statistics in training: it stays as it is.
        self._pooled = [
            layer
            for layer in (layers if mode == "pooled" else [])
            if not getattr(layer, "renorm", False)
        ]
        self._before = self._statistics()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Return a block in which the layers see one micro-batch.

        With a momentum of zero a layer's moving statistics are those of the micro-batch.
        """
        with contextlib.ExitStack() as stack:
            for layer in self._pooled:
                stack.enter_context(replaced(layer, momentum=0.0))
            for layer in self._frozen:
                call = functools.partial(_call_frozen, layer.call)
                stack.enter_context(replaced(layer, call=call))
            yield

    def moments(self, samples: Any) -> list[Any]:
        """Return what pooling needs of the micro-batch the layers have just seen; it adds up.

        The moments are about the moving mean from before the batch: about zero, the variance
        would be a small difference of large numbers.
        """
        weight = tf.cast(samples, _EXACT)
        result = []
        for (mean, variance), (old_mean, _) in zip(self._statistics(), self._before):
            shift = tf.cast(mean, _EXACT) - tf.cast(old_mean, _EXACT)
            second = tf.cast(variance, _EXACT) + shift * shift
            result.append((weight * shift, weight * second))
        return result

    def update(self, sums: list[Any], samples: Any) -> None:
        """Move the statistics of each layer once, by the pooled statistics of the batch.

        With n the samples of a micro-batch, μ and v its mean and (biased) variance, N = Σn:
        the pooled mean is Σnμ/N, the pooled variance Σn(v + (μ − pooled mean)²)/N.
        """
        total = tf.cast(samples, _EXACT)
        for layer, old, (first, second) in zip(self._pooled, self._before, sums):
            shift = tf.cast(first, _EXACT) / total
            mean = tf.cast(old[0], _EXACT) + shift
            variance = tf.cast(second, _EXACT) / total - shift * shift
            variables: tuple[Any, Any] = (layer.moving_mean, layer.moving_variance)
            for variable, value, pooled in zip(variables, old, (mean, variance)):
                moved = layer.momentum * tf.cast(value, _EXACT) + (1 - layer.momentum) * pooled
                variable.assign(tf.cast(moved, variable.dtype))

    def _statistics(self) -> list[Any]:
        return [
            (
                tf.convert_to_tensor(layer.moving_mean),
                tf.convert_to_tensor(layer.moving_variance),
            )
            for layer in self._pooled
        ]


def _call_frozen(call: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
    del training
    return call(inputs, training=False, mask=mask)
