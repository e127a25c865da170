"""Making inputs that nobody wrote: seeded damage to bytes, and to the values behind them.

Owns the mutations. Does not own targets or what counts as a finding (`targets.py`).

Invariants: a mutation is a function of its input and the given `random.Random` alone, so a seed
replays it; what comes out is at most `INPUT_BYTES_MAX` long.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

INPUT_BYTES_MAX: Final = 1 << 18
_NUMBERS: Final = (
    *(0, 1, -1, 2, 7, 8, 16, 31, 32, 33, 127, 128, 255, 256, 4095, 4096, 65_535, 65_536),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**47, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63)),
)
_TEXTS: Final = ("", "x", "a" * 300, "worker", "memfd", "../..", "\n", "\x00", "é" * 60, "0-1.0-1")


def damage(data: bytes, chooser: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """`data` after one to four flips, insertions, deletions, cuts, repetitions or splices."""
    changed = bytearray(data)
    for _ in range(chooser.randint(1, 4)):
        _damage_once(changed, chooser, others)
    return bytes(changed[:INPUT_BYTES_MAX])


def _damage_once(data: bytearray, chooser: random.Random, others: Sequence[bytes]) -> None:
    at = chooser.randint(0, len(data))
    length = min(chooser.choice((1, 1, 2, 4, 8, 16, 64, 256)), len(data) - at)
    match chooser.randrange(8):
        case 0 if data:
            data[at % len(data)] ^= 1 << chooser.randrange(8)
        case 1 if data:
            data[at % len(data)] = chooser.choice((0, 0x7F, 0x80, 0xC1, 0xDC, 0xFF))
        case 2:
            data[at:at] = chooser.randbytes(chooser.choice((1, 1, 2, 4, 8, 32)))
        case 3:
            del data[at : at + length]
        case 4:
            del data[at:]
        case 5:
            data[at:at] = data[at : at + length] * chooser.choice((1, 2, 16))
        case 6:
            number = chooser.choice(_NUMBERS) % 2 ** (8 * 8)
            width = chooser.choice((1, 2, 4, 8))
            order = chooser.choice(("little", "big"))
            packed = number.to_bytes(8, "little")[:width]
            data[at : at + width] = packed if order == "little" else packed[::-1]
        case _ if others:
            other = chooser.choice(others)
            start = chooser.randint(0, len(other))
            piece = other[start : start + chooser.choice((4, 32, 256, 4096))]
            data[at : at + (len(piece) if chooser.random() < 0.5 else 0)] = piece
        case _:
            data += chooser.randbytes(chooser.choice((1, 8)))


def damage_message(data: bytes, chooser: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """As `damage`, of a MessagePack frame: mostly of the values in it, so that it stays one."""
    if chooser.random() < 0.2:
        return damage(data, chooser, others)
    try:
        value = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return damage(data, chooser, others)
    for _ in range(chooser.randint(1, 3)):
        value = change(value, chooser)
    try:
        return msgspec.msgpack.encode(value)[:INPUT_BYTES_MAX]
    except (OverflowError, RecursionError, TypeError, msgspec.MsgspecError):
        return damage(data, chooser, others)


def change(value: Any, chooser: random.Random) -> Any:
    """A copy of plain values in which one, somewhere, is another."""
    if isinstance(value, dict) and value and chooser.random() < 0.9:
        copy: dict[Any, Any] = dict(value)
        name = chooser.choice(list(copy))
        match chooser.randrange(12):
            case 0:
                del copy[name]
            case 1:
                copy[chooser.choice(_TEXTS)] = copy[name]
            case _:
                copy[name] = change(copy[name], chooser)
        return copy
    if isinstance(value, list) and value and chooser.random() < 0.9:
        items: list[Any] = list(value)
        at = chooser.randrange(len(items))
        match chooser.randrange(8):
            case 0:
                del items[at]
            case 1:
                items[at:at] = [items[at]] * chooser.choice((1, 3, 100))
            case _:
                items[at] = change(items[at], chooser)
        return items
    return _other_scalar(value, chooser)


def _other_scalar(value: Any, chooser: random.Random) -> Any:
    if chooser.random() < 0.1:
        return chooser.choice((None, True, 0.5, float("nan"), {}, [], "x", b"x", 1))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        near = (value + 1, value - 1, value * 2, value // 2, -value)
        return chooser.choice((*near, *_NUMBERS))
    if isinstance(value, str):
        return chooser.choice((*_TEXTS, value + "x", value[:-1], value.upper()))
    if isinstance(value, bytes):
        return damage(value, chooser)
    return chooser.choice((*_NUMBERS, *_TEXTS))
