"""`kvlake doctor`: what would keep a sidecar from starting here, or an engine from its cache.

Owns the order of the checks. The checks of a start are serve's own functions (`startup.py`).

Invariant: nothing on the node is changed. No directory, file or lock is left, and a running sidecar
is not disturbed. An object is written to the store, and deleted; a port is bound for a moment.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from sidecar.cli.console import load_config, say
from sidecar.cli.doctor.engines import engine_findings
from sidecar.cli.doctor.findings import Check, CheckResult
from sidecar.cli.doctor.gpus import gpu_findings
from sidecar.cli.doctor.startup import numa_finding, startup_findings, store_finding
from sidecar.exits import Exit
from sidecar.logs import LOGGER

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from sidecar.config.model import Config

__all__ = ["Check", "CheckResult", "examine", "main", "numa_finding"]


def main(options: argparse.Namespace) -> int:
    """Print every check; the answer is a no if any of them failed."""
    # The checks say the same as the log.
    logging.getLogger(LOGGER).setLevel(logging.ERROR)
    found = anyio.run(examine, load_config(options.config), options.command)
    for one in found:
        say(str(one))
    return Exit.NO if any(one.verdict is CheckResult.FAIL for one in found) else Exit.OK


async def examine(config: Config, command: Sequence[str] = ()) -> list[Check]:
    """Every check, each after those that it depends on. `command` starts an engine."""
    return [
        *startup_findings(config),
        await store_finding(config),
        numa_finding(config),
        *gpu_findings(config),
        *engine_findings(config, command),
    ]
