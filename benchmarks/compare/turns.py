"""Engines that take turns on one core: all but one are stopped (SIGSTOP).

An idle worker of vLLM polls for a while without sleeping. Without turns, each of two engines on one
core has half of it.
"""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.harness.engine import EngineProcess
    from tests.harness.sidecars import SidecarProcess


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


def quiet(sidecar: SidecarProcess) -> None:
    """Wait until what earlier prompts left to do is done: a hit is measured, not a backlog."""
    sidecar.wait("no work is pending", lambda status: not any(status["pending"].values()))


def hit_places(
    engine: EngineProcess, sidecar: SidecarProcess, number: int
) -> Generator[Literal["host", "own"]]:
    """Where the hits of a round come from, in order; the engine is ready for each when it is named.

    An engine that was idle answers later, and the first hit of a round comes after a wait. So each
    place is the first in every second round.
    """
    quiet(sidecar)
    for place in ("own", "host") if number % 2 else ("host", "own"):
        if place == "host":
            engine.reset_prefix_cache()
        yield place
