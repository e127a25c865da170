"""The `kvlake` command, as far as it must not depend on the name `sidecar` (`ownership.py`)."""

from __future__ import annotations

import importlib
import sys
from typing import Final

USAGE: Final = 2
"""As `sidecar/exits.py` has it."""


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        importlib.import_module("connector.ownership")
    except ImportError as error:
        sys.stderr.write(f"kvlake: {error}\n")
        return USAGE
    return int(importlib.import_module("sidecar.cli").main())


if __name__ == "__main__":
    sys.exit(main())
