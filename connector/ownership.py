"""Checks that `sidecar` and `tiers` are packages of kvlake; the import raises `ImportError` if not.

Another distribution has a package `sidecar`, too. Where both are installed, one has overwritten
files of the other, and imports fail somewhere in the middle. The check runs nothing of a package.
"""

import importlib.util
from pathlib import Path
from typing import Final

PACKAGES: Final = ("sidecar", "tiers")


def fault() -> str:
    """What is wrong, with the remedy; empty if nothing is."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            return f"kvlake's package `{package}` is not installed; install kvlake again"
        path = Path(spec.origin)
        # The first line of each `__init__.py` of kvlake's names it.
        if "kvlake" not in path.read_text(errors="replace").partition("\n")[0]:
            return (
                f"{path.parent} is not kvlake's: another distribution has a package of this name. "
                f"Run `pip uninstall {package}`, then install kvlake again, or use separate "
                "environments"
            )
    return ""


if _fault := fault():
    raise ImportError(_fault)
