"""Targets that read what is in the store's catalog: its files, its manifests, and their names.

Owns these targets and the mutations that know the two formats. Does not own the list of targets
(`targets.py`). What is fed here bears the right digest, as an attacker's file would: the digest
finds damage, and keeps nobody out.
"""

# ruff: noqa: PT017 (a refusal is one of the outcomes, and is checked where it is one)

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import random
import re
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import anyio
import msgspec
import numpy as np
import pyarrow as pa

from sidecar.protocol import MODEL_CHARACTERS_MAX
from sidecar.sessions.model_names import model_name
from tests import places
from tests.fuzz.mutation import INPUT_BYTES_MAX, change, damage
from tests.tiers.catalog.kit import decode_manifest, encode_manifest
from tiers.catalog import namespace_info
from tiers.catalog.manifest import Counts, Manifest, Merged
from tiers.catalog.names import (
    NUMBER_MAX,
    LogName,
    lease_name,
    log_name,
    manifest_name,
    namespace_prefix,
    parse_lease,
    parse_log,
    parse_manifest,
    parse_snapshot,
    snapshot_name,
)
from tiers.catalog.namespace_info import NamespaceInfo
from tiers.catalog.reader import CatalogReader
from tiers.catalog.rows import (
    ROWS_PER_FILE_MAX,
    SCHEMA,
    Bytes,
    CatalogCorrupt,
    Row,
    decode,
    digest_of,
    encode,
    rows_of,
)
from tiers.catalog.usage import Usage
from tiers.errors import ChunkMissing, ImageTruncated, TierUnavailable
from tiers.store.client import Found, Listing

if TYPE_CHECKING:
    from tiers.store.client import Seen
    from tiers.store.object_tier import ObjectTier

FOLDER: Final = "v1/0123456789abcdef/catalog"
GENERATION: Final = 7
DIGEST: Final = "0" * 32
KEY: Final = bytes(range(32))
_LENGTHS: Final = (0, 1, -1, 8, 2**16, 2**31 - 1, 2**31, 2**40, 2**62, -(2**63))


def _bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, dtype=np.uint8)


# --- rows ------------------------------------------------------------------------------------


def feed_rows(data: bytes) -> None:
    """A file of rows, which can be written again, or `CatalogCorrupt`."""
    body = _bytes(data)
    try:
        rows = decode(body, digest_of(body))
    except CatalogCorrupt as error:
        assert str(error), "an error says what is wrong"
        return
    again = encode(rows)
    assert again.nbytes <= 2 * len(data) + (1 << 16), "a file is as large as what is in it"
    same = decode(again, digest_of(again))
    assert len(same) == len(rows)
    for index in (0, len(rows) // 2, len(rows) - 1) if len(rows) else ():
        assert same.row(index) == rows.row(index)


def row_seeds() -> list[bytes]:
    """An empty file, one of a few rows, and one of many."""
    some = [
        Row(KEY, "0-6.0-4", 1_700_000_000_000_000, 4096, 8),
        Row(KEY[::-1], "0-6.0-4", 1_700_000_000_000_001, tenant=bytes(range(8)), parent=KEY),
        Row(bytes(32), "0-3.2-4", 1, 1 << 40, 1 << 20),
    ]
    return [encode(rows_of(rows)).tobytes() for rows in ([], some, some * 40)]


def damage_rows(data: bytes, chooser: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """As `damage`; at times of the numbers that Arrow reads, or another table in the same shape."""
    match chooser.randrange(4):
        case 0:
            return _other_numbers(data, chooser)[:INPUT_BYTES_MAX]
        case 1:
            return _other_table(data, chooser)[:INPUT_BYTES_MAX]
        case _:
            return damage(data, chooser, others)


def _other_numbers(data: bytes, chooser: random.Random) -> bytes:
    """Some aligned integers are others: lengths, offsets and counts are such."""
    changed = bytearray(data)
    for _ in range(chooser.randint(1, 3)):
        width = chooser.choice((4, 8))
        at = chooser.randrange(max(1, len(changed) // width)) * width
        if at + width > len(changed):
            continue
        (was,) = struct.unpack_from("<i" if width == 4 else "<q", changed, at)
        near = (was + 1, was - 1, was * 2, was + 8, was - 8)
        number = chooser.choice((*near, *_LENGTHS)) % 2 ** (8 * width)
        changed[at : at + width] = number.to_bytes(width, "little")
    return bytes(changed)


def _other_table(data: bytes, chooser: random.Random) -> bytes:
    """The same rows written in another way, or other rows: whatever pyarrow writes."""
    try:
        reader: Any = pa.ipc.open_file(pa.py_buffer(data))
        if not reader.schema.equals(SCHEMA):
            return damage(data, chooser)
        table: Any = reader.read_all()
        # Arrow itself ends the process on some tables that were not checked.
        table.validate(full=True)
        changed = chooser.choice(_CHANGES)(table, chooser)
        compression = chooser.choice((None, None, "lz4", "zstd"))
        options: Any = pa.ipc.IpcWriteOptions(compression=compression)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, changed.schema, options=options) as file:
            file.write_table(changed, max_chunksize=chooser.choice((1, 7, 1000)))
    except (pa.ArrowException, ValueError, TypeError, KeyError, OverflowError, OSError):
        return damage(data, chooser)
    written: bytes = sink.getvalue().to_pybytes()
    return damage(written, chooser) if chooser.random() < 0.2 else written


def _numbers(table: Any, chooser: random.Random) -> Any:
    name = chooser.choice(("num_blocks", "size_bytes", "written_at"))
    column = table[name].cast(pa.int64()).to_pylist()
    values = [chooser.choice((value, *_LENGTHS)) for value in column]
    kind = table.schema.field(name).type
    cast: Any = pa.array(values, type=pa.int64()).cast(kind, safe=False)
    return table.set_column(table.schema.names.index(name), table.schema.field(name), cast)


def _segments(table: Any, chooser: random.Random) -> Any:
    foreign = ("", "9" * 64 + "-1.0-1", "é", "\0", "../x", "6-0.0-4", "0-6.0-4 ")
    names = ("0-6.0-4", "0-1.0-1", *foreign)
    values = [chooser.choice(names) for _ in range(table.num_rows)]
    at = table.schema.names.index("segment")
    return table.set_column(at, table.schema.field("segment"), pa.array(values, type=pa.string()))


def _nulls(table: Any, chooser: random.Random) -> Any:
    name = chooser.choice(table.schema.names)
    values = [None if chooser.random() < 0.5 else value for value in table[name].to_pylist()]
    made: Any = pa.array(values, type=table.schema.field(name).type)
    # The field goes on claiming that there is no null in it.
    return table.set_column(table.schema.names.index(name), table.schema.field(name), made)


def _kinds(table: Any, chooser: random.Random) -> Any:
    name, kind = chooser.choice(
        (
            ("segment", pa.large_string()),
            ("segment", pa.dictionary(pa.int8(), pa.string())),
            ("num_blocks", pa.int64()),
            ("size_bytes", pa.int32()),
            ("written_at", pa.timestamp("s")),
        )
    )
    at = table.schema.names.index(name)
    return table.set_column(at, pa.field(name, kind, nullable=False), table[name].cast(kind))


def _columns(table: Any, chooser: random.Random) -> Any:
    match chooser.randrange(4):
        case 0:
            return table.drop_columns([chooser.choice(table.schema.names)])
        case 1:
            return table.append_column(chooser.choice(table.schema.names), table["num_blocks"])
        case 2:
            return table.replace_schema_metadata({"kvlake": '{"format": 2, "kind": "catalog"}'})
        case _:
            return table.select(chooser.sample(table.schema.names, len(table.schema.names)))


def _rows(table: Any, chooser: random.Random) -> Any:
    match chooser.randrange(3):
        case 0:
            return table.slice(chooser.randint(0, table.num_rows), chooser.randint(0, 9))
        case 1:
            return pa.concat_tables([table] * chooser.choice((2, 9, 40)))
        case _:
            return table


_CHANGES: Final[tuple[Callable[[Any, random.Random], Any], ...]] = (
    *(_numbers, _segments, _nulls, _kinds, _columns, _rows),
)


# --- manifests -------------------------------------------------------------------------------


def feed_manifest(data: bytes) -> None:
    """A manifest, which says the same once it is written again, or `CatalogCorrupt`."""
    try:
        manifest = decode_manifest(_bytes(data), FOLDER, GENERATION)
    except CatalogCorrupt as error:
        assert str(error), "an error says what is wrong"
        assert len(str(error)) < 10_000, "an error is for people"
        return
    again = decode_manifest(encode_manifest(manifest), FOLDER, GENERATION)
    assert again == manifest
    assert all(parse_snapshot(FOLDER, name) is not None for name in manifest.snapshots)


def manifest_seeds() -> list[bytes]:
    """The first manifest there may be, and one with everything in it."""
    full = Manifest(
        generation=GENERATION,
        snapshots=tuple(snapshot_name(FOLDER, 6, part, DIGEST) for part in range(3)),
        base=2,
        rows=123,
        held=Usage(1 << 40, 100, 1, 100),
        merged={"s" + "0" * 15: Merged(3, 6), "c" + "f" * 15: Merged(0, 5)},
        tenants={"0" * 16: Usage(1 << 40, 99, 1, 99), "0123456789abcdef": Usage(1)},
        reconciled_seconds=1e9,
    )
    return [encode_manifest(one).tobytes() for one in (Manifest(generation=GENERATION), full)]


def damage_manifest(data: bytes, chooser: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """As `damage`; mostly of the values, and mostly with the digest made right again."""
    _, _, text = data.partition(b"\n")
    try:
        value = msgspec.json.decode(text)
        for _ in range(chooser.randint(1, 3)):
            value = change(value, chooser)
        text = msgspec.json.encode(value)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError, ValueError):
        text = damage(text, chooser)
    if chooser.random() < 0.3:
        text = damage(text, chooser)
    if chooser.random() < 0.1:
        return damage(data, chooser, others)
    return digest_of(_bytes(text)).encode() + b"\n" + text


# --- what a namespace is ---------------------------------------------------------------------


class _Claimed(msgspec.Struct):
    namespace: msgspec.Raw = msgspec.Raw(b"")


def feed_about(data: bytes) -> None:
    """What a namespace is, in its own folder, which can be shown, or `CatalogCorrupt`."""
    namespace = b""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
        namespace = bytes(msgspec.json.decode(data, type=_Claimed).namespace)
    prefix = namespace_prefix(hashlib.sha256(namespace).digest())
    try:
        info = namespace_info.decode(_bytes(data), prefix)
    except CatalogCorrupt as error:
        assert str(error), "an error says what is wrong"
        assert len(str(error)) < 10_000, "an error is for people"
        return
    assert namespace_info.decode(namespace_info.encode(info), prefix) == info
    json.dumps(info.fields(), indent=2).encode()
    name = model_name(info.fields(), info.served_as)
    assert name
    assert name.isprintable()
    assert len(name) <= MODEL_CHARACTERS_MAX


def about_seeds() -> list[bytes]:
    """A model of a hub, one that is files, and one of vLLM's own offloading."""
    namespaces: list[dict[str, Any]] = [
        {"model": {"name": "org/model", "revision": "1"}, "group": ["a", "b"], "layers": 30},
        {"model": {"digest": "ab" * 32}},
        {"model": "", "identity": {"model": {"sampled": "cd" * 32}}},
    ]
    return [
        namespace_info.encode(NamespaceInfo(msgspec.json.encode(one), served_as)).tobytes()
        for one, served_as in zip(namespaces, ("", "/models/llama", ""), strict=True)
    ]


def damage_about(data: bytes, chooser: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """As `damage`; mostly of the values."""
    try:
        value = msgspec.json.decode(data)
        for _ in range(chooser.randint(1, 3)):
            value = change(value, chooser)
        data = msgspec.json.encode(value)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError, ValueError):
        return damage(data, chooser, others)
    return damage(data, chooser, others) if chooser.random() < 0.3 else data


# --- names -----------------------------------------------------------------------------------


def feed_name(data: bytes) -> None:
    """A name parses only if it is the name of what it parses as."""
    name = data.decode("utf-8", "replace")
    log = parse_log(FOLDER, name)
    if log is not None:
        digest = name.removesuffix(".arrow")[-32:]
        assert log_name(FOLDER, log, digest).endswith(name.removeprefix(f"{FOLDER}/"))
    generation = parse_manifest(FOLDER, name)
    if generation is not None:
        assert manifest_name(FOLDER, generation).endswith(name.removeprefix(f"{FOLDER}/"))
    assert (parse_lease(name) is None) or lease_name(parse_lease(name) or 0) == name
    assert (parse_snapshot(FOLDER, name) or 0) >= 0


def name_seeds() -> list[bytes]:
    """A name of each kind."""
    log = LogName("s" + "0" * 15, 12)
    names = [log_name(FOLDER, log, DIGEST), snapshot_name(FOLDER, 3, 1, DIGEST)]
    return [one.encode() for one in (*names, manifest_name(FOLDER, GENERATION), lease_name(4))]


# --- folders ---------------------------------------------------------------------------------


class _Store:
    """A store of given objects, as far as a reader needs one."""

    url = "memory://fuzz"

    def __init__(self, objects: dict[str, bytes]) -> None:
        self._objects = objects

    async def list(
        self, prefix: str, *, start_after: str = "", deep: bool = True, names_max: int | None = None
    ) -> Listing:
        below = f"{prefix.rstrip('/')}/"
        found = {name: body for name, body in self._objects.items() if name.startswith(below)}
        if not deep:
            ends = {name: name.find("/", len(below)) for name in found}
            found = {name[: end + 1]: b"" for name, end in ends.items() if end > 0}
        return [Found(name, len(body), 1.0) for name, body in found.items() if name > start_after]

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        body = self._objects.get(name)
        if body is None:
            raise ChunkMissing(name)
        if not body or len(body) > into.nbytes:
            raise ImageTruncated(name)
        into[: len(body)] = _bytes(body)
        return len(body)


def feed_folder(data: bytes) -> None:
    """Whatever a catalog's folder holds, reading it ends, with rows or an error of the tier."""
    try:
        objects = msgspec.msgpack.decode(data, type=dict[str, bytes])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    # An attacker gives each file the digest that its name must have.
    named = {_DIGEST.sub(digest_of(_bytes(body)), name): body for name, body in objects.items()}
    # Each file that is ignored is a warning, which here is what comes of most inputs.
    logging.disable(logging.WARNING)
    try:
        with places.patched("CATALOG_PAGE_NAMES", 4):
            anyio.run(_read_folder, _Store(named))
    finally:
        logging.disable(logging.NOTSET)


async def _read_folder(store: _Store) -> None:
    counts = Counts()
    reader = CatalogReader(cast("ObjectTier", store), FOLDER, counts)
    for _ in range(3):
        with contextlib.suppress(TierUnavailable):
            async for rows in reader.changes():
                assert len(rows) <= ROWS_PER_FILE_MAX
        reader.take_suspect()
        assert -1 <= reader.manifest.generation <= NUMBER_MAX
    assert counts.files_read + counts.files_corrupt <= 64, "a file was read over and over"


_DIGEST: Final = re.compile(r"(?<=-)0{32}(?=\.arrow$)")


def folder_seeds() -> list[bytes]:
    """Logs of two writers; a manifest with its snapshot, and what came after it."""
    empty, some, many = row_seeds()
    writers = ("s" + "0" * 15, "c" + "f" * 15)
    logs = {
        log_name(FOLDER, LogName(writer, number), DIGEST): some
        for writer in writers
        for number in range(3)
    }
    snapshot = snapshot_name(FOLDER, GENERATION, 0, DIGEST)
    named = snapshot_name(FOLDER, GENERATION, 0, digest_of(_bytes(many)))
    progress = {writers[0]: Merged(1, GENERATION)}
    manifest = Manifest(GENERATION, snapshots=(named,), base=1, rows=120, merged=progress)
    merged = {
        manifest_name(FOLDER, GENERATION): encode_manifest(manifest).tobytes(),
        manifest_name(FOLDER, 3): manifest_seeds()[0],
        snapshot: many,
        log_name(FOLDER, LogName(writers[0], 2), DIGEST): some,
        log_name(FOLDER, LogName(writers[1], 0), DIGEST): empty,
    }
    return [msgspec.msgpack.encode(one) for one in (logs, merged)]


def damage_folder(data: bytes, chooser: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Files are missing, added, renamed or damaged; rarely the whole is no folder any more."""
    try:
        objects = msgspec.msgpack.decode(data, type=dict[str, bytes])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return damage(data, chooser, others)
    for _ in range(chooser.randint(1, 3)):
        if objects:
            _change_folder(objects, chooser)
    return msgspec.msgpack.encode(objects)[:INPUT_BYTES_MAX]


def _change_folder(objects: dict[str, bytes], chooser: random.Random) -> None:
    name = chooser.choice(list(objects))
    body = objects[name]
    match chooser.randrange(6):
        case 0:
            del objects[name]
        case 1:
            objects[name] = damage_rows(body, chooser)
        case 2:
            objects[name] = damage_manifest(body, chooser)
        case 3:
            objects[damage(name.encode(), chooser).decode("utf-8", "replace")] = body
        case 4:
            number = chooser.choice(("000000000000", "000000000009", "9" * 12, "000000000003"))
            objects[re.sub(r"[0-9]{12}(?=$|-)", number, name)] = body
        case _:
            objects[name] = objects[chooser.choice(list(objects))]
