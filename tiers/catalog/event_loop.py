"""Long work on an event loop, in turns with others.

Owns running a generator that does one slice of its work between two `yield`s: with everybody else
getting a turn at each, or at once, where nobody waits. Does not own the work, nor how long a slice
of it is: a fraction of a millisecond.

A thread would not do for what is many small objects: it needs the GIL for all of it, and whoever
else wants that waits for the interpreter's switch interval each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar, TypeVarTuple

import anyio.lowlevel
import anyio.to_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

FEW_ROWS: Final = 256
"""Sorting and merging so many takes a fraction of a millisecond."""


async def aside(num_rows: int, work: Callable[[*Ts], T], *given: *Ts) -> T:
    """`work(*given)` in a thread, or where it is for few rows, here and now."""
    if num_rows > FEW_ROWS:
        return await anyio.to_thread.run_sync(work, *given)
    await anyio.lowlevel.checkpoint()
    return work(*given)


async def in_turns(work: Generator[None, None, T]) -> T:
    """What it comes to; all other tasks get a turn after each slice."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await anyio.lowlevel.checkpoint()


def at_once(work: Generator[None, None, T]) -> T:
    """What it comes to, now."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
