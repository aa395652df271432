"""Micro-batches as large as the device has memory for, in loops without Keras."""

from __future__ import annotations

from typing import Any, Callable, Iterable

import tensorflow as tf

from bigbatch.backends.tensorflow import replicas
from bigbatch.backends.tensorflow.batch import Batch
from bigbatch.backends.tensorflow.dependence import changed_in
from bigbatch.backends.tensorflow.memory import Memory
from bigbatch.backends.tensorflow.rollback import way_back
from bigbatch.backends.tensorflow.variables import native
from bigbatch.core.size_search import (
    choices_of,
    largest_that_fits,
    with_smaller_ones,
)
from bigbatch.errors import ContextError, explain

_CALLS = 3
"""How often a size is tried: operations take more in some orders than in others."""


class AutoSize:
    """Calls a function of a batch with micro-batches of a size that it chooses.

    The size is chosen at the first call, from the peak memory of trials, and halved if a call
    runs out of memory all the same. Variables that the function changes, such as the state of
    random layers, are then put back.

    Args:
        function: called in a graph with the arguments of a batch, a size, and a function to
            call with the graph of a micro-batch; returns tensors.
        constant: variables that it does not change, whatever it looks like from outside.
    """

    def __init__(self, function: Callable[..., Any], constant: Iterable[Any]) -> None:
        self._constant = set(map(id, constant))
        self._graphs: list[Any] = []
        self._function = tf.function(
            lambda arguments, size: function(arguments, size, self._graphs.append)
        )
        self.microbatch_size: int | None = None
        """The samples per micro-batch, once they are chosen."""

    def __call__(self, batch: Batch) -> Any:
        """Return what the function returns for the batch."""
        # Traced once, for batches and micro-batches of any number of samples.
        types = batch.specs_of_arguments(), tf.TensorSpec([], tf.int32)
        graph = self._function.get_concrete_function(*types).graph
        memory = Memory(variable.device for variable in graph.variables)
        # Seen from outside a loop, everything that is used in it may change.
        changed = (variable for one in self._graphs or [graph] for variable in changed_in(one))
        put_back = way_back(one for one in changed if id(one) not in self._constant)

        def run(size: int) -> None:
            for _ in range(_CALLS):
                self._run(batch, size, 2 * size)

        if self.microbatch_size is None:
            self.microbatch_size = largest_that_fits(memory, batch.count, run, put_back).size
        result, self.microbatch_size = with_smaller_ones(
            lambda size: self._run(batch, size, batch.count),
            self.microbatch_size,
            out_of_memory=tf.errors.ResourceExhaustedError,
            memory=lambda: memory,
            put_back=put_back,
            largest=lambda: batch.count,
        )
        return result

    def _run(self, batch: Batch, size: int, count: int) -> Any:
        arguments = batch.arguments(batch.rows(0, min(count, batch.count)))
        return self._function(arguments, tf.constant(size))


def auto_size(
    owner: Any, forward: Any, variables: Any, function: Callable[..., Any]
) -> AutoSize:
    """Return the size that has been, or will be, chosen for a function of the user's.

    It is kept with that function, or the object whose method it is: what is called again finds
    it again, and it goes with them.

    Args:
        owner: the user's function.
        forward: another one that it is used with, or `None`.
        variables: what it is differentiated by.
        function: what computes, if it is new; see `AutoSize`.
    """
    if not tf.executing_eagerly() or replicas.inside_one_of_many():
        where = "strategy.run" if replicas.inside_one_of_many() else "a tf.function"
        raise ContextError(
            explain(
                received=f'microbatch_size="auto" inside {where}',
                expected="a call from Python, which can try sizes and begin again",
                fix="call it outside (it compiles loss_fn itself), or pass a number",
            )
        )
    choices = choices_of(owner)
    places = repr(tf.nest.map_structure(id, variables))
    key = (getattr(owner, "__name__", ""), id(forward), places)
    if key not in choices:
        choices[key] = AutoSize(function, map(native, tf.nest.flatten(variables)))
    return choices[key]
