"""Base class for resources that a ``with`` block closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A context manager that is closed when its block ends, in any way."""

    @abstractmethod
    def close(self) -> None:
        """Release its resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
