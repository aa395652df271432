"""What every test process needs: a quiet TensorFlow with two CPUs, and the strategy on them."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """What TensorFlow says while it starts would come after pytest's closing line."""
    error_stream = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(error_stream, 2)
        os.close(error_stream)


with silence():
    import tensorflow as tf

    import sampling
    from on_torch import ON_TORCH

    from stack import BACKEND, IS_KERAS_3, keras

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
tf.get_logger().setLevel("ERROR")

collect_ignore_glob = ["workers/*", "*_probe.py"]  # programs that tests run in other processes
if BACKEND != "torch":
    collect_ignore_glob += ["torch_contract/*", "torch_cases.py"]
if BACKEND != "jax":
    collect_ignore_glob += ["jax_contract/*", "jax_cases.py"]


def pytest_configure() -> None:
    """Fix the sample of cases here: processes that pytest-xdist starts get the environment."""
    os.environ[sampling.VARIABLE] = str(sampling.rotation())


def pytest_report_header() -> str:
    """Say how to run the same sample of cases again."""
    number = sampling.rotation()
    return f"sample of cases: {number}; again with {sampling.VARIABLE}={number} make test"


@pytest.fixture(scope="session")
def mirrored() -> tf.distribute.Strategy:
    """The strategy on two CPUs; one for all tests, as a second one would reuse its keys."""
    if BACKEND != "tensorflow":
        pytest.skip("strategies are of TensorFlow")
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(autouse=True)
def _seed() -> None:
    keras.utils.set_random_seed(0)


@pytest.fixture
def repeatable():
    """Random layers have state that can be put back: in Keras 2 if they are asked to."""
    if not IS_KERAS_3:
        keras.backend.experimental.enable_tf_random_generator()
    yield
    if not IS_KERAS_3:
        keras.backend.experimental.disable_tf_random_generator()


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    """Look for garbage once per module, and not again at what is left.

    TensorFlow keeps millions of objects of graphs; going through all of them again and again
    would take a fifth of the time.
    """
    yield
    gc.collect()
    gc.freeze()


def _runs_on_torch(item: pytest.Item) -> bool:
    """Say whether a test has to do with torch."""
    name = getattr(item, "originalname", item.name)
    return "torch_contract" in str(item.path) or name in ON_TORCH.get(item.path.stem, ())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first: they wait a lot, and none is left when everything else is done.

    Of tests with many cases most are left to the matrix, others on every day.
    """
    number = sampling.rotation()
    if os.environ.get("KERAS_BACKEND") == "torch":
        items[:] = [item for item in items if _runs_on_torch(item)]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        is_shared = BACKEND == "jax" and "jax_contract" not in str(item.path)
        # On JAX, a few of the tests that every backend has: each compiles its own programs.
        if is_shared and not sampling.is_chosen(item.name, 3, number):
            item.add_marker(pytest.mark.matrix)
        sampled = item.get_closest_marker("sampled")
        if sampled and not sampling.is_chosen(item.name, sampled.args[0], number):
            item.add_marker(pytest.mark.matrix)
