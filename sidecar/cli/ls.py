"""`kvlake ls`: the namespaces or the chunks that the object store or host memory holds.

Owns writing chunks as a table or as JSON while the catalog is being read. Does not own reading it
(`tiers/catalog/scan.py`), nor what a sidecar answers (`sidecar/observe/host_contents.py`).

Invariants: memory is bounded by a few catalog files and a batch of chunks, however many chunks
there are; the JSON of a listing that fails midway is not closed. Nothing is written.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio.to_thread
import numpy as np

from sidecar.cli.client import SidecarClient, asks_host, get_list, host_memory
from sidecar.cli.console import CommandError, Document, age, load_config, say, say_json, table
from sidecar.cli.store import (
    TenantNames,
    describe_models,
    find_namespaces,
    model_text,
    namespace_of,
    run,
)
from sidecar.exits import Exit
from tiers.catalog.manifest import Counts
from tiers.catalog.names import KEY_BYTES, catalog_folder
from tiers.catalog.reader import Files
from tiers.catalog.retention import RetentionReason
from tiers.catalog.scan import all_rows
from tiers.catalog.usage import Chunks, tenant_of
from tiers.sizes import approximate_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from sidecar.config.model import Config
    from tiers.catalog.retention import Reasons
    from tiers.catalog.rows import Rows
    from tiers.store.object_tier import ObjectTier

BATCH_CHUNKS: Final = 1000
PAGE_CHUNKS: Final = 1000
"""Chunks in one answer of a sidecar at most."""
_DIGITS: Final = re.compile(rf"^[0-9a-f]{{0,{2 * KEY_BYTES}}}$")
_ABOUT: Final = ("model", "layers", "about")
_HOST_WIDTHS: Final = (64, 10, 5, 6, 16, 0)
_MORE: Final = "more than --limit; raise it, or narrow it with --key"


@dataclass(frozen=True, slots=True)
class ListingFilter:
    """The chunks to list: of a namespace, with this prefix of the key, of a tenant."""

    namespace: str | None = None
    key: str = ""
    tenant: str = ""
    limit: int = 1000


def main(options: argparse.Namespace) -> int:
    """List namespaces, or the chunks of one."""
    wanted = ListingFilter(options.namespace, options.key.lower(), options.tenant, options.limit)
    config = load_config(options.config)
    if not asks_host(options, config):
        _list_store(config, wanted, as_json=options.json)
        return Exit.OK
    with host_memory(options) as client:
        if wanted.namespace is None:
            _list_host_namespaces(client, as_json=options.json)
        else:
            _list_host_chunks(client, wanted, as_json=options.json)
    return Exit.OK


class ListWriter:
    """Writes documents to standard output while they come: as one JSON object, or as lines."""

    def __init__(self, line: Callable[[Document], str], *, as_json: bool) -> None:
        self._line = line
        self._as_json = as_json
        self._written = 0

    def open(self, head: Document, name: str, columns: str) -> None:
        """Begin: with JSON the fields before the list called `name`, else the column names."""
        if self._as_json:
            fields = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
            say("{" + ", ".join([*fields, f"{json.dumps(name)}: ["]))
        else:
            say(columns)

    def write(self, documents: Iterable[Document]) -> None:
        """Write some more of the list."""
        remaining = iter(documents)
        while batch := list(itertools.islice(remaining, BATCH_CHUNKS)):
            say("\n".join(map(self._json if self._as_json else self._line, batch)))

    def _json(self, document: Document) -> str:
        self._written += 1
        return f"{' ' if self._written == 1 else ','} {json.dumps(document)}"

    def close(self, tail: Document) -> None:
        """End: with JSON the fields after the list."""
        if self._as_json:
            fields = [f", {json.dumps(key)}: {json.dumps(value)}" for key, value in tail.items()]
            say("]" + "".join(fields) + "}")


# --- the object store ----------------------------------------------------------------------------


def _list_store(config: Config, wanted: ListingFilter, *, as_json: bool) -> None:
    if not _DIGITS.match(wanted.key):
        raise CommandError(
            f"key {wanted.key!r}: keys are {2 * KEY_BYTES} hexadecimal digits, as kvlake ls prints "
            "them; give the first of them"
        )
    names = TenantNames(config)
    if wanted.tenant and names.word(wanted.tenant) is None:
        raise CommandError(
            f"tenant {wanted.tenant!r}: the configuration names {names.known or 'none'}; give one "
            "of these, or an id of 16 hexadecimal digits"
        )

    async def command(store: ObjectTier) -> None:
        prefixes = await find_namespaces(store, wanted.namespace)
        models = await describe_models(store, prefixes)
        if wanted.namespace is None:
            found = dict(zip(map(namespace_of, prefixes), models, strict=True))
            document = {"url": store.url, "namespaces": list(found), "models": found}
            _write_namespaces(document, f"{store.url} holds no chunks", as_json=as_json)
            return
        namespace, place = namespace_of(prefixes[0]), f"{store.url.rstrip('/')}/{prefixes[0]}"
        if not as_json:
            say(f"{namespace}: {model_text(models[0])}")
        writer = ListWriter(chunk_line, as_json=as_json)
        writer.open(
            {"url": store.url, "namespace": namespace, **models[0]}, "chunks", CHUNK_COLUMNS
        )
        more = await list_chunks(
            store,
            prefixes[0],
            wanted,
            names,
            lambda rows: writer.write(chunk_documents(rows, names, place=place)),
        )
        writer.close({"more": more})
        if more and not as_json:
            say(_MORE)

    run(config, command)


def _write_namespaces(document: Document, nothing: str, *, as_json: bool) -> None:
    if as_json:
        say_json(document)
    elif models := document["models"]:
        rows = [(name, model_text(model)) for name, model in models.items()]
        say(table([("NAMESPACE", "MODEL"), *rows]))
    else:
        say(nothing)


async def list_chunks(
    store: ObjectTier,
    prefix: str,
    wanted: ListingFilter,
    names: TenantNames,
    write: Callable[[Rows], None],
) -> bool:
    """Write the chunks of a namespace, sorted by key; whether there are more than the limit.

    Raises the tier's errors.
    """
    files = Files(store, catalog_folder(prefix), Counts())
    left = max(0, wanted.limit)
    async for found in all_rows(files, time.time(), _shards(wanted.key)):
        rows = await anyio.to_thread.run_sync(_matching, found, wanted, names)
        if rows is None:
            continue
        starts = Chunks(rows).starts
        if left < len(starts):
            if left:
                write(rows.take(np.arange(starts[left])))
            return True
        left -= len(starts)
        write(rows)
    return False


def _shards(key: str) -> range:
    """The shards of keys that begin with these digits."""
    first = int(f"{key[:2]:0<2}", 16)
    return range(first, int(f"{key[:2]:f<2}", 16) + 1)


def _matching(rows: Rows, wanted: ListingFilter, names: TenantNames) -> Rows | None:
    """The rows that are wanted and offered; None if there are none."""
    keep: npt.NDArray[np.bool_] = rows.size_bytes > 0
    for at, digit in enumerate(wanted.key):
        byte = rows.keys[:, at // 2]
        keep &= (byte & 15 if at % 2 else byte >> 4) == int(digit, 16)
    if not keep.any():
        return None
    rows = rows.take(keep)
    if not wanted.tenant:
        return rows
    word, chunks = names.word(wanted.tenant), Chunks(rows)
    if word is None:
        return None
    rows = rows.take(np.repeat(chunks.tenants == word, chunks.counts))
    return rows if len(rows) else None


def chunk_documents(
    rows: Rows, names: TenantNames, *, place: str = "", reasons: Reasons | None = None
) -> Iterator[Document]:
    """The chunks of rows that are sorted by key.

    Args:
        rows: all rows of a chunk together.
        names: of tenants.
        place: URL of the namespace's folder, if the URLs of objects are wanted.
        reasons: for each row the limit that withdraws its chunk, if that is wanted.
    """
    chunks, ids = Chunks(rows), rows.segment_ids.tolist()
    starts = chunks.starts
    columns = zip(
        _hex(rows.keys[starts]),
        _hex(rows.parents[starts]),
        starts.tolist(),
        chunks.sizes.tolist(),
        chunks.counts.tolist(),
        rows.num_blocks[starts].tolist(),
        chunks.times.tolist(),
        chunks.tenants.tolist(),
        strict=True,
    )
    for key, parent, first, size_bytes, objects, num_blocks, written_at, word in columns:
        segments = [rows.segments[one] for one in ids[first : first + objects]]
        document = {
            "key": key,
            "parent": parent,
            "size_bytes": size_bytes,
            "num_blocks": num_blocks,
            "written_seconds": written_at / 1e6,
            "tenant": names.name(tenant_of(word)),
            "objects": objects,
            "segments": segments,
        }
        if place:
            folder = f"{place}/{key[:2]}/{key}"
            document["urls"] = [f"{folder}/{segment}.arrow" for segment in segments]
        if reasons is not None:
            document["bound"] = RetentionReason(int(reasons[first])).setting
        yield document


def _hex(keys: npt.NDArray[np.uint8]) -> list[str]:
    digits, width = keys.tobytes().hex(), 2 * KEY_BYTES
    return [digits[at : at + width] for at in range(0, len(digits), width)]


def chunk_line(chunk: Document) -> str:
    """A chunk of the store as a line, and its URLs as further ones."""
    line = _columns(
        chunk["key"],
        approximate_size(chunk["size_bytes"]),
        chunk["objects"],
        chunk["num_blocks"],
        age(chunk["written_seconds"], time.time()),
        chunk["tenant"],
        chunk.get("bound", ""),
    )
    return "\n  ".join([line, *chunk.get("urls", ())])


def _columns(*cells: object, widths: Sequence[int] = (64, 10, 7, 6, 5, 16, 0)) -> str:
    """Cells in columns of fixed widths: the widest cell is known only at the end."""
    padded = (f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
    return "  ".join(padded).rstrip()


CHUNK_COLUMNS: Final = _columns("KEY", "SIZE", "OBJECTS", "BLOCKS", "AGE", "TENANT", "")
WITHDRAWN_COLUMNS: Final = _columns("KEY", "SIZE", "OBJECTS", "BLOCKS", "AGE", "TENANT", "BOUND")


# --- host memory ---------------------------------------------------------------------------------


def _list_host_namespaces(client: SidecarClient, *, as_json: bool) -> None:
    found = get_list(client, "/host", "namespaces", namespace="")["namespaces"]
    models = {one["namespace"]: {key: one[key] for key in _ABOUT} for one in found}
    if not as_json:
        say(_host_heading(client))
    document = {"host": client.url, "namespaces": list(models), "models": models}
    _write_namespaces(document, "no engine has attached yet", as_json=as_json)


def _list_host_chunks(client: SidecarClient, wanted: ListingFilter, *, as_json: bool) -> None:
    writer, more = ListWriter(_host_line, as_json=as_json), False
    for number, page in enumerate(_host_pages(client, wanted)):
        if number == 0:
            if not as_json:
                say(f"{_host_heading(client)}\n{page['namespace']}: {model_text(page)}")
            head = {name: page[name] for name in ("namespace", *_ABOUT)}
            cells = ("KEY", "SIZE", "PARTS", "BLOCKS", "TENANT", "STATE")
            columns = _columns(*cells, widths=_HOST_WIDTHS)
            writer.open({"host": client.url, **head}, "chunks", columns)
        writer.write(page["chunks"])
        more = page["more"]
    writer.close({"more": more})
    if more and not as_json:
        say(_MORE)


def _host_pages(client: SidecarClient, wanted: ListingFilter) -> Iterator[Document]:
    """Answers of the sidecar, up to the limit."""
    left, after = wanted.limit, ""
    while True:
        num_chunks = min(left, PAGE_CHUNKS)
        page = get_list(
            client,
            "/host/chunks",
            "chunks",
            namespace=wanted.namespace or "",
            key=wanted.key,
            tenant=wanted.tenant,
            after=after,
            limit=str(num_chunks),
        )
        yield page
        left, after = left - num_chunks, page["last"]
        if not left or not page["more"]:
            return


def _host_heading(client: SidecarClient) -> str:
    return f"host memory of the sidecar at {client.url}"


def _host_line(chunk: Document) -> str:
    state = "loadable" if chunk["loadable"] else "in part"
    state += ", pinned" * chunk["pinned"] + ", in the store" * chunk["in_store"]
    size = approximate_size(chunk["size_bytes"])
    cells = (chunk["key"], size, chunk["parts"], chunk["num_blocks"], chunk["tenant"], state)
    return _columns(*cells, widths=_HOST_WIDTHS)
