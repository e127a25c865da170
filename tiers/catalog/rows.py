"""Rows of the catalog: one per segment that was written or withdrawn, as an Arrow file.

Owns the columns, `Rows` (their arrays in memory), encoding, and decoding of foreign bytes.
Does not own names (`names.py`), I/O, or what rows mean together (`merge.py`).

A row with `size_bytes` 0 withdraws its segment: it is not offered any more, unless it was written
after `written_at`. `tenant` is 8 zeros for none. `written_at` is its writer's clock and only
orders rows of one segment and the age of chunks: a clock that is off costs hits, not right bytes.

Invariants: a file is accepted whole or not at all; before the parser sees it, its length is
bounded, its digest, xxh3_128, is the one in its name, and nothing in it is compressed, so that what
it takes in memory is what it has in bytes (`footer.py`); after it, the schema is equal to the byte,
nothing is null and every segment's name parses; times and sizes are at most `TIME_LATEST` and
`SIZE_LARGEST`, so that they can be added up. Nothing is encoded that would not be accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from tiers.catalog.footer import plain_rows
from tiers.catalog.names import KEY_BYTES
from tiers.errors import LayoutError, TierError
from tiers.kv.layout import Segment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TENANT_BYTES: Final = 8
NO_TENANT: Final = bytes(TENANT_BYTES)
NO_KEY: Final = bytes(KEY_BYTES)
FILE_BYTES_MAX: Final = 128 << 20
"""A longer file is foreign. `ROWS_PER_FILE_MAX` rows with segments of 32 characters fit."""
ROWS_PER_FILE_MAX: Final = 500_000
BATCHES_PER_FILE_MAX: Final = 16
SEGMENTS_PER_FILE_MAX: Final = 65_536
SIZE_LARGEST: Final = 1 << 32
"""No segment's image has as many bytes (its columns are narrower). A larger size counts as this
one, whoever wrote it: sums of sizes near 2^63 would turn negative, and no bound be exceeded."""
TIME_MAX: Final = 1 << 62
TIME_LATEST: Final = 1 << 53
"""In the year 2255. A later time counts as this one, whoever wrote it: what withdraws a row is
later by one, and a time next to `TIME_MAX` would make a file that no reader accepts. Of equal times
the withdrawal counts."""

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

Bytes = npt.NDArray[np.uint8]
Longs = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]


class CatalogCorrupt(TierError):
    """A file of the catalog is damaged or foreign: it is ignored and counted."""


class Row(NamedTuple):
    """One row. `written_at` is microseconds since 1970."""

    key: bytes
    segment: str
    written_at: int
    size_bytes: int = 0
    num_blocks: int = 0
    parent: bytes = NO_KEY
    tenant: bytes = b""

    @property
    def withdrawn(self) -> bool:
        """Whether it says that the segment is not there any more."""
        return self.size_bytes == 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of equal length; `segments[segment_ids[i]]` is row i's segment."""

    keys: Bytes
    """Shape [n, 32]."""
    parents: Bytes
    """Shape [n, 32]; zeros at the start of a prompt, or where it is not known."""
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

    def take(self, chosen: npt.NDArray[Any]) -> Rows:
        """The rows of these indexes, or of this mask."""
        return Rows(
            self.keys[chosen],
            self.parents[chosen],
            self.segments,
            self.segment_ids[chosen],
            self.num_blocks[chosen],
            self.size_bytes[chosen],
            self.written_at[chosen],
            self.tenants[chosen],
        )

    def key_list(self, first: int, last: int) -> list[bytes]:
        """The keys of rows `first` to `last`, exclusive."""
        joined = self.keys[first:last].tobytes()
        return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]


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
    ids: list[Ints] = []
    for part in parts:
        translated = np.array([number[name] for name in part.segments] or [0], dtype=np.int32)
        ids.append(translated[part.segment_ids])
    return Rows(
        keys=np.concatenate([part.keys for part in parts]),
        parents=np.concatenate([part.parents for part in parts]),
        segments=segments,
        segment_ids=np.concatenate(ids),
        num_blocks=np.concatenate([part.num_blocks for part in parts]),
        size_bytes=np.concatenate([part.size_bytes for part in parts]),
        written_at=np.concatenate([part.written_at for part in parts]),
        tenants=np.concatenate([part.tenants for part in parts]),
    )


def cut(rows: Rows, rows_max: int) -> list[Rows]:
    """Parts of at most so many rows, in order, that `encode` accepts whatever segments they name.

    Logs of others may name as many kinds as they have rows, each in a file that is accepted.
    """
    if len(rows.segments) <= SEGMENTS_PER_FILE_MAX:
        return [rows.take(part) for part in _parts(len(rows), rows_max)]
    parts = _parts(len(rows), min(rows_max, SEGMENTS_PER_FILE_MAX))
    return [_named(rows.take(part)) for part in parts]


def _parts(num_rows: int, rows_max: int) -> Iterator[npt.NDArray[np.intp]]:
    for first in range(0, num_rows, rows_max):
        yield np.arange(first, min(first + rows_max, num_rows))


def _named(rows: Rows) -> Rows:
    """The same, without the names that no row has."""
    used, ids = np.unique(rows.segment_ids, return_inverse=True)
    segments = tuple(rows.segments[number] for number in used.tolist())
    return replace(rows, segments=segments, segment_ids=ids.astype(np.int32))


def digest_of(body: Bytes) -> str:
    """What the name of a file with these bytes ends with."""
    return xxhash.xxh3_128_hexdigest(body.data)


def encode(rows: Rows) -> Bytes:
    """The rows as an Arrow IPC file. Raises `ValueError` for what `decode` would refuse.

    Times and sizes are taken into the range that readers know.
    """
    if len(rows) > ROWS_PER_FILE_MAX:
        raise ValueError(f"{len(rows)} rows: a file has at most {ROWS_PER_FILE_MAX}")
    try:
        _check_segments(rows.segments)
        _check_sizes(rows)
    except (CatalogCorrupt, LayoutError) as error:
        raise ValueError(f"rows that no reader would accept: {error}") from error
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
        return _checked(_table(body))
    except (pa.ArrowException, LayoutError, OSError, ValueError, TypeError, KeyError) as error:
        raise CatalogCorrupt(f"not a catalog file: {type(error).__name__}: {error}") from error


def _table(body: Bytes) -> Any:
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
    return table


def _checked(table: Any) -> Rows:
    encoded: Any = table["segment"].combine_chunks().dictionary_encode()
    segments = tuple(encoded.dictionary.to_pylist())
    _check_segments(segments)
    times: Longs = table["written_at"].cast(pa.int64()).to_numpy()
    if len(times) and not 0 < times.min() <= times.max() < TIME_MAX:
        raise CatalogCorrupt("written_at is no time after 1970")
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
    parts: list[Bytes] = []
    for chunk in column.chunks:
        data: Bytes = np.frombuffer(chunk.buffers()[1] or b"", dtype=np.uint8)
        start = chunk.offset * width
        parts.append(data[start : start + len(chunk) * width].reshape(len(chunk), width))
    return np.concatenate(parts) if parts else np.zeros((0, width), dtype=np.uint8)


def _fixed(field: str, values: Sequence[bytes], width: int) -> Bytes:
    for value in values:
        if len(value) != width:
            raise ValueError(f"{field}: must have {width} bytes, got {len(value)}")
    return np.frombuffer(b"".join(values), dtype=np.uint8).reshape(len(values), width)


def _binary(column: Bytes) -> Any:
    data = np.ascontiguousarray(column)
    buffers = [None, pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(column.shape[1]), len(column), buffers)
