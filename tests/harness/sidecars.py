"""A sidecar in a process of its own, for tests and benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidecar.demo.processes import POOLS, DemoSidecar, ProcessFailed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["POOLS", "ProcessFailed", "SidecarProcess"]


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
