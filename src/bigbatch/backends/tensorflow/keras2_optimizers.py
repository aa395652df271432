"""The optimizers of Keras 2: `tf_keras`, and `tf.keras` up to TensorFlow 2.15.

There are two kinds, `keras.optimizers.Optimizer` (in 2.10 `optimizers.experimental`) and
`keras.optimizers.legacy`. Private names of both are in here only, and are pinned by
`tests/test_compat_tf.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from bigbatch.backends.tensorflow.plain_optimizers import (
    PlainOptimizer,
    SameObject,
    refuse_unknown,
    settings_of,
)


class Keras2Optimizer(PlainOptimizer):
    """An optimizer of Keras 2, as it is since 2.11.

    It wants to be called on a replica, where it would sum over the replicas if it were not
    told that this has been done. What it clips is the gradient of all replicas.
    """

    _reduced: ClassVar[dict[str, bool]] = {"skip_gradients_aggregation": True}
    """How it is told that gradients have been summed over the replicas."""

    @staticmethod
    def fits(optimizer: Any) -> bool:
        """Say whether this is such an optimizer."""
        return all(hasattr(optimizer, name) for name in ("build", "aggregate_gradients"))

    def __init__(self, optimizer: Any, variables: list[Any]) -> None:
        super().__init__(optimizer, variables)
        self._inner = getattr(optimizer, "inner_optimizer", optimizer)
        self._create_state()
        # Nadam counts in Python what it updates: a trace would count once for all updates.
        self.is_traced = not hasattr(self._inner, "_u_product_counter")

    def settings(self) -> tuple[Any, ...]:
        """Return what is read while an update is traced."""
        return (*settings_of(self._optimizer), *settings_of(self._inner, "_learning_rate"))

    def apply(self, strategy: Any, gradients: list[Any]) -> None:
        """Make one update of gradients that have been reduced over the replicas."""
        pairs = list(zip(gradients, self._variables))
        # An own optimizer need not know the argument: it is passed where it says something.
        options = self._reduced if strategy.num_replicas_in_sync > 1 else {}

        def on_each_replica() -> None:
            self._optimizer.apply_gradients(pairs, **options)

        strategy.run(on_each_replica)

    def _create_state(self) -> None:
        inner = self._inner
        if not getattr(inner, "_built", False):
            inner.build(self._variables)
        if callable(inner._learning_rate) and not hasattr(inner, "_current_learning_rate"):
            inner.apply_gradients([])  # which is where Keras 2.10 creates that variable
        refuse_unknown(v for v in self._variables if inner._var_key(v) not in inner._index_dict)


class LegacyKeras2Optimizer(Keras2Optimizer):
    """An optimizer of Keras 2, as it was up to 2.10, and is in `keras.optimizers.legacy`."""

    _reduced: ClassVar[dict[str, bool]] = {"experimental_aggregate_gradients": False}

    @staticmethod
    def fits(optimizer: Any) -> bool:
        """Say whether this is such an optimizer."""
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        return all(hasattr(inner, name) for name in ("_create_all_weights", "_hyper"))

    def settings(self) -> tuple[Any, ...]:
        """Return what is read while an update is traced."""
        hyper = sorted(self._inner._hyper.items())
        return (*super().settings(), *((name, SameObject(value)) for name, value in hyper))

    def _create_state(self) -> None:
        self._inner._create_all_weights(self._variables)
