"""Sizes and durations as people write them: "8GiB", "512 MiB", "500ms", "2m".

Owns the grammar of the two, both ways. Not the limits: a setting says what values it takes.
Invariant: `parse(format(x)) == x` for whole bytes and whole milliseconds.
"""

from __future__ import annotations

import math
import re
from typing import Final

_NUMBER: Final = r"(?P<number>\d+(?:\.\d+)?)"
_SIZE: Final = re.compile(rf"^{_NUMBER}\s*(?P<unit>[A-Za-z]*)$")
_DURATION: Final = re.compile(rf"^{_NUMBER}\s*(?P<unit>[A-Za-z]*)$")

SIZE_BYTES_MAX: Final = 1 << 60
"""More than there is, and less than a file's size may be."""

SIZE_UNITS: Final[dict[str, int]] = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
DURATION_SECONDS_MAX: Final = 10**9
"""Some thirty years."""
DURATION_UNITS: Final[dict[str, float]] = {
    "ms": 0.001,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86_400.0,
}

_SIZE_LOOKUP: Final = {name.lower(): factor for name, factor in SIZE_UNITS.items()} | {"": 1}
_DURATION_LOOKUP: Final = DURATION_UNITS | {"": 1.0}

SIZE_PATTERN: Final = r"^\d+(\.\d+)?\s*([kKmMgGtT][iI]?)?[bB]?$"
DURATION_PATTERN: Final = r"^\d+(\.\d+)?\s*(ms|s|m|h|d)?$"


def parse_size(value: object) -> int:
    """Bytes of a size: a whole number, or a number with a unit such as "8GiB" or "1.5 GB".

    Raises:
        ValueError: for anything else, negative numbers and parts of a byte.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{value} is negative; a size is 0 or more bytes")
        if value > SIZE_BYTES_MAX:
            raise ValueError(_too_large(value))
        return value
    match = _SIZE.match(value.strip()) if isinstance(value, str) else None
    factor = _SIZE_LOOKUP.get(match["unit"].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(
            f"{value!r} is not a size; write a number and one of {', '.join(SIZE_UNITS)}, "
            'such as "8GiB"'
        )
    size_bytes = float(match["number"]) * factor
    if size_bytes > SIZE_BYTES_MAX:
        raise ValueError(_too_large(value))
    if size_bytes != math.floor(size_bytes):
        raise ValueError(f"{value!r} is not a whole number of bytes; use a smaller unit")
    return int(size_bytes)


def _too_large(value: object) -> str:
    return f"{str(value)[:32]!r} is more than {format_size(SIZE_BYTES_MAX)}; no machine has that"


def parse_duration(value: object) -> float:
    """Seconds of a duration: a number of seconds, or a number with a unit such as "500ms".

    Raises:
        ValueError: for anything else, negative numbers included.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        # Compared first: an integer may have more digits than a float can.
        if not 0 <= value <= DURATION_SECONDS_MAX:
            raise ValueError(
                f"{str(value)[:32]} is not a duration; it must be 0 to {DURATION_SECONDS_MAX} s"
            )
        return float(value)
    match = _DURATION.match(value.strip()) if isinstance(value, str) else None
    factor = _DURATION_LOOKUP.get(match["unit"]) if match else None
    if match is None or factor is None:
        raise ValueError(
            f"{value!r} is not a duration; write a number and one of "
            f'{", ".join(DURATION_UNITS)}, such as "500ms"'
        )
    seconds = float(match["number"]) * factor
    if seconds > DURATION_SECONDS_MAX:
        raise ValueError(
            f"{str(value)[:32]!r} is not a duration; it must be at most {DURATION_SECONDS_MAX} s"
        )
    return seconds


def format_size(size_bytes: int) -> str:
    """The shortest exact way to write a size in binary units: "8GiB", "1536MiB", "1000B"."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % SIZE_UNITS[name] == 0:
            return f"{size_bytes // SIZE_UNITS[name]}{name}"
    return f"{size_bytes}B"


def format_duration(seconds: float) -> str:
    """The shortest exact way to write a duration: "500ms", "5s", "2m"."""
    for name in ("h", "m", "s"):
        factor = DURATION_UNITS[name]
        if seconds and seconds % factor == 0:
            return f"{int(seconds // factor)}{name}"
    milliseconds = round(seconds * 1000, 6)
    return f"{int(milliseconds) if milliseconds.is_integer() else milliseconds}ms"
