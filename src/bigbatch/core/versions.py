"""Which versions of TensorFlow have what: asked when a name of `bigbatch` is first used."""

from __future__ import annotations

from bigbatch.errors import UnsupportedVersionError, explain

OLDEST = (2, 10)
"""The oldest TensorFlow 2 on which everything is there."""

OLDEST_KERAS_3 = (3, 11)
"""The oldest Keras 3 whose `fit` can accumulate."""

OLDEST_EAGER = (1, 14)
"""The oldest TensorFlow 1 on which there is `GradientAccumulator`, in eager code."""


def check_keras_3(keras: str) -> None:
    """Raise if `fit` of this version of Keras 3 cannot accumulate.

    Example:
        >>> check_keras_3("3.11.3")
    """
    if tuple(int(part) for part in keras.split(".")[:2]) < OLDEST_KERAS_3:
        nearest = ".".join(map(str, OLDEST_KERAS_3))
        raise UnsupportedVersionError(
            explain(
                received=f"a model of Keras {keras}",
                expected=f"Keras {nearest} or newer, or Keras 2",
                fix=f"the nearest that is supported is {nearest}: "
                f"pip install 'keras>={nearest}'",
            )
        )


def is_one(name: str, tensorflow: str) -> bool:
    """Say whether `bigbatch.<name>` is needed for TensorFlow 1; raise if there is none.

    Example:
        >>> is_one("GradientAccumulator", "1.14.0"), is_one("accumulate", "2.21.0")
        (True, False)
    """
    version = tuple(int(part) for part in tensorflow.split(".")[:2])
    if version >= OLDEST:
        return False
    if version[0] == 1 and name == "GradientAccumulator" and version >= OLDEST_EAGER:
        return True
    only = " (1.14 and 1.15 have bigbatch.GradientAccumulator only)" if version[0] == 1 else ""
    nearest = "1.14" if version < (2, 0) and name == "GradientAccumulator" else "2.10"
    raise UnsupportedVersionError(
        explain(
            received=f"bigbatch.{name} with TensorFlow {tensorflow}",
            expected=f"TensorFlow 2.10 or newer{only}",
            fix=f"the nearest that is supported is {nearest}: "
            f"pip install 'tensorflow=={nearest}.*'",
        )
    )
