"""Catalog files: what was encoded comes back, and foreign bytes do no harm."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import places
from tiers.catalog.merge import merged, newest_of_chunk, withdrawals
from tiers.catalog.rows import (
    SCHEMA,
    SIZE_LARGEST,
    TIME_LATEST,
    TIME_MAX,
    CatalogCorrupt,
    Row,
    Rows,
    decode,
    digest_of,
    encode,
    joined,
    rows_of,
)

rows = st.builds(
    Row,
    key=st.binary(min_size=32, max_size=32),
    segment=st.sampled_from(["0-8.0-4", "0-8.4-8", "8-16.0-4"]),
    written_at=st.integers(1, TIME_LATEST),
    size_bytes=st.integers(0, SIZE_LARGEST),
    num_blocks=st.integers(0, 2**31 - 1),
    parent=st.binary(min_size=32, max_size=32),
    tenant=st.sampled_from([b"", b"tenant-1"]),
)


def row(number: int = 1, **fields: Any) -> Row:
    whole: dict[str, Any] = {"key": bytes([number]) * 32, "segment": "0-8.0-4", "written_at": 7}
    return Row(**whole | fields)


def listed(found: Rows) -> list[Row]:
    return [found.row(index) for index in range(len(found))]


@given(written=st.lists(rows, max_size=20), more=st.lists(rows, max_size=5))
def test_rows_come_back(written: list[Row], more: list[Row]) -> None:
    body = encode(rows_of(written))
    found = decode(body, digest_of(body))
    assert listed(found) == written
    assert listed(joined([found, rows_of(more)])) == written + more
    assert listed(found.take(np.arange(len(written))[::-1])) == written[::-1]
    assert found.key_list(1, 3) == [one.key for one in written[1:3]]


def test_the_schema_is_this_one() -> None:
    # Shared with every other cluster on the bucket: a change here is a new format.
    assert SCHEMA.names == [
        "key",
        "parent",
        "segment",
        "num_blocks",
        "size_bytes",
        "written_at",
        "tenant",
    ]
    body = encode(rows_of([row(tenant=b"tenant-1", size_bytes=5)]))
    with pa.ipc.open_file(pa.py_buffer(body)) as file:
        assert file.read_all().to_pylist()[0]["tenant"] == b"tenant-1"


def test_fields_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="key: must have 32 bytes, got 31"):
        rows_of([row(key=bytes(31))])
    with pytest.raises(ValueError, match="tenant: must have 8 bytes, got 7"):
        rows_of([row(tenant=b"tenant1")])


def test_every_flipped_byte_is_found() -> None:
    body = encode(rows_of([row(1), row(2)]))
    digest = digest_of(body)
    for position in range(len(body)):
        damaged = body.copy()
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CatalogCorrupt, match="hash"):
            decode(damaged, digest)
    with pytest.raises(CatalogCorrupt):
        decode(body[:-1], digest)


@given(st.data())
def test_forged_bytes_end_with_rows_or_a_refusal(data: st.DataObject) -> None:
    """The digest keeps nobody from writing what he likes: behind it come the parser's checks."""
    body = encode(rows_of([row(number, size_bytes=number) for number in range(1, 9)])).copy()
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(body) - 1))
        body[position] = data.draw(st.integers(0, 255))
    length = data.draw(st.sampled_from([len(body)] * 4 + [len(body) // 2, 3, 0]))
    body = body[:length]
    try:
        found = decode(body, digest_of(body))
    except CatalogCorrupt:
        return
    assert all(len(one.key) == 32 for one in listed(found))


def table(**changes: Any) -> Any:
    columns = {
        "key": pa.array([bytes(32)], pa.binary(32)),
        "parent": pa.array([bytes(32)], pa.binary(32)),
        "segment": pa.array(["0-8.0-4"]),
        "num_blocks": pa.array([1], pa.int32()),
        "size_bytes": pa.array([1], pa.int64()),
        "written_at": pa.array([1], pa.timestamp("us", tz="UTC")),
        "tenant": pa.array([bytes(8)], pa.binary(8)),
    }
    return columns | changes


def file_of(columns: dict[str, Any], schema: Any = SCHEMA) -> Any:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as file:
        file.write_batch(pa.RecordBatch.from_arrays(list(columns.values()), schema=schema))
    return np.frombuffer(sink.getvalue(), dtype=np.uint8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"segment": pa.array(["../../etc"])}, "segment"),
        ({"size_bytes": pa.array([-1], pa.int64())}, "negative"),
        ({"num_blocks": pa.array([-1], pa.int32())}, "negative"),
        ({"written_at": pa.array([-5], pa.timestamp("us", tz="UTC"))}, "written_at: must be"),
        ({"written_at": pa.array([2**62], pa.timestamp("us", tz="UTC"))}, "written_at: must be"),
        ({"key": pa.array([None], pa.binary(32))}, "null"),
    ],
)
def test_what_the_schema_allows_and_a_catalog_does_not(changes: Any, words: str) -> None:
    body = file_of(table(**changes))
    with pytest.raises(CatalogCorrupt, match=words):
        decode(body, digest_of(body))


@pytest.mark.promise("catalog-times")
@pytest.mark.parametrize("time", [TIME_LATEST, TIME_LATEST + 1, TIME_MAX - 1])
def test_a_row_of_the_far_future_can_be_withdrawn(time: int) -> None:
    """It was withdrawn by a row dated one later, in a file that no reader accepted."""
    body = file_of(table(written_at=pa.array([time], pa.timestamp("us", tz="UTC"))))
    there = decode(body, digest_of(body))
    assert listed(there)[0].written_at == TIME_LATEST
    gone = encode(withdrawals(there, newest_of_chunk(there) + 1, missing=False))
    again = merged(joined([decode(gone, digest_of(gone)), there]))
    assert [one.size_bytes == 0 for one in listed(again)] == [True]


@pytest.mark.promise("catalog-times")
@pytest.mark.parametrize("time", [-5, 0, TIME_MAX, 2**63 - 1])
def test_no_time_is_written_that_is_not_read(time: int) -> None:
    body = encode(rows_of([row(written_at=time)]))
    [found] = listed(decode(body, digest_of(body)))
    assert found.written_at == min(max(time, 1), TIME_LATEST)


@pytest.mark.parametrize(
    "fields", [{"segment": "../../etc"}, {"size_bytes": -1}, {"num_blocks": -1}]
)
def test_what_no_reader_accepts_is_not_written(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no reader would accept"):
        encode(rows_of([row(**fields)]))


def test_other_files_are_no_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    other = pa.schema([SCHEMA.field(name) for name in SCHEMA.names])
    for body in (
        np.frombuffer(secrets.token_bytes(1000), dtype=np.uint8),
        np.zeros(0, dtype=np.uint8),
        file_of(table(), other),
    ):
        with pytest.raises(CatalogCorrupt):
            decode(body, digest_of(body))
    body = encode(rows_of([row(1), row(2)]))
    places.patch(monkeypatch, "ROWS_PER_FILE_MAX", 1)
    with pytest.raises(CatalogCorrupt, match="2 rows"):
        decode(body, digest_of(body))
    places.patch(monkeypatch, "FILE_BYTES_MAX", 100)
    with pytest.raises(CatalogCorrupt, match="at most 100"):
        decode(body, digest_of(body))
