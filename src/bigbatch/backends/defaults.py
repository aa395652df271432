"""What a backend may do in another way than most."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager as Block
from typing import Any, Callable

from bigbatch.core.sparse_gradients import SparseGradients


class Defaults:
    """The part of the interface that a backend need not have, with what is done then."""

    def update_function(
        self,
        model: Any,
        update: Callable[[Any], Any],
        others: list[Any],
        *,
        overwrites: bool = True,
    ) -> Callable[[Any], Any]:
        """Return a function that updates a model, and other variables, as one graph.

        It may overwrite the memory of weights, unless the values of before are still needed.

        It is called with what `reduce` returned. Where one graph holds the micro-batches, too,
        it is the function itself.
        """
        del model, others, overwrites
        return update

    def train_function(
        self, model: Any, train: Callable[[Any], dict[str, Any]]
    ) -> Callable[..., Any]:
        """Return what Keras calls for the next batches, given what trains on an iterator."""
        del model
        return train

    def loss_of_whole_batch(self, model: Any, running: Callable[..., Any]) -> Any:
        """Return what makes both passes by itself; `None` if `two_passes` is to be used.

        Its `run(data, size)` returns the gradients of the weights, sums of moments, and logs.
        `running(parts)` returns a block in which the model is called on one of that many
        parts; it gives moments.
        """
        del model, running
        return None

    def processes(self, model: Any) -> int:
        """Return how many processes have parts of each batch, if each does as one replica.

        What an accumulation returns is the sum over all of them.
        """
        del model
        return 1

    def on_own_devices(self, model: Any) -> Block[None]:
        """Return a block in which the variables of a model are those of this process alone."""
        del model
        return contextlib.nullcontext()

    def trying_two_passes(self, passes: Any, count: int) -> Block[None]:
        """Return a block in which two passes are tried on `count` samples, to be undone."""
        del passes, count
        return contextlib.nullcontext()

    def remarks_of_two_passes(self, passes: Any) -> list[str]:
        """Return what to say of how two passes run, once they have run."""
        del passes
        return []

    def knows_bytes(self, accumulation: Any, data: Any, size: int) -> bool:
        """Note what micro-batches take, for `memory`, if that is known without running them."""
        del accumulation, data, size
        return False

    def totals_so_far(self, accumulation: Any) -> Any:
        """Return what has been added up, as far as it is logged before a batch is complete."""
        return accumulation.value()

    def reading_function(self, model: Any, read: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that reads metrics, made such that calling it takes little time."""
        del model
        return read

    def effects_of(self, graph: Any) -> set[str]:
        """Return what a traced function does that cannot be undone."""
        del graph
        return set()

    def draws_by_total(self, accumulation: Any) -> bool:
        """Say whether random numbers of micro-batches depend on the samples of the batch."""
        del accumulation
        return False

    def adds_up_rows(self, optimizer: Any) -> bool:
        """Say whether an optimizer makes the same update from rows and from their sum."""
        del optimizer
        return True  # where no gradient is sparse

    def summed_rows(
        self,
        sparse: SparseGradients,
        optimizer: Any,
        variables: list[Any],
        gradients: list[Any],
    ) -> list[bool]:
        """Say for each gradient whether it has rows that are to be summed into one tensor.

        Notes in `sparse` what there is to know of the tables.
        """
        del sparse, optimizer, variables
        return [False] * len(gradients)

    def remarks(self, accumulation: Any) -> list[str]:
        """Return what to say of how micro-batches run, once they have been traced."""
        del accumulation
        return []

    def in_one_graph(self, model: Any) -> Block[None]:
        """Return a block in which no part of a `train_step` runs in a graph of its own.

        Gradients could not get out of that, and Python code would run only the first time.
        """
        del model
        return contextlib.nullcontext()

    def without_effects(self, model: Any) -> Block[None]:
        """Return a block in which a model is called for shapes and masks, and nothing else.

        In a graph what is not needed is pruned.
        """
        del model
        return contextlib.nullcontext()
