"""Whose packages `sidecar` and `tiers` are. Imported first; raises `ImportError` if not kvlake's.

Their names are not kvlake's alone: a registry has another `sidecar`. Where both are installed, one
of them has replaced files of the other, and what imports it fails somewhere in the middle. Nothing
of a package is run to find out.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

PACKAGES: Final = ("sidecar", "tiers")
MARK: Final = "kvlake"
"""The first line of each package's `__init__.py` has it."""


def complaint() -> str:
    """What is wrong, with the remedy; empty where nothing is."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        place = spec.origin if spec is not None else None
        if place is None:
            return f"kvlake's package `{package}` is not installed; install kvlake again"
        first, _, _ = Path(place).read_text(errors="replace").partition("\n")
        if MARK not in first:
            return (
                f"{Path(place).parent} is not kvlake's: another distribution has a package of "
                f"this name. Run `pip uninstall {package}`, then install kvlake again, or give "
                "each an environment of its own"
            )
    return ""


if _found := complaint():
    raise ImportError(_found)
