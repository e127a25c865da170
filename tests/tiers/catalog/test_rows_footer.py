"""What is found out of an Arrow file before Arrow reads it: its rows, and nothing compressed."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tiers.catalog.rows import (
    SCHEMA,
    CatalogCorrupt,
    Row,
    decode,
    digest_of,
    encode,
    plain_rows,
    rows_of,
)

ROW = Row(key=bytes(32), segment="0-8.0-4", written_at=7)


def table(count: int) -> Any:
    return pa.ipc.open_file(pa.py_buffer(encode(rows_of([ROW] * count)))).read_all()


def written(
    what: Any, *, compression: str | None = None, batch_rows: int = 1000
) -> memoryview[int]:
    sink = pa.BufferOutputStream()
    options: Any = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(sink, what.schema, options=options) as file:
        file.write_table(what, max_chunksize=batch_rows)
    return memoryview(sink.getvalue().to_pybytes())


@pytest.mark.parametrize("count", [0, 1, 7])
def test_rows_are_counted_over_all_batches(count: int) -> None:
    assert plain_rows(written(table(count)), 16) == count
    assert plain_rows(written(table(count), batch_rows=2), 16) == count


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_compressed_file_is_refused_before_it_is_decompressed(compression: str) -> None:
    # The same rows are accepted uncompressed: a few kilobytes could be gigabytes.
    body = written(table(300), compression=compression)
    with pytest.raises(ValueError, match="compressed"):
        plain_rows(body, 16)
    array = np.frombuffer(body, dtype=np.uint8)
    with pytest.raises(CatalogCorrupt, match="compressed"):
        decode(array, digest_of(array))


def test_too_many_batches_or_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="9 batches"):
        plain_rows(written(table(9), batch_rows=1), 8)


def test_a_negative_count_is_refused() -> None:
    body = bytes(written(table(3)))
    said: set[str] = set()
    for at in range(len(body)):
        if body[at : at + 8] == struct.pack("<q", 3):
            other = body[:at] + struct.pack("<q", -3) + body[at + 8 :]
            try:
                plain_rows(memoryview(other), 16)
            except ValueError as error:
                said.add(str(error))
    assert "a batch of -3 rows" in said


def test_dictionaries_are_refused() -> None:
    plain = table(3)
    encoded = plain.set_column(2, "segment", plain["segment"].dictionary_encode())
    with pytest.raises(ValueError, match="dictionaries"):
        plain_rows(written(encoded), 16)


def test_a_file_cut_anywhere_is_refused_in_words() -> None:
    body = written(table(3))
    for length in range(len(body)):
        with pytest.raises(ValueError, match=r"\w+ \w+"):
            plain_rows(body[:length], 16)


def test_any_other_footer_is_refused_or_counted() -> None:
    body = bytearray(written(table(3)))
    (length,) = struct.unpack_from("<i", body, len(body) - 10)
    for position in range(len(body) - 10 - length, len(body)):
        for value in (0, 1, 0x7F, 0x80, 0xFF):
            damaged = bytearray(body)
            damaged[position] = value
            try:
                assert plain_rows(memoryview(damaged), 16) >= 0
            except ValueError as error:
                assert str(error)  # noqa: PT017 (either outcome is right)


def test_the_schema_is_read_as_it_is_written() -> None:
    assert pa.ipc.open_file(pa.py_buffer(written(table(1)))).schema.equals(SCHEMA)
