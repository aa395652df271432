"""What training changes beside weights: built before it starts, put back if it fails."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Sequence

from bigbatch.errors import ContextError, explain
from bigbatch.keras import compat
from bigbatch.keras.data import END_OF_DATA, without_optionals
from bigbatch.tf.snapshot import Snapshot

HALF_UPDATED = explain(
    received="an optimizer that ran out of memory in the middle of an update",
    expected="memory for the update itself, which is the same for every micro-batch size",
    fix="some weights are updated and some are not: load them from a checkpoint, and use an "
    "optimizer with fewer slots, a smaller model, or more memory",
)


class State:
    """The metrics, moving statistics and random state of a model.

    Weights and optimizers need no protection: they change last, and only if all went well.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._snapshot: Snapshot | None = None
        self.is_complete = False
        """Whether all state has been created and is protected."""

    def prepare(self, data: Any) -> bool:
        """Create all state there is, given data or its types; say whether there is more now.

        Done before anything is traced: a trace that creates variables is traced twice. A model
        that can be built only by training is built in the first trace, as in plain Keras, and
        is protected from the second call on.
        """
        keras = compat.keras_of(self._model)
        self.is_complete = keras.build(self._model, without_optionals(data))
        is_first = self._snapshot is None
        variables = keras.state_of(self._model)
        self.is_complete = self.is_complete or not is_first
        with compat.strategy_of(self._model).scope():
            self._snapshot = Snapshot(variables)
        return not is_first

    def taken(self) -> contextlib.AbstractContextManager[None]:
        """Keep the state as it is now; return a block, in a graph, that may fail."""
        assert self._snapshot is not None
        return self._snapshot.taken()

    def dropped(self, results: list[Any]) -> contextlib.AbstractContextManager[None]:
        """Say, in a graph, that when `results` are there the state is final.

        Returns:
            A block for the update, which cannot be undone.
        """
        assert self._snapshot is not None
        return self._snapshot.dropped(results)

    def include(self, variables: dict[int, Any]) -> None:
        """Keep these variables, by `id`, too: they may belong to no layer."""
        assert self._snapshot is not None
        others = [v for key, v in variables.items() if key not in self._snapshot.ids]
        if others:
            known = compat.keras_of(self._model).state_of(self._model)
            with compat.strategy_of(self._model).scope():
                self._snapshot = Snapshot([*known, *others])

    def put_back(self, variables: dict[int, Any], samples: Sequence[Any]) -> None:
        """Give some variables, by `id`, the values they had when the state was taken.

        On replicas that have samples now: on others nothing would move them on again.
        """
        assert self._snapshot is not None
        self._snapshot.put_back(variables, samples)

    @property
    def is_final(self) -> bool:
        """Whether the update has begun, after which nothing can be put back."""
        return self._snapshot is not None and self._snapshot.is_dropped

    @contextlib.contextmanager
    def undone_if(self, error: type[Exception]) -> Iterator[None]:
        """Return a block after which, if it fails with `error`, the state is as before.

        Unless it was the update itself that failed: then an error says that.
        """
        assert self._snapshot is not None
        self._snapshot.forget()
        try:
            yield
        except error as failure:
            if self.is_final:
                raise ContextError(HALF_UPDATED) from failure
            self.restore()
            raise

    def restore(self) -> None:
        """Put back what was taken and not dropped."""
        if self._snapshot is not None:
            self._snapshot.restore()

    @contextlib.contextmanager
    def protected(self) -> Iterator[None]:
        """Return a block after which, if it fails, the state is as it was when taken."""
        try:
            yield
        except END_OF_DATA:
            raise
        except BaseException:
            self.restore()
            raise
