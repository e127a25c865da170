"""Rows of the catalog: one per segment that was written or withdrawn, as an Arrow file.

Owns the columns, `Rows` (their arrays in memory), encoding, and decoding of foreign bytes. Does not
own names (`names.py`), I/O, or which of several rows holds (`merge.py`).

A row with `size_bytes` 0 withdraws its segment: readers stop offering it unless it was written
after `written_at`. `tenant` is 8 zeros for none. `written_at` is the writer's clock. It only orders
rows of one segment and gives the age of chunks: a wrong clock costs hits, not right bytes.

Invariants: a file is accepted whole or not at all. Before Arrow parses it, its length is bounded,
its digest (xxh3_128) is the one in its name, and it has no compressed buffer, of which a megabyte
can become gigabytes. After it, the schema is equal to the byte, nothing is null and every segment
name parses. Times and sizes are bounded, so that sums do not overflow. `encode` writes only what
`decode` accepts. `plain_rows` walks the footer as flatbuffers (https://flatbuffers.dev/internals)
and Arrow (`format/File.fbs`, `format/Message.fbs`) lay it out. What it allocates is bounded.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from tiers.catalog.names import KEY_BYTES
from tiers.errors import LayoutError, TierError
from tiers.kv.layout import Segment

TENANT_BYTES: Final = 8
NO_TENANT: Final = bytes(TENANT_BYTES)
NO_KEY: Final = bytes(KEY_BYTES)
FILE_BYTES_MAX: Final = 128 << 20
"""`ROWS_PER_FILE_MAX` rows with segments of 32 characters fit. A longer file is foreign."""
ROWS_PER_FILE_MAX: Final = 500_000
BATCHES_PER_FILE_MAX: Final = 16
SEGMENTS_PER_FILE_MAX: Final = 65_536
SIZE_LARGEST: Final = 1 << 32
"""More than the image of any segment. A larger size is read as this one: sums of sizes near 2^63
would turn negative, and no limit would be exceeded."""
TIME_MAX: Final = 1 << 62
TIME_LATEST: Final = 1 << 53
"""In the year 2255. A later time is read as this one: a withdrawal is later than its row by one,
and next to `TIME_MAX` it would make a file that no reader accepts."""

_FIXED_KEY = pa.binary(KEY_BYTES)
SCHEMA: Final = pa.schema(
    [
        pa.field("key", _FIXED_KEY, nullable=False),
        pa.field("parent", _FIXED_KEY, nullable=False),
        pa.field("segment", pa.string(), nullable=False),
        pa.field("num_blocks", pa.int32(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("written_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("tenant", pa.binary(TENANT_BYTES), nullable=False),
    ],
    metadata={"kvlake": '{"format": 1, "kind": "catalog"}'},
)

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

Bytes = npt.NDArray[np.uint8]
Longs = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]


class CatalogCorrupt(TierError):
    """A file of the catalog is damaged or foreign. It is ignored and counted."""


class Row(NamedTuple):
    """One row. `written_at` is microseconds since 1970."""

    key: bytes
    segment: str
    written_at: int
    size_bytes: int = 0
    num_blocks: int = 0
    parent: bytes = NO_KEY
    tenant: bytes = b""


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of equal length; `segments[segment_ids[i]]` is row i's segment."""

    keys: Bytes
    """Shape [n, 32]."""
    parents: Bytes
    """Shape [n, 32]; zeros at the start of a prompt, or where unknown."""
    segments: tuple[str, ...]
    segment_ids: Ints
    num_blocks: Ints
    size_bytes: Longs
    written_at: Longs
    tenants: Bytes
    """Shape [n, 8]."""

    def __len__(self) -> int:
        return len(self.keys)

    def row(self, index: int) -> Row:
        """One row, for messages and tests."""
        tenant = self.tenants[index].tobytes()
        return Row(
            key=self.keys[index].tobytes(),
            segment=self.segments[self.segment_ids[index]],
            written_at=int(self.written_at[index]),
            size_bytes=int(self.size_bytes[index]),
            num_blocks=int(self.num_blocks[index]),
            parent=self.parents[index].tobytes(),
            tenant=b"" if tenant == NO_TENANT else tenant,
        )

    def take(self, chosen: npt.NDArray[Any]) -> "Rows":
        """The rows of these indexes, or of this mask."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in _COLUMNS})

    def key_list(self, first: int, last: int) -> list[bytes]:
        """The keys of rows `first` to `last`, exclusive."""
        joined = self.keys[first:last].tobytes()
        return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]


_COLUMNS: Final = tuple(one.name for one in fields(Rows) if one.name != "segments")


def rows_of(rows: Sequence[Row]) -> Rows:
    """Columns of these rows. Raises `ValueError` for a field of the wrong length."""
    segments = tuple(dict.fromkeys(row.segment for row in rows))
    number = {segment: index for index, segment in enumerate(segments)}
    return Rows(
        keys=_fixed("key", [row.key for row in rows], KEY_BYTES),
        parents=_fixed("parent", [row.parent for row in rows], KEY_BYTES),
        segments=segments,
        segment_ids=np.array([number[row.segment] for row in rows], dtype=np.int32),
        num_blocks=np.array([row.num_blocks for row in rows], dtype=np.int32),
        size_bytes=np.array([row.size_bytes for row in rows], dtype=np.int64),
        written_at=np.array([row.written_at for row in rows], dtype=np.int64),
        tenants=_fixed("tenant", [row.tenant or NO_TENANT for row in rows], TENANT_BYTES),
    )


def joined(parts: Sequence[Rows]) -> Rows:
    """All rows of all parts, in order."""
    if not parts:
        return rows_of(())
    segments = tuple(dict.fromkeys(name for part in parts for name in part.segments))
    number = {segment: index for index, segment in enumerate(segments)}
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
    # The ids of a part are its own.
    numbers = [np.array([number[name] for name in part.segments] or [0]) for part in parts]
    ids = [new[part.segment_ids] for new, part in zip(numbers, parts, strict=True)]
    columns["segment_ids"] = np.concatenate(ids).astype(np.int32)
    return Rows(segments=segments, **columns)


def cut(rows: Rows, rows_max: int) -> list[Rows]:
    """Parts of at most `rows_max` rows, in order, that `encode` accepts.

    Merged rows may name more segments than a file holds: each log may name as many as it has rows.
    """
    named_by_all = len(rows.segments) <= SEGMENTS_PER_FILE_MAX
    step = rows_max if named_by_all else min(rows_max, SEGMENTS_PER_FILE_MAX)
    parts = [
        rows.take(np.arange(first, min(first + step, len(rows))))
        for first in range(0, len(rows), step)
    ]
    return parts if named_by_all else [_without_unused_names(part) for part in parts]


def _without_unused_names(rows: Rows) -> Rows:
    used, ids = np.unique(rows.segment_ids, return_inverse=True)
    segments = tuple(rows.segments[number] for number in used.tolist())
    return replace(rows, segments=segments, segment_ids=ids.astype(np.int32))


def digest_of(body: Bytes) -> str:
    """The digest in the name of a file with these bytes."""
    return xxhash.xxh3_128_hexdigest(body.data)


def encode(rows: Rows) -> Bytes:
    """The rows as an Arrow IPC file, with times and sizes clipped to what `decode` accepts.

    Raises `ValueError` for rows that `decode` would refuse.
    """
    if len(rows) > ROWS_PER_FILE_MAX:
        raise ValueError(f"{len(rows)} rows: a file has at most {ROWS_PER_FILE_MAX}")
    try:
        _check_segments(rows.segments)
        _check_sizes(rows)
    except (CatalogCorrupt, LayoutError) as error:
        raise ValueError(f"no reader would accept these rows: {error}") from error
    names: Any = pa.array(rows.segments, type=pa.string())
    columns: list[Any] = [
        _binary(rows.keys),
        _binary(rows.parents),
        names.take(pa.array(rows.segment_ids)),
        pa.array(rows.num_blocks, type=pa.int32()),
        pa.array(np.minimum(rows.size_bytes, SIZE_LARGEST), type=pa.int64()),
        pa.array(np.clip(rows.written_at, 1, TIME_LATEST), type=pa.int64()).cast(
            SCHEMA.field("written_at").type
        ),
        _binary(rows.tenants),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA) as file:
        file.write_batch(batch)
    body: Bytes = np.frombuffer(sink.getvalue(), dtype=np.uint8)
    if body.nbytes > FILE_BYTES_MAX:
        raise ValueError(f"{body.nbytes} bytes: a file has at most {FILE_BYTES_MAX}")
    return body


def decode(body: Bytes, digest: str) -> Rows:
    """The rows of foreign bytes whose name claims `digest`. Raises `CatalogCorrupt`."""
    if body.nbytes > FILE_BYTES_MAX:
        raise CatalogCorrupt(f"{body.nbytes} bytes: a file has at most {FILE_BYTES_MAX}")
    found = digest_of(body)
    if found != digest:
        raise CatalogCorrupt(f"the bytes hash to {found}, the name says {digest}")
    try:
        return _rows_in(body)
    except (pa.ArrowException, LayoutError, OSError, ValueError, TypeError, KeyError) as error:
        raise CatalogCorrupt(f"not a catalog file: {type(error).__name__}: {error}") from error


def _rows_in(body: Bytes) -> Rows:
    count = plain_rows(body.data, BATCHES_PER_FILE_MAX)
    if count > ROWS_PER_FILE_MAX:
        raise CatalogCorrupt(f"{count} rows: a file has at most {ROWS_PER_FILE_MAX}")
    reader: Any = pa.ipc.open_file(pa.py_buffer(body))
    if not reader.schema.equals(SCHEMA, check_metadata=True):
        raise CatalogCorrupt("its schema is not that of catalog format 1")
    table: Any = reader.read_all()
    table.validate(full=True)
    if any(column.null_count for column in table.columns):
        raise CatalogCorrupt("a column has nulls")
    encoded: Any = table["segment"].combine_chunks().dictionary_encode()
    segments = tuple(encoded.dictionary.to_pylist())
    _check_segments(segments)
    times: Longs = table["written_at"].cast(pa.int64()).to_numpy()
    if len(times) and not 0 < times.min() <= times.max() < TIME_MAX:
        raise CatalogCorrupt("written_at: must be after 1970")
    rows = Rows(
        keys=_fixed_column(table["key"], KEY_BYTES),
        parents=_fixed_column(table["parent"], KEY_BYTES),
        segments=segments,
        segment_ids=encoded.indices.to_numpy(zero_copy_only=False).astype(np.int32),
        num_blocks=table["num_blocks"].to_numpy(),
        size_bytes=np.minimum(table["size_bytes"].to_numpy(), SIZE_LARGEST),
        written_at=np.minimum(times, TIME_LATEST),
        tenants=_fixed_column(table["tenant"], TENANT_BYTES),
    )
    _check_sizes(rows)
    return rows


def _check_segments(segments: Sequence[str]) -> None:
    if len(segments) > SEGMENTS_PER_FILE_MAX:
        raise CatalogCorrupt(f"{len(segments)} kinds of segments: at most {SEGMENTS_PER_FILE_MAX}")
    for name in segments:
        Segment.parse(name)


def _check_sizes(rows: Rows) -> None:
    if len(rows) and (rows.size_bytes.min() < 0 or rows.num_blocks.min() < 0):
        raise CatalogCorrupt("a size is negative")


def _fixed_column(column: Any, width: int) -> Bytes:
    """A fixed-size binary column as [n, width]."""
    whole = column.combine_chunks()
    data: Bytes = np.frombuffer(whole.buffers()[1] or b"", dtype=np.uint8)
    start = whole.offset * width
    return data[start : start + len(whole) * width].reshape(len(whole), width)


def _fixed(field: str, values: Sequence[bytes], width: int) -> Bytes:
    for value in values:
        if len(value) != width:
            raise ValueError(f"{field}: must have {width} bytes, got {len(value)}")
    return np.frombuffer(b"".join(values), dtype=np.uint8).reshape(len(values), width)


def _binary(column: Bytes) -> Any:
    data = np.ascontiguousarray(column)
    buffers = [None, pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(column.shape[1]), len(column), buffers)


def plain_rows(body: memoryview, batches_max: int) -> int:
    """How many rows an Arrow file claims to have.

    Raises `ValueError` for compressed buffers, dictionaries, and what is not an Arrow file.
    """
    try:
        return sum(_batch_rows(body, offset) for offset in _batches(body, batches_max))
    except struct.error as error:
        raise ValueError(f"an offset points outside of the file: {error}") from error


def _batches(body: memoryview, batches_max: int) -> Iterator[int]:
    """The offsets of the messages of the batches."""
    if bytes(body[-len(_MAGIC) :]) != _MAGIC:
        raise ValueError("it does not end like an Arrow file")
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
        raise ValueError("the footer names a batch that is none")
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
    """The offset of a field of a table; None where the table leaves it out."""
    places = table - _unpack("<i", body, table)[0]
    (size_bytes,) = _unpack("<H", body, places)
    at = 4 + 2 * number
    if at + 2 > size_bytes:
        return None
    (offset,) = _unpack("<H", body, places + at)
    return table + offset if offset else None


def _vector(body: memoryview, table: int, number: int) -> tuple[int, int]:
    """The offset of the first element of a vector, and the number of elements."""
    field = _field(body, table, number)
    if field is None:
        return 0, 0
    start = field + _unpack("<I", body, field)[0]
    return start + 4, _unpack("<I", body, start)[0]


def _unpack(form: str, body: memoryview, at: int) -> tuple[int, ...]:
    # A negative offset would count from the end.
    if at < 0:
        raise struct.error(f"at {at}")
    return struct.unpack_from(form, body, at)
