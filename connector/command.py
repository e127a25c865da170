"""The `kvlake` command: checks that package `sidecar` is kvlake's, then runs the command line."""

import importlib
import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        importlib.import_module("connector.ownership")
    except ImportError as error:
        sys.stderr.write(f"kvlake: {error}\n")
        return 2  # Exit.USAGE of `sidecar/exits.py`, which may be another's
    return int(importlib.import_module("sidecar.cli").main())


if __name__ == "__main__":
    sys.exit(main())
