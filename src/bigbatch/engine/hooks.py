"""Connect a model's `fit` with a trainer, by attributes of the instance.

Keras honours them, and neither saves nor copies them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from typing import Any, Callable

from bigbatch.backends.keras import (
    backend_of,
    hidden_from_progress_bar,
    is_copied_for_scikit_learn,
    is_multi_worker,
    optimizers_of,
)
from bigbatch.core.report import wrapped
from bigbatch.core.size_search import AUTO
from bigbatch.engine.banner import Epoch, banner, warn_of_conflicts
from bigbatch.engine.settings import Setting
from bigbatch.engine.statistics import (
    UpdateStatistics,
    drop_statistics,
    set_statistics,
    statistics_of,
)
from bigbatch.engine.trainer import Trainer
from bigbatch.engine.trial import largest_trial_that_fits
from bigbatch.errors import ArgumentError, ContextError, explain

_HOOKS = "_bigbatch_hooks"


class _Hooks:
    """The methods of one model that accumulate."""

    def __init__(self, model: Any, setting: Setting) -> None:
        self._model = model
        self.setting = setting
        self._fit_arguments: dict[str, Any] | None = None
        self._is_quiet = self._is_eager = False
        self._backend = backend_of(model)
        self._epoch = Epoch(None, None, None)
        self.is_fitting = False
        """Whether `fit` is running."""
        self.is_training = False
        """Whether a batch of `fit` has been trained on."""
        self.batches_per_epoch: int | None = None
        """After how many batches an epoch of `fit` ends, if that is certain."""
        self.logs: Any = None
        """The logs of the last batch."""
        self.trainer: Trainer | None = None
        self.is_multi_worker = is_multi_worker(model)
        """Whether other processes train the model, too."""
        self._signature = inspect.signature(model.fit)
        self.methods = {
            "fit": functools.wraps(model.fit)(
                lambda *args, **kwargs: self.fit(*args, **kwargs)
            ),
            "make_train_function": self.make_train_function,
            **self._backend.methods(model, self),
        }
        if hasattr(model, "get_compile_config"):  # which Keras of TensorFlow 2.10 has not
            self.methods["get_compile_config"] = self.get_compile_config

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        return self.fit_with(type(self._model).fit, *args, **kwargs)

    def fit_with(self, fit: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do what `fit(model, *args, **kwargs)` does, and more."""
        if self.trainer is not None:
            self.trainer.flush()  # a window that `train_on_batch` has left open
        with contextlib.suppress(TypeError):  # which `fit` itself raises better
            # A custom `fit` may pass on arguments that it does not name.
            bound = self._signature.bind(*args, **kwargs).arguments
            self._fit_arguments = {**bound, **kwargs}
            self._is_quiet = not self._backend.is_first_worker(self._model) or (
                self._fit_arguments.get("verbose", "auto") == 0
            )
        self.is_fitting, self.is_training = True, False
        try:
            with hidden_from_progress_bar(self._model, self._hidden_logs):
                return self._backend.fit(self, fit, self._model, *args, **kwargs)
        except BaseException as error:
            if self.is_multi_worker and isinstance(error, self._backend.LOST_WORKER):
                raise _lost_worker(error) from error
            if self.trainer is not None:
                self.trainer.roll_back()
            size = self.setting.microbatch_size
            if isinstance(error, self._backend.OUT_OF_MEMORY) and isinstance(size, int):
                raise _out_of_memory(size, self._size_that_fits(size)) from error
            raise
        finally:
            self._fit_arguments = self.batches_per_epoch = None
            self.is_fitting = self.is_training = False
            statistics = statistics_of(self._model)
            if statistics is not None:
                statistics.logs.clear()
                statistics.hidden.clear()

    def _size_that_fits(self, too_large: int) -> int | None:
        """Return a size that would fit, if that can be found out now."""
        sample = self.trainer and self.trainer.sample
        if self.trainer is None or sample is None or too_large == 1:
            return None
        with contextlib.suppress(Exception):  # there is an error to report already
            found = largest_trial_that_fits(
                self.trainer,
                sample.repeated(2 * too_large),
                at_most=too_large - 1,
                until_it_fails=False,
            )
            return found.size
        return None

    @property
    def microbatch_size(self) -> int | None:
        """The samples per micro-batch, if they are known."""
        size = self.setting.microbatch_size
        if isinstance(size, int) or self.trainer is None:
            return size if isinstance(size, int) else None
        return getattr(self.trainer.feed, "size", None) or None  # zero is "all of a batch"

    def begin(self, batches: tuple[Any, Any, Any], certain: int | None) -> None:
        """Note what `fit`, or evaluation, is about to be given, and say it if it is `fit`.

        Args:
            batches: the fields of an `Epoch`.
            certain: after how many batches every epoch ends, if that is certain.
        """
        self.batches_per_epoch = certain
        if self._fit_arguments is not None:  # the first to come here is `fit`
            arguments, self._fit_arguments = self._fit_arguments, None
            self._epoch = Epoch(*batches)
            self._announce(self._epoch, arguments)

    def _announce(self, epoch: Epoch, arguments: dict[str, Any]) -> None:
        callbacks = arguments.get("callbacks") or ()
        callbacks = getattr(callbacks, "callbacks", callbacks)
        is_one = not isinstance(callbacks, (list, tuple))
        warn_of_conflicts(
            self._model, self.setting, epoch, [callbacks] if is_one else callbacks
        )
        self._say(banner(self._model, self.setting, epoch))

    def _say(self, text: str) -> None:
        if not self._is_quiet:
            print(wrapped(text))

    def make_train_function(self, force: bool = False) -> Any:
        model = self._model
        if model.train_function is None or force:
            check_optimizers(model)
            if self.trainer is not None:
                self.trainer.flush()  # what `train_on_batch` has left open
            with self._backend.eager_if_asked(model):
                self.trainer = self.setting.trainer(model, self._say)
                self.trainer.sparse.samples = self._samples_per_replica()
                self._is_eager = model.run_eagerly
            model.train_function = self._backend.train_function(model, self.train)
        assert self.trainer is not None
        self.trainer.feed.batches_per_epoch = self.batches_per_epoch
        return model.train_function

    def _samples_per_replica(self) -> int | None:
        """Return the samples of a batch on each replica, if they are known."""
        batch, steps = self._epoch.batch_size, self.setting.accumulation_steps
        if batch is None or callable(steps):
            return None
        return -(-batch * (steps or 1) // self._backend.replicas(self._model))

    def train(self, iterator: Any) -> dict[str, Any]:
        self.is_training = True
        with self._backend.eager_if_asked(self._model):
            is_other = self._model.run_eagerly != self._is_eager
        if is_other:  # `tf.config.run_functions_eagerly` has been called since
            self.make_train_function(force=True)
        assert self.trainer is not None
        with self._backend.training(self, self._model, iterator) as batches:
            self.logs = dict(self.trainer.train(batches))
        return self.logs

    def get_compile_config(self) -> Any:
        if is_copied_for_scikit_learn(self._model):
            warnings.warn(
                "bigbatch: SKLearnClassifier and SKLearnRegressor train a copy of a model, "
                "which does not accumulate. Pass them a function that makes the model and "
                "calls bigbatch.accumulate().",
                stacklevel=2,
            )
        return type(self._model).get_compile_config(self._model)

    def _hidden_logs(self) -> set[str]:
        statistics = statistics_of(self._model)
        return statistics.hidden if statistics else set()

    def extra_logs(self) -> dict[str, float]:
        """Return what callbacks of bigbatch add to the logs of an epoch."""
        statistics = statistics_of(self._model)
        return {name: read() for name, read in statistics.logs.items()} if statistics else {}


def attach(model: Any, setting: Setting) -> None:
    """Let a model train as `setting` says, with a trainer made anew when it is compiled."""
    hooks = _Hooks(model, setting)
    # Past `setattr`, which would take them for state of the model.
    vars(model).update(hooks.methods)
    vars(model)[_HOOKS] = hooks
    model.train_function = model.test_function = None


def detach(model: Any) -> None:
    """Undo `attach`."""
    hooks = vars(model).pop(_HOOKS, None)
    if hooks is not None:
        if hooks.trainer is not None:
            hooks.trainer.flush()
        for name in hooks.methods:
            vars(model).pop(name, None)
    drop_statistics(model)
    model.train_function = model.test_function = None


def is_attached(model: Any) -> bool:
    """Say whether a model accumulates."""
    return _HOOKS in vars(model)


def fit_with(model: Any, fit: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Train a model that accumulates with `fit`, which is not that of its class."""
    return vars(model)[_HOOKS].fit_with(fit, *args, **kwargs)


def size_of(model: Any) -> int | None:
    """Return the micro-batch size of a model, if there is one."""
    hooks = vars(model).get(_HOOKS)
    return hooks and hooks.microbatch_size


def setting_of(model: Any) -> Setting:
    """Return how a model accumulates, or would if it was asked to choose."""
    hooks = vars(model).get(_HOOKS)
    return hooks.setting if hooks else Setting(microbatch_size=AUTO)


def observe(model: Any, *, what: str, with_noise: bool) -> UpdateStatistics:
    """Let the updates of a model be noted; return where.

    Args:
        model: a model for which `accumulate` has been called.
        what: what asks for it, in messages.
        with_noise: whether the noise of gradients is noted, too.
    """
    hooks = vars(model).get(_HOOKS)
    if hooks is None:
        raise ContextError(
            explain(
                received=f"{what} for a model that does not accumulate",
                expected="a model that is trained with micro-batches",
                fix="call bigbatch.accumulate(model, ...) before fit()",
            )
        )
    if with_noise and hooks.setting.coupled is True:
        raise ContextError(
            explain(
                received=f"{what} for a model with coupled=True",
                expected="micro-batches that each have a loss of their own",
                fix=f"leave {what} out: a micro-batch has no gradient of its own then",
            )
        )
    if hooks.is_training:
        raise ContextError(
            explain(
                received=f"{what} for a model that is being trained",
                expected=f"{what} among the callbacks of fit()",
                fix=f"pass {what} to fit(), not to evaluate() or predict()",
            )
        )
    statistics = statistics_of(model)
    if statistics is None or with_noise > statistics.with_noise:
        statistics = statistics or UpdateStatistics(model)
        statistics.with_noise = with_noise
        set_statistics(model, statistics)
        model.train_function = None  # to be made anew, with this
    return statistics


def _out_of_memory(size: int, fitting: int | None) -> ContextError:
    example = f" (about {fitting} would fit)" if fitting else ""
    return ContextError(
        explain(
            received=f"microbatch_size={size}, with which the device runs out of memory",
            expected=f"micro-batches that fit{example}; nothing of the batch was applied",
            fix='pass microbatch_size="auto", or a smaller number',
        )
    )


def _lost_worker(error: BaseException) -> ContextError:
    reason = str(error).split("aborted by: ")[-1].split("\n")[0]
    return ContextError(
        explain(
            received=f"no answer from another worker ({reason})",
            expected="all workers of the MultiWorkerMirroredStrategy to train together",
            fix="read the last output of the other worker, then start all workers again; "
            "with keras.callbacks.BackupAndRestore they continue from the last epoch",
        )
    )


def check_optimizers(model: Any) -> None:
    """Raise if an optimizer that a model has by now accumulates by itself."""
    for optimizer in optimizers_of(model):
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if getattr(inner, "gradient_accumulation_steps", None):
            raise ArgumentError(
                explain(
                    received="an optimizer with gradient_accumulation_steps="
                    f"{inner.gradient_accumulation_steps}",
                    expected="an optimizer that updates whenever it is applied",
                    fix="remove gradient_accumulation_steps: bigbatch accumulates",
                )
            )
