"""Engines that take turns on one core: all but one are stopped (SIGSTOP).

An idle worker of vLLM polls for a while without sleeping. Without turns, each of two engines on one
core has half of it.
"""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.harness.engine import EngineProcess


def stop(engine: EngineProcess) -> None:
    """Stop all processes of an engine."""
    os.killpg(engine.process.pid, signal.SIGSTOP)


def resume(engine: EngineProcess) -> None:
    """Let them run again; an engine ends only if it runs."""
    os.killpg(engine.process.pid, signal.SIGCONT)


@contextmanager
def awake(engine: EngineProcess) -> Generator[None]:
    """Let an engine run that is stopped otherwise."""
    resume(engine)
    try:
        yield
    finally:
        stop(engine)
