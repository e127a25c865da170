"""What an Arrow file asks of whoever reads it, found out before Arrow reads it.

Owns walking a foreign file's footer and the heads of its batches: how many rows they have, and
whether a buffer is compressed. Arrow checks that what it reads is inside of the file, but allocates
whatever a compressed buffer says that it comes to, and decompresses it: a megabyte can become
gigabytes. Does not own what is in the rows (`rows.py`).

Invariant: nothing is allocated that the file's own length does not bound.

The layout is flatbuffers' (https://flatbuffers.dev/internals) and Arrow's (`format/File.fbs`,
`format/Message.fbs`): tables are reached by offsets, and name their fields by number.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAGIC: Final = b"ARROW1"
_TAIL_BYTES: Final = 4 + len(_MAGIC)
_CONTINUATION: Final = 0xFFFFFFFF
_BLOCK_BYTES: Final = 24
_FOOTER_DICTIONARIES: Final = 2
_FOOTER_BATCHES: Final = 3
_MESSAGE_KIND: Final = 1
_MESSAGE_HEADER: Final = 2
_KIND_BATCH: Final = 3
_BATCH_ROWS: Final = 0
_BATCH_COMPRESSION: Final = 3


def plain_rows(body: memoryview, batches_max: int) -> int:
    """How many rows a file claims, if all of it is plain: no compression, no dictionaries.

    Raises `ValueError` where it is not, or is no Arrow file.
    """
    try:
        return sum(_batch_rows(body, offset) for offset in _batches(body, batches_max))
    except struct.error as error:
        raise ValueError(f"an offset in it leads outside: {error}") from error


def _batches(body: memoryview, batches_max: int) -> Iterator[int]:
    """Where the messages of the batches begin."""
    if bytes(body[-len(_MAGIC) :]) != _MAGIC:
        raise ValueError("it does not end as an Arrow file does")
    tail = len(body) - _TAIL_BYTES
    (length,) = _unpack("<i", body, tail)
    start = tail - length
    if length <= 0 or start < 0:
        raise ValueError(f"its footer has {length} bytes")
    footer = start + _unpack("<I", body, start)[0]
    if _vector(body, footer, _FOOTER_DICTIONARIES)[1]:
        raise ValueError("it has dictionaries")
    first, count = _vector(body, footer, _FOOTER_BATCHES)
    if count > batches_max:
        raise ValueError(f"it has {count} batches, at most {batches_max}")
    for number in range(count):
        yield _unpack("<q", body, first + number * _BLOCK_BYTES)[0]


def _batch_rows(body: memoryview, offset: int) -> int:
    (mark,) = _unpack("<I", body, offset)
    start = offset + (8 if mark == _CONTINUATION else 4)
    message = start + _unpack("<I", body, start)[0]
    kind = _field(body, message, _MESSAGE_KIND)
    if kind is None or _unpack("<B", body, kind)[0] != _KIND_BATCH:
        raise ValueError("what its footer calls a batch is none")
    header = _field(body, message, _MESSAGE_HEADER)
    if header is None:
        raise ValueError("a batch without a header")
    batch = header + _unpack("<I", body, header)[0]
    if _field(body, batch, _BATCH_COMPRESSION) is not None:
        raise ValueError("it is compressed")
    rows = _field(body, batch, _BATCH_ROWS)
    count: int = 0 if rows is None else _unpack("<q", body, rows)[0]
    if count < 0:
        raise ValueError(f"a batch of {count} rows")
    return count


def _field(body: memoryview, table: int, number: int) -> int | None:
    """Where a table's field is; None for one that it leaves out."""
    places = table - _unpack("<i", body, table)[0]
    (size_bytes,) = _unpack("<H", body, places)
    at = 4 + 2 * number
    if at + 2 > size_bytes:
        return None
    (offset,) = _unpack("<H", body, places + at)
    return table + offset if offset else None


def _vector(body: memoryview, table: int, number: int) -> tuple[int, int]:
    """Where the elements of a vector begin, and how many there are."""
    field = _field(body, table, number)
    if field is None:
        return 0, 0
    start = field + _unpack("<I", body, field)[0]
    return start + 4, _unpack("<I", body, start)[0]


def _unpack(form: str, body: memoryview, at: int) -> tuple[int, ...]:
    # A negative place would be one from the end.
    if at < 0:
        raise struct.error(f"at {at}")
    return struct.unpack_from(form, body, at)
