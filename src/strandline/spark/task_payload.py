"""Payloads that the driver sends to executors, with its version of the package: another version refuses them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from strandline.errors import UnsupportedVersion
from strandline.spark.failures import unpicklable


def packed(value: object, what: str) -> bytes:
    """The value for executors, also with functions that a user wrote in a notebook; ``what`` names it in an error."""
    from pyspark import cloudpickle

    try:
        inner = bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever the classes of the user's objects raise
        raise unpicklable(what, error) from error
    return pickle.dumps((version("strandline"), inner))


def unpacked(payload: bytes) -> Any:
    """The value, in an executor; ``UnsupportedVersion`` if the driver has another version of the package."""
    package, inner = pickle.loads(payload)  # noqa: S301 - written by our own driver
    check_version(package)
    return pickle.loads(inner)  # noqa: S301 - written by our own driver


def check_version(package: str) -> None:
    """``UnsupportedVersion`` unless this process has the driver's version of the package."""
    mine = version("strandline")
    if package != mine:
        raise UnsupportedVersion(
            f"The driver has version {package} of strandline and an executor has {mine}: install the same on both."
        )


class SameVersion:
    """Base of the readers and writers that Spark sends to executors: only the same version unpickles them."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, bytes]]:
        # The state is bytes within: it is unpickled after the versions were compared, as its classes may differ.
        return _restored, (version("strandline"), pickle.dumps((type(self), self.__dict__)))


def _restored(package: str, state: bytes) -> Any:
    check_version(package)
    kind, fields = pickle.loads(state)  # noqa: S301 - written by our own driver
    found = kind.__new__(kind)
    found.__dict__.update(fields)
    return found
