"""`kvlake doctor`: what of this machine a sidecar or an engine will stumble over.

Owns the order of the checks. Those of a start are serve's own: the same functions, the same
sentences (`startup.py`). Does not own the configuration, nor how lines are printed (`cli/`).

Invariant: nothing on the node is changed. No directory, file or lock is left, and a sidecar that
runs goes on. An object is written to the store, and deleted; a port is bound for a moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.cli.doctor.engines import engine_findings
from sidecar.cli.doctor.findings import Check, CheckResult
from sidecar.cli.doctor.gpus import gpu_findings
from sidecar.cli.doctor.startup import numa_finding, startup_findings, store_finding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.config.model import Config

__all__ = ["Check", "CheckResult", "examine", "numa_finding"]


async def examine(config: Config, command: Sequence[str] = ()) -> list[Check]:
    """Every check, in the order in which one rests on another. `command` starts an engine."""
    return [
        *startup_findings(config),
        await store_finding(config),
        numa_finding(config),
        *gpu_findings(config),
        *engine_findings(config, command),
    ]
