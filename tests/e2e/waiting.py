"""How to wait for what the machine may be slow to do."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_SECONDS_MAX: Final = 60.0


def until(what: str, condition: Callable[[], bool], seconds: float = WAIT_SECONDS_MAX) -> None:
    """Wait until a condition holds."""
    assert until_or_not(condition, seconds), f"{what}: not in {seconds:.0f} s"


def until_or_not(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds; False if it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
