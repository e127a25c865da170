"""A sidecar in a process of its own, for tests and benchmarks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from sidecar.demo.processes import POOLS, DemoSidecar, ProcessFailed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["ERROR_LINE", "POOLS", "STOOD_STILL", "ProcessFailed", "SidecarProcess"]

ERROR_LINE: Final = re.compile(r"\b(ERROR|CRITICAL)\b|^Traceback")
STOOD_STILL: Final = 'kvlake.server: not ready why="the event loop stood still for '
"""In the line of an error that is the machine's own: it paused."""


class SidecarProcess(DemoSidecar):
    """The demo's sidecar; `program` are the arguments of Python that start `kvlake`."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        *,
        program: Sequence[str] = DemoSidecar.program,
    ) -> None:
        super().__init__(folder, config)
        self.program = program
