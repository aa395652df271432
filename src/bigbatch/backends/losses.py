"""The interface of a backend for losses, optimizers and batch normalisation."""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager as Block
from typing import Any, Callable

from bigbatch.errors import ArgumentError, explain


class LossesAndOptimizers(abc.ABC):
    """The part of the interface for losses, optimizers and batch normalisation."""

    @abc.abstractmethod
    def compile_loss_of(self, model: Any) -> Any:
        """Return the object that adds up the losses given to `compile`, or `None`."""

    @abc.abstractmethod
    def number_of_terms(self, model: Any) -> int:
        """Return of how many losses given to `compile` the loss is the sum, once built."""

    @abc.abstractmethod
    def compute_loss(self, model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        """Compute the loss as `train_step` does."""

    @abc.abstractmethod
    def compute_compiled_loss(self, model: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        """Compute the losses given to `compile`, and nothing else."""

    @abc.abstractmethod
    def name_of_loss(self, model: Any) -> str:
        """Return what the loss of a model is called in messages."""

    @abc.abstractmethod
    def losses_of_layers(self, model: Any) -> list[Any]:
        """Return what layers have added to the loss in the last call, without regularisers."""

    @abc.abstractmethod
    def changing_added_losses(
        self, model: Any, change: Callable[[Any, int, Any], Any]
    ) -> Block[None]:
        """Return a block in which layers add `change(layer, position, loss)` to the loss."""

    @abc.abstractmethod
    def regularisers_of(self, model: Any) -> list[Any]:
        """Return the part of the loss that depends on weights only."""

    @abc.abstractmethod
    def add_loss(self, model: Any, loss: Any) -> None:
        """Add to the loss of a model, while it is called."""

    @abc.abstractmethod
    def without_losses(self, model: Any) -> Block[None]:
        """Return a block in which layers have added nothing to the loss when made."""

    @abc.abstractmethod
    def elements(self, loss: Any, y_true: Any, y_pred: Any) -> tuple[Any, list[Any]] | None:
        """Return the elements that a loss reduces and their masks; `None` if it is custom."""

    @abc.abstractmethod
    def value_of(self, loss: Any, y_true: Any, y_pred: Any, weight: Any, by: Any) -> Any:
        """Return what a loss says of samples, given what it divides by."""

    @abc.abstractmethod
    def divides_by_replicas(self, replicas: int) -> int:
        """Return what a term of the loss has been divided by when it leaves its loss."""

    @abc.abstractmethod
    def watching_loss(
        self,
        model: Any,
        replace: Callable[[Any], Any],
        record: Callable[[Any, Any], None],
        note: Callable[[Any], None] = lambda _: None,
    ) -> Block[None]:
        """Return a block in which each compiled loss is replaced by `replace(loss)`.

        `note` is called with their sum, `record` with what their metrics would be updated with.
        """

    @abc.abstractmethod
    def losses_of_one_replica(
        self, model: Any, replicas: int, samples: Any = None
    ) -> Block[None]:
        """Return a block in which a replica's loss is its own mean, of `samples` if given."""

    # Optimizers.

    @abc.abstractmethod
    def is_optimizer(self, value: Any) -> bool:
        """Say whether a value is an optimizer."""

    @abc.abstractmethod
    def name_of(self, optimizer: Any) -> str:
        """Return the name of an optimizer."""

    @abc.abstractmethod
    def capturing(
        self,
        optimizer: Any,
        apply: Callable[[list[Any], list[Any]], None],
        weigh: Callable[[Any], Any],
    ) -> Block[None]:
        """Return a block in which an optimizer calls `apply(gradients, variables)` instead.

        `weigh` is called with the loss, before it is differentiated, and returns it.
        """

    @abc.abstractmethod
    def shaped(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return gradients with the static shapes of their variables."""

    @abc.abstractmethod
    def scales_loss(self, optimizer: Any) -> bool:
        """Say whether an optimizer scales the loss, for float16."""

    @abc.abstractmethod
    def scale_loss(self, optimizer: Any, loss: Any) -> Any:
        """Return the loss as an optimizer wants it to be differentiated."""

    @abc.abstractmethod
    def unscaled(self, optimizer: Any, gradients: list[Any]) -> list[Any]:
        """Return gradients of a scaled loss as `apply` takes them."""

    @abc.abstractmethod
    def scale_of_gradients(self, optimizer: Any) -> Any:
        """Return the factor that gradients have when `apply` takes them."""

    @abc.abstractmethod
    def optimizer_variables(self, optimizer: Any) -> list[Any]:
        """Return all variables of an optimizer."""

    # Batch normalisation.

    @abc.abstractmethod
    def is_batch_norm(self, layer: Any) -> bool:
        """Say whether a layer normalises with the statistics of a batch."""

    @abc.abstractmethod
    def alone(self, layer: Any) -> Block[None]:
        """Return a block in which a layer takes the statistics of its own replica."""

    @abc.abstractmethod
    def choosing_moments(
        self, layer: Any, choose: Callable[[Any, Any], tuple[Any, Any]]
    ) -> Block[None] | None:
        """Return a block in which a layer normalises with `choose(mean, variance)`.

        `None` if the layer does not let its moments be seen.
        """

    @abc.abstractmethod
    def clear_statistics(self, layer: Any) -> None:
        """Make the moving statistics such that a momentum of zero replaces them."""

    @abc.abstractmethod
    def bias_of_variance(self, layer: Any, count: Any) -> Any:
        """Return the biased variance over what a layer takes for the variance of elements."""

    @abc.abstractmethod
    def knows_mask(self, layer: Any) -> bool:
        """Say whether a layer leaves out of its statistics what is masked."""

    def refuse_exact(self, model: Any, layers: list[Any]) -> None:
        """Raise if layers cannot normalise with the statistics of the whole batch."""
        del model, layers
        raise ArgumentError(
            explain(
                received='batch_norm="exact" with this backend or version of Keras',
                expected="Keras 3 on TensorFlow or JAX",
                fix='use batch_norm="pooled", which pools the moving statistics',
            )
        )

    def statistics_of_batch(self, layer: Any) -> Block[None]:
        """Return a block in which a layer takes the statistics of the whole batch."""
        raise NotImplementedError
