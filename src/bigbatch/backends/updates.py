"""The interface of a backend for models that make several updates in one `train_step`."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager as Block
from typing import Any, Callable, Iterable

from bigbatch.core.passes import Order


class SeveralUpdates:
    """The part of a backend that says what depends on updates.

    By default nothing is known of it, and a `train_step` may make one update only.
    """

    TELLS_ORDER = False
    """Whether `order_of_updates` can be known."""

    def place_in_trace(self) -> int | None:
        """Return how many operations have been traced; `None` where nothing is traced."""
        return None

    def noting_reads(self) -> Block[Any]:
        """Return a block in which `order_of_updates` is known without a trace."""
        return contextlib.nullcontext()

    def try_step(
        self, model: Any, run: Callable[[Any], Any], data: Any, put_back: Callable[[], None]
    ) -> Any:
        """Run a micro-batch that is not traced, so that `order_of_updates` is known.

        Args:
            model: the model.
            run: runs a micro-batch.
            data: the micro-batch.
            put_back: undoes what has been run.

        Returns:
            What else it told of micro-batches, for the `learn` of an `Accumulation`.
        """
        del model, put_back
        with self.noting_reads():
            run(data)

    def order_of_updates(
        self,
        model: Any,
        captured: list[tuple[Any, list[Any]]],
        values: Any,
        apart: Any,
        same: Any,
    ) -> Order | None:
        """Return what a micro-batch computes with weights that it has updated before.

        Args:
            model: the model.
            captured: the updates, each with the gradients that it was given.
            values: what the micro-batch gives beside gradients.
            apart: variables in which gradients are added up.
            same: a tensor that is the same for all micro-batches of a batch.

        Returns:
            `None` if that is not known.
        """
        del model, captured, values, apart, same
        return None

    def note_update(self, captured: Any) -> None:
        """Note an update that is captured, where the `train_step` makes it."""
        del captured

    def shows_order_later(self, model: Any, same: Any) -> bool:
        """Say whether `order_of_trace` will know what `order_of_updates` does not."""
        del model, same
        return False

    def order_of_trace(self, accumulation: Any) -> Order | None:
        """Return what `order_of_updates` does, of micro-batches that have been traced."""
        del accumulation
        return None

    def discarding(self, model: Any, updates: Iterable[Any]) -> Block[Any]:
        """Return a block that leaves nothing in a graph; run eagerly, it changes no weights.

        Args:
            model: the model.
            updates: the `UpdateResults` of all updates, which tell which weights.
        """
        del model, updates
        return contextlib.nullcontext()

    def update_results(
        self, model: Any, variables: Iterable[Any], before: Callable[[Any], Any]
    ) -> Any:
        """Return a place for the values that an update gives variables: `UpdateResults`."""
        raise NotImplementedError

    def build_optimizers(self, model: Any, captured: list[Any]) -> list[Any]:
        """Create the variables of optimizers; return what `updating` applies them with."""
        raise NotImplementedError

    def changed_by_apply(self, optimizer: Any) -> list[Any]:
        """Return the variables of an optimizer that its `apply` may change."""
        raise NotImplementedError
