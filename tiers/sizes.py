"""Sizes in messages for people. Those that people write are `sidecar/config/units.py`'s."""

from __future__ import annotations

from typing import Final

_UNITS: Final = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def approximate_size(size_bytes: float) -> str:
    """A size for people to read, three digits or so: "1.25 GiB", "0 B"."""
    for name, factor in _UNITS:
        if (value := size_bytes / factor) >= 1:
            # Three digits of 1023 would be 1.02e+03, and of 999.5 on 1e+03.
            return f"{value:.0f} {name}" if value >= 999.5 else f"{value:.3g} {name}"
    return f"{size_bytes:.0f} B"
