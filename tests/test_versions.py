"""What is not supported says so when it is first used: the versions seen, and the nearest."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bigbatch.core.versions import check_keras_3, is_one
from bigbatch.errors import UnsupportedVersionError


@pytest.mark.parametrize("version", ["2.10.0", "2.15.0.post1", "2.21.0-rc1", "3.0.0"])
def test_tensorflow_2(version):
    assert not is_one("accumulate", version)
    assert not is_one("GradientAccumulator", version)


def test_tensorflow_1():
    assert is_one("GradientAccumulator", "1.14.0")
    assert is_one("GradientAccumulator", "1.15.5")


def test_keras_3():
    for version in ("3.10.0", "3.15.1", "4.0.0"):
        check_keras_3(version)
    with pytest.raises(UnsupportedVersionError, match=r"Keras 3\.9\.2, only .* 3\.10 or newer"):
        check_keras_3("3.9.2")


@pytest.mark.parametrize(
    ("name", "version", "nearest"),
    [
        ("accumulate", "1.14.0", "2.10"),
        ("value_and_gradients", "1.15.0", "2.10"),
        ("GradientAccumulator", "1.13.1", "1.14"),
        ("GradientAccumulator", "2.0.0", "2.10"),
        ("accumulate", "2.9.3", "2.10"),
    ],
)
def test_anything_else_is_refused(name, version, nearest):
    with pytest.raises(UnsupportedVersionError) as error:
        is_one(name, version)
    assert str(error.value) == (
        f"bigbatch.{name} does not run with TensorFlow {version}, the nearest supported "
        f"version is {nearest}: pip install 'tensorflow=={nearest}.*'."
    )


def test_it_is_asked_when_a_name_is_first_used():
    program = (
        "import sys, types\n"
        "sys.modules['tensorflow'] = types.SimpleNamespace(__version__='2.9.3')\n"
        "import bigbatch\n"
        "bigbatch.piecewise, bigbatch.NoiseScaleEstimator, bigbatch.Plan\n"
        "try: bigbatch.accumulate\n"
        "except ImportError as error: print(error)"
    )
    run = [sys.executable, "-c", program]
    output = subprocess.run(run, capture_output=True, check=True, text=True).stdout
    assert output.startswith("bigbatch.accumulate does not run with TensorFlow 2.9.3, ")
