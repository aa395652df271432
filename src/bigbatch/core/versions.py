"""Which versions of TensorFlow have what: asked when a name of `bigbatch` is first used."""

from __future__ import annotations

from bigbatch.errors import UnsupportedVersionError

OLDEST = (2, 10)
"""The oldest TensorFlow 2 on which everything is there."""

OLDEST_KERAS_3 = (3, 10)
"""The oldest Keras 3 whose `fit` can accumulate."""

OLDEST_EAGER = (1, 14)
"""The oldest TensorFlow 1 on which there is `GradientAccumulator`, in eager code."""


def version_of(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version.

    Example:
        >>> version_of("2.15.0.post1")
        (2, 15)
    """
    return tuple(int(part) for part in text.split(".")[:2])


def check_keras_3(keras: str) -> None:
    """Raise if `fit` of this version of Keras 3 cannot accumulate.

    Example:
        >>> check_keras_3("3.10.0")
    """
    if version_of(keras) < OLDEST_KERAS_3:
        nearest = ".".join(map(str, OLDEST_KERAS_3))
        raise UnsupportedVersionError(
            f"fit cannot accumulate with Keras {keras}, only with Keras {nearest} or newer "
            f"and with Keras 2: pip install 'keras>={nearest}'."
        )


def is_one(name: str, tensorflow: str) -> bool:
    """Say whether `bigbatch.<name>` is needed for TensorFlow 1; raise if there is none.

    Example:
        >>> is_one("GradientAccumulator", "1.14.0"), is_one("accumulate", "2.21.0")
        (True, False)
    """
    version = version_of(tensorflow)
    if version >= OLDEST:
        return False
    if version[0] == 1 and name == "GradientAccumulator" and version >= OLDEST_EAGER:
        return True
    eager = version < (2, 0) and name == "GradientAccumulator"
    nearest = ".".join(map(str, OLDEST_EAGER if eager else OLDEST))
    raise UnsupportedVersionError(
        f"bigbatch.{name} does not run with TensorFlow {tensorflow}, the nearest supported "
        f"version is {nearest}: pip install 'tensorflow=={nearest}.*'."
    )
