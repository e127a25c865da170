"""A table that fails when it is walked: for work that must not take time with its size."""

from __future__ import annotations

from collections import OrderedDict
from typing import NoReturn, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Unwalked(OrderedDict[K, V]):
    """Finds, adds and removes entries, and yields none."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("all entries are walked")

    def items(self) -> NoReturn:
        raise AssertionError("all entries are walked")

    def values(self) -> NoReturn:
        raise AssertionError("all entries are walked")
