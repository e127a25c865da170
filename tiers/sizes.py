"""Sizes and durations as people write and read them: "8GiB", "512 MiB", "500ms", "2m".

Invariant: `parse(format(x)) == x` for whole bytes and whole milliseconds.
"""

import re
from collections.abc import Mapping
from typing import Final

SIZE_UNITS: Final = {
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
DURATION_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
SIZE_BYTES_MAX: Final = 1 << 60
DURATION_SECONDS_MAX: Final = 10**9
SIZE_PATTERN: Final = r"^\d+(\.\d+)?\s*([kKmMgGtT][iI]?)?[bB]?$"
DURATION_PATTERN: Final = r"^\d+(\.\d+)?\s*(ms|s|m|h|d)?$"
_BINARY: Final = ("TiB", "GiB", "MiB", "KiB")
_TEXT: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: object) -> int:
    """Bytes of a size: a whole number, or one with a unit ("1.5 GB"). Raises `ValueError`."""
    size_bytes = _parse(value, "size", SIZE_UNITS, "8GiB")
    if not 0 <= size_bytes <= SIZE_BYTES_MAX or size_bytes != int(size_bytes):
        raise ValueError(
            f"{value!r} is not a size; it must be a whole number of bytes from 0 to "
            f"{format_size(SIZE_BYTES_MAX)}"
        )
    return int(size_bytes)


def parse_duration(value: object) -> float:
    """Seconds of a duration: their number, or one with a unit ("500ms"). Raises `ValueError`."""
    seconds = _parse(value, "duration", DURATION_UNITS, "500ms")
    if not 0 <= seconds <= DURATION_SECONDS_MAX:
        raise ValueError(
            f"{value!r} is not a duration; it must be from 0 to {DURATION_SECONDS_MAX} s"
        )
    return float(seconds)


def _parse(value: object, kind: str, units: Mapping[str, float], example: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    match = _TEXT.fullmatch(value) if isinstance(value, str) else None
    factors, unit = {"": 1.0, **units}, match[2] if match is not None else ""
    if kind == "size":
        # In any case: no two units of a size differ in case alone.
        factors, unit = {name.lower(): factors[name] for name in factors}, unit.lower()
    if match is None or unit not in factors:
        raise ValueError(
            f"{value!r} is not a {kind}; write a number and one of {', '.join(units)}, "
            f'such as "{example}"'
        )
    return float(match[1]) * factors[unit]


def format_size(size_bytes: int) -> str:
    """The shortest exact way to write a size in binary units: "8GiB", "1536MiB", "1000B"."""
    for name in _BINARY:
        if size_bytes and size_bytes % SIZE_UNITS[name] == 0:
            return f"{size_bytes // SIZE_UNITS[name]}{name}"
    return f"{size_bytes}B"


def approximate_size(size_bytes: float) -> str:
    """A size for people to read, three digits or so: "1.25 GiB", "0 B"."""
    for name in _BINARY:
        if (value := size_bytes / SIZE_UNITS[name]) >= 1:
            # Three digits of 1023 would be 1.02e+03, and of 999.5 on 1e+03.
            return f"{value:.0f} {name}" if value >= 999.5 else f"{value:.3g} {name}"
    return f"{size_bytes:.0f} B"


def format_duration(seconds: float) -> str:
    """The shortest exact way to write a duration: "500ms", "5s", "2m"."""
    for name in ("h", "m", "s"):
        factor = DURATION_UNITS[name]
        if seconds and seconds % factor == 0:
            return f"{int(seconds // factor)}{name}"
    milliseconds = round(seconds * 1000, 6)
    return f"{int(milliseconds) if milliseconds.is_integer() else milliseconds}ms"
