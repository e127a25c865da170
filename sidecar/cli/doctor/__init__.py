"""`kvlake doctor`: what would keep a sidecar from starting here, or an engine from its cache.

Owns the order of the checks. The checks of a start are serve's own functions (`startup.py`).

Invariant: nothing on the node is changed. No directory, file or lock is left, and a running sidecar
is not disturbed. An object is written to the store, and deleted; a port is bound for a moment.
"""

from __future__ import annotations

import logging

import anyio

from sidecar.cli.console import Options, load_config, say
from sidecar.cli.doctor.engines import engine_findings
from sidecar.cli.doctor.findings import CheckResult
from sidecar.cli.doctor.gpus import gpu_findings
from sidecar.cli.doctor.startup import numa_finding, startup_findings, store_finding
from sidecar.exits import Exit
from sidecar.logs import LOGGER


def main(options: Options) -> Exit:
    """Print every check; the answer is a no if any of them failed."""
    # The checks say the same as the log.
    logging.getLogger(LOGGER).setLevel(logging.ERROR)
    config = load_config(options.config)
    found = [
        *startup_findings(config),
        anyio.run(store_finding, config),
        numa_finding(config),
        *gpu_findings(config),
        *engine_findings(config, options.command),
    ]
    for one in found:
        say(str(one))
    return Exit.NO if any(one.verdict is CheckResult.FAIL for one in found) else Exit.OK
