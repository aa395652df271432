"""Names of Keras on torch that are not public; `tests/test_compat_torch.py` pins them."""

from __future__ import annotations

import importlib
from typing import Any

import keras
from torch.multiprocessing.reductions import StorageWeakRef

BY_SHAPE = ("uniform", "randint")
"""The functions, beside `normal`, that draw a shape from a generator made of a seed."""

WITH_GLOBAL_SEED = ("gamma", "binomial", "beta")
"""The functions that draw a shape from the generator of torch, with a seed set for a while."""


def address_of(storage: Any) -> int:
    """Return where the memory of a tensor is described."""
    return storage._cdata


def weak_reference_to(storage: Any) -> Any:
    """Return what keeps `address_of` from being used again, but not the memory itself."""
    return StorageWeakRef(storage)


def random_module() -> Any:
    """Return the module through which all layers draw."""
    return importlib.import_module("keras.src.backend.torch.random")


def drawn_seed(seed: Any) -> int:
    """Return a seed as a number, advancing the generator of seeds that it is."""
    return int(random_module().draw_seed(seed).sum()) & 0x7FFFFFFF


def seed_generators_of(layer: Any) -> list[Any]:
    """Return the generators of seeds that a layer has itself."""
    return layer._seed_generators


def follows_torch(noise_shape: Any, seed: Any) -> bool:
    """Say whether dropout draws from the generator of torch, as it does without a seed."""
    if noise_shape is not None:
        return False
    is_generator = isinstance(seed, keras.random.SeedGenerator)
    return seed is None or (is_generator and seed._initial_seed is None)


def global_seed_state() -> list[Any]:
    """Return the state of the generator of seeds of Keras, if there is one by now."""
    state, generators = _global_seeds()
    generator = state.get_global_attribute(generators.GLOBAL_SEED_GENERATOR)
    return [] if generator is None else [generator.state.value]


def make_global_seeds() -> None:
    """Make the generator of seeds of Keras, as the first draw without a seed does."""
    _global_seeds()[1].global_seed_generator()


def forget_global_seeds() -> None:
    """Let there be no generator of seeds of Keras, as before the first draw without a seed."""
    state, generators = _global_seeds()
    state.set_global_attribute(generators.GLOBAL_SEED_GENERATOR, None)


def _global_seeds() -> tuple[Any, Any]:
    module = importlib.import_module
    return module("keras.src.backend.common.global_state"), module(
        "keras.src.random.seed_generator"
    )


def schema_of(operation: Any) -> Any:
    """Return the name and the arguments of an operation that a dispatch mode sees."""
    return operation._schema
