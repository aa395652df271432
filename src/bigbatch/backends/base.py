"""The interface of a backend: one framework with one generation of Keras."""

from __future__ import annotations

import abc
import contextlib
from contextlib import AbstractContextManager as Block
from typing import Any, Callable, Iterable

from bigbatch.backends.defaults import Defaults
from bigbatch.backends.losses import LossesAndOptimizers
from bigbatch.backends.updates import SeveralUpdates
from bigbatch.core.exact import Storage


class Backend(Defaults, SeveralUpdates, LossesAndOptimizers):
    """A framework and the Keras on it; stateless, one for all models of the kind.

    "On each replica" is inside `strategy.run` on TensorFlow, and everywhere else where there
    is one replica. A `Block` is a context manager.
    """

    ops: Any
    """Operations on tensors: see `bigbatch.backends.tensorflow.ops`."""
    few_samples: Any
    """Functions of a few samples of a batch: see `bigbatch.backends.tensorflow.few_samples`."""
    data: Any
    """Functions of what `fit` hands over: see `bigbatch.backends.tensorflow.data`."""
    OUT_OF_MEMORY: type[Exception]
    LOST_WORKER: tuple[type[Exception], ...] = ()
    ACTIVITY_REGULARIZER = "activity_regularizer"
    """The attribute of a model that holds what regularises its outputs."""

    # Where code runs.

    @abc.abstractmethod
    def compiled(
        self, model: Any, function: Callable[..., Any], *, is_optimised: bool = True
    ) -> Callable[..., Any]:
        """Return a function as one graph, unless the model runs eagerly.

        `is_optimised` says whether the framework may take time to make the graph faster.
        """

    def eager_if_asked(self, model: Any) -> Block[None]:
        """Return a block in which a model runs eagerly if the framework is told to."""
        del model
        return contextlib.nullcontext()

    def explained(self, error: BaseException) -> Exception | None:
        """Return an error that says what to do, if that can be told from `error`."""
        del error
        return None

    @abc.abstractmethod
    def runs_in_python(self, model: Any) -> bool:
        """Say whether Python runs the micro-batches of a batch, not one graph."""

    @abc.abstractmethod
    def is_traced(self, model: Any) -> bool:
        """Say whether a micro-batch is traced before it runs, and so is known before."""

    @abc.abstractmethod
    def trace_now(self) -> Any:
        """Return what is being traced: the same object in the same trace."""

    @abc.abstractmethod
    def replicas(self, model: Any) -> int:
        """Return on how many replicas a model is trained, over all workers."""

    def shares_batches(self, model: Any) -> bool:
        """Say whether other replicas or processes have parts of the same batch."""
        return self.replicas(model) > 1

    @abc.abstractmethod
    def is_multi_worker(self, model: Any) -> bool:
        """Say whether a model is trained by several processes together."""

    @abc.abstractmethod
    def is_first_worker(self, model: Any) -> bool:
        """Say whether this process is the one that speaks for all."""

    @abc.abstractmethod
    def on_replicas(self, model: Any, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on each replica."""

    @abc.abstractmethod
    def local_results(self, model: Any, value: Any) -> list[Any]:
        """Return the values that a result or variable has on the replicas of this process."""

    @abc.abstractmethod
    def reduce(self, model: Any, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on each replica; return the sum, in one reduction."""

    @abc.abstractmethod
    def sum_over_replicas(self, values: list[Any]) -> list[Any]:
        """Return sums over all replicas; called on each of them."""

    @abc.abstractmethod
    def largest_of_all(self, model: Any, value: int) -> int:
        """Return the largest of the values that workers call this with."""

    # Micro-batches: how they run and where they are added up.

    @abc.abstractmethod
    def gradient_sums(self, model: Any, *, apart: bool) -> Any:
        """Return places to add up the gradients of one update, `None` if Python does that.

        See `GradientSums`. With `apart`, gradients of each micro-batch are looked at, too.
        """

    @abc.abstractmethod
    def accumulation(
        self,
        model: Any,
        compute: Callable[[Any, Any], Any],
        kept: Callable[[], list[Any]],
        before: Callable[[Any], Any],
        exact: Storage | None = None,
        made: Callable[[], list[Any]] = list,
    ) -> Any:
        """Return what runs a function on micro-batches and adds up: see `Accumulation`.

        `made` returns the `UpdateResults` that are assigned in micro-batches.
        """

    @abc.abstractmethod
    def two_passes(self, model: Any, kept: Callable[[], list[Any]]) -> Any:
        """Return what runs micro-batches twice, around a loss of them all: see `TwoPasses`."""

    @abc.abstractmethod
    def replica_vector(self, model: Any) -> Any:
        """Return a variable for a row of numbers, with a value for each replica."""

    @abc.abstractmethod
    def rollback(self, model: Any, others: Iterable[Any], weights: Iterable[Any] = ()) -> Any:
        """Return copies of the state of a model and of other variables: see `Rollback`.

        `weights` are variables that updates change before the last one of the batch.
        """

    @abc.abstractmethod
    def unchanged(self, variables: Iterable[Any]) -> Block[Callable[[], None]]:
        """Return a block after which variables are as before; it gives a way to go back."""

    @abc.abstractmethod
    def updating(
        self, model: Any, captured: list[Any], results: Any
    ) -> Block[Callable[..., None]]:
        """Return a block for updates once `results` are there; it gives what makes them.

        That is called with the gradients of each update, and optionally a function which is
        called with the number of each update that has been made.
        """

    @abc.abstractmethod
    def out_of_memory(self, message: str) -> Exception:
        """Return the error that says that a device has no memory left."""

    @abc.abstractmethod
    def table(self, *, rows: int, columns: int) -> Any:
        """Return numbers that a graph notes and Python reads: see `Table`."""

    @abc.abstractmethod
    def memory(self, variables: Iterable[Any]) -> Any:
        """Return the memory of the devices that variables are on: see `Memory`."""

    @abc.abstractmethod
    def sample(self, model: Any, data: Any, rows: int) -> Any:
        """Return a few samples of a batch, to try things with: see `Sample`."""

    def switch(self, model: Any) -> Any:
        """Return the one variable of a model, false on each replica, that graphs can read."""
        raise NotImplementedError

    def is_off(self, switch: Any) -> bool:
        """Say whether a switch is known to be false for as long as a micro-batch runs."""
        del switch
        return False

    # What Keras hands over, and how it is called.

    @abc.abstractmethod
    def methods(self, model: Any, hooks: Any) -> dict[str, Any]:
        """Return the methods of a model that are replaced while it accumulates."""

    @abc.abstractmethod
    def fit(
        self, hooks: Any, fit: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call `fit`, so that the hooks see epochs begin and end."""

    @abc.abstractmethod
    def training(self, hooks: Any, model: Any, iterator: Any) -> Block[Any]:
        """Return a block in which the train function runs; it gives the batches to train on."""

    @abc.abstractmethod
    def build(self, model: Any, data: Any) -> bool:
        """Create the state of a model for such data; say whether Keras can before training."""

    @abc.abstractmethod
    def is_compiled(self, model: Any) -> bool:
        """Say whether a model has a loss and an optimizer."""

    @abc.abstractmethod
    def batches_per_call(self, model: Any) -> int:
        """Return on how many batches the train function is to train when it is called."""

    @abc.abstractmethod
    def jit_compile(self, model: Any) -> bool:
        """Say whether micro-batches are to be compiled by XLA."""

    @abc.abstractmethod
    def train_step_of(self, model: Any) -> Callable[[Any], Any]:
        """Return the model's `train_step`, a Python function, as `fit` calls it."""

    @abc.abstractmethod
    def has_custom_train_step(self, model: Any) -> bool:
        """Say whether the model does not leave `train_step` to Keras."""

    @abc.abstractmethod
    def has_custom_compute_loss(self, model: Any) -> bool:
        """Say whether the model does not leave `compute_loss` to Keras."""

    @abc.abstractmethod
    def uses_inputs_after_call(self, model: Any) -> bool:
        """Say whether the model may look at its inputs when it computes loss or metrics."""

    @abc.abstractmethod
    def call(self, model: Any, x: Any, *, training: bool) -> Any:
        """Call the model as `train_step` does, in training or inference mode."""

    @abc.abstractmethod
    def unpacked(self, data: Any) -> tuple[Any, Any, Any]:
        """Return the inputs, targets and sample weights of a batch."""

    @abc.abstractmethod
    def packed(self, x: Any, y: Any, sample_weight: Any) -> Any:
        """Return a batch as `train_step` gets it."""

    # What a model is made of.

    @abc.abstractmethod
    def state_of(self, model: Any) -> list[Any]:
        """Return the variables that training changes beside weights: metrics, seeds, ..."""

    @abc.abstractmethod
    def native(self, variable: Any) -> Any:
        """Return the variable of the framework inside a variable of Keras."""

    @abc.abstractmethod
    def metrics_variables(self, model: Any) -> list[Any]:
        """Return the variables of the metrics of a model."""

    @abc.abstractmethod
    def results(self, model: Any) -> dict[str, Any]:
        """Return what the metrics of a model say, on this replica."""

    @abc.abstractmethod
    def result_of(self, metric: Any) -> Any:
        """Return what a metric says, on this replica."""

    def rows_of_samples(self, value: Any, samples: Any) -> Any:
        """Return a logged value with an entry for each sample as rows, to be listed.

        Their `values` are the entries. `None` for any other value, which is averaged.
        """
        del value, samples

    @abc.abstractmethod
    def metrics_on_replicas(self, model: Any) -> Block[None]:
        """Return a block in which results of metrics can be read in a loop on replicas."""

    @abc.abstractmethod
    def is_mean(self, metric: Any) -> bool:
        """Say whether a metric is the mean of what it is updated with."""

    @abc.abstractmethod
    def divides_total(self, metric: Any) -> bool:
        """Say whether the result of a metric is its `total`, divided by its `count`."""

    @abc.abstractmethod
    def compiled_metrics(self, model: Any) -> list[Any]:
        """Return the metrics given to `compile`, once built."""

    @abc.abstractmethod
    def update_compiled_metrics(
        self, model: Any, y: Any, y_pred: Any, sample_weight: Any
    ) -> None:
        """Update the metrics given to `compile`, as `train_step` does."""

    @abc.abstractmethod
    def function_of(self, metric: Any) -> Callable[[Any, Any], Any] | None:
        """Return the function whose mean a metric is, or `None` if it is no such metric."""

    @abc.abstractmethod
    def update_mean(self, metric: Any, value: Any) -> None:
        """Update the metric of a function with one number."""

    @abc.abstractmethod
    def layers_with_other_draws(self, model: Any, *, is_split: bool) -> list[Any]:
        """Return the layers that draw other numbers than with the full batch, in a mode."""

    @abc.abstractmethod
    def has_seeds(self, layer: Any) -> bool:
        """Say whether a layer draws random numbers with seeds of its own."""
