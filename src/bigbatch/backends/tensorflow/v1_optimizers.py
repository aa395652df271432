"""What bigbatch needs to know of `tf.compat.v1.train.Optimizer`.

Its private name is in here only, and is pinned by `tests/test_compat_tf.py`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from bigbatch.backends.tensorflow.plain_optimizers import PlainOptimizer
from bigbatch.backends.tensorflow.values import WEIGHT_DTYPE, as_gradient_of


class V1Optimizer(PlainOptimizer):
    """An optimizer of TensorFlow 1.

    Outside `tf.function` it runs as plain Python: its learning rate may be a function that
    is to be called for each update.
    """

    @staticmethod
    def fits(optimizer: Any) -> bool:
        """Say whether this is such an optimizer."""
        return isinstance(optimizer, tf.compat.v1.train.Optimizer)

    def __init__(self, optimizer: Any, variables: list[Any]) -> None:
        super().__init__(optimizer, variables)
        optimizer._create_slots(variables)

    def apply(self, strategy: Any, gradients: list[Any]) -> None:
        """Make one update of gradients that have been reduced over the replicas.

        Such an optimizer sums over the replicas, whatever it is told: each gets its share.
        """
        replicas = strategy.num_replicas_in_sync

        def on_each_replica() -> None:
            share = tf.constant(1 / replicas, WEIGHT_DTYPE) if replicas > 1 else None
            shares = [as_gradient_of(*pair, share) for pair in zip(self._variables, gradients)]
            self._optimizer.apply_gradients(list(zip(shares, self._variables)))

        strategy.run(on_each_replica)
