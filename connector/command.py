"""The `kvlake` command: checks that package `sidecar` is kvlake's, then runs the command line."""

from __future__ import annotations

import importlib
import sys
from typing import Final

USAGE: Final = 2
"""As in `sidecar/exits.py`."""


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
