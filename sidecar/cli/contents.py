"""`kvlake du` and `kvlake ls`: what the object store or host memory holds, summed up or listed.

Owns writing chunks as a table or as JSON while the catalog is being read. Does not own reading it
(`tiers/catalog/scan.py`), nor what a running sidecar answers for host memory
(`sidecar/observe/host_contents.py`).

Invariants: the store's numbers are those of its catalog: what is offered, not what a listing of the
bucket would find; memory is bounded by a few catalog files, however many chunks there are; the JSON
of a listing that fails midway is not closed. Nothing is written.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import anyio.to_thread
import numpy as np
import numpy.typing as npt

from sidecar.cli.client import QueryRejected, SidecarClient, client_of, get_list
from sidecar.cli.console import (
    CommandError,
    Document,
    NoAnswer,
    Options,
    age,
    document_table,
    load_config,
    say,
    show,
    table,
)
from sidecar.cli.store import TENANTS_SHOWN_MAX, TenantNames, find_namespaces, namespace_of, run
from sidecar.config.model import Config
from sidecar.sessions.model_names import UNKNOWN, layers_of, model_name
from tiers.catalog.manifest import Counts
from tiers.catalog.names import KEY_BYTES, catalog_folder
from tiers.catalog.namespace_info import read_info
from tiers.catalog.reader import Files
from tiers.catalog.retention import Reasons, RetentionReason
from tiers.catalog.rows import Rows
from tiers.catalog.scan import all_rows
from tiers.catalog.usage import Chunks, Usage, UsageTable, tenant_of
from tiers.sizes import approximate_size
from tiers.store.object_tier import ObjectTier

PAGE_CHUNKS: Final = 1000
"""Chunks in one answer of a sidecar at most."""
_ABOUT: Final = ("model", "layers", "about")
# Columns have fixed widths: the widest cell is known only at the end.
_STORE_LINE: Final = "{:<64}  {:<10}  {:<7}  {:<6}  {:<6}  {:<16}  {}"
_HOST_LINE: Final = "{:<64}  {:<10}  {:<5}  {:<6}  {:<16}  {}"
CHUNK_COLUMNS: Final = _STORE_LINE.format("KEY", "SIZE", "OBJECTS", "BLOCKS", "AGE", "TENANT", "")
WITHDRAWN_COLUMNS: Final = f"{CHUNK_COLUMNS}BOUND"
_COLUMNS: Final = {
    "NAMESPACE": "namespace",
    "MODEL": "model",
    "TENANT": "tenant",
    "CHUNKS": "chunks",
}
_HOST_COLUMNS: Final = {**_COLUMNS, "PARTS": "parts", "SIZE": "size_bytes"}
_SHARES: Final = {"ages": "LAST USED WITHIN", "depths": "TOKENS BEFORE, BELOW"}
_STORE_COLUMNS: Final = {
    **_COLUMNS,
    "OBJECTS": "objects",
    "SIZE": "size_bytes",
    "WITHDRAWN": "withdrawn",
    "OLDEST": "oldest",
}


def main(options: Options) -> None:
    """`du`: sum up. `ls`: list the namespaces, or the chunks of one."""
    config = load_config(options.config)
    sums = options.action == "du"
    if config.store is not None and not (options.host or options.url):
        (_show_store_usage if sums else _list_store)(config, options)
        return
    try:
        (_show_host_usage if sums else _list_host)(client_of(options), options)
    except NoAnswer as error:
        if options.host or options.url or isinstance(error, QueryRejected):
            raise
        raise NoAnswer(
            f"the configuration has no store, so host memory is asked for: {error}"
        ) from error


async def _describe_models(store: ObjectTier, prefixes: Sequence[str]) -> list[Document]:
    """The model of each namespace, where the store has it. Raises the tier's errors."""
    found: dict[str, Document] = {}

    async def read(prefix: str) -> None:
        info = await read_info(store, prefix)
        about = None if info is None else info.fields()
        found[prefix] = {
            "model": None if info is None else model_name(info.fields(), info.served_as),
            "layers": layers_of(about or {}) or None,
            "about": about,
        }

    # The store's own limit bounds how many run at the same time.
    async with anyio.create_task_group() as tasks:
        for prefix in prefixes:
            tasks.start_soon(read, prefix)
    return [found[prefix] for prefix in prefixes]


def _model_text(one: Document) -> str:
    """The model and layers of a namespace, for a table."""
    return ", ".join(filter(None, (one["model"] or UNKNOWN, one["layers"])))


# --- sums ----------------------------------------------------------------------------------------


def _show_store_usage(config: Config, options: Options) -> None:
    names = TenantNames(config)

    async def command(store: ObjectTier) -> Document:
        found: list[Document] = []
        prefixes = await find_namespaces(store, options.namespace)
        models = await _describe_models(store, prefixes)
        for prefix, model in zip(prefixes, models, strict=True):
            usage = await usage_of(store, prefix)
            tenants = usage.largest(TENANTS_SHOWN_MAX)
            found.append(
                {
                    "namespace": namespace_of(prefix),
                    **model,
                    **_held(usage.total),
                    "withdrawn": usage.withdrawn,
                    "tenants": [
                        {"tenant": names.name(tenant), **_held(held)}
                        for tenant, held in tenants.items()
                    ],
                    "tenants_left_out": usage.num_tenants - len(tenants),
                }
            )
        return {"url": store.url, "namespaces": found}

    show(run(config, command), _store_text, as_json=options.json)


async def usage_of(store: ObjectTier, prefix: str) -> UsageTable:
    """The chunks that a namespace's catalog offers. Raises the tier's errors."""
    usage = UsageTable()
    async for rows in all_rows(Files(store, catalog_folder(prefix), Counts()), time.time()):
        await anyio.to_thread.run_sync(usage.add, rows)
    return usage


def _held(held: Usage) -> Document:
    return {
        "chunks": held.chunks,
        "objects": held.objects,
        "size_bytes": held.size_bytes,
        "oldest_seconds": held.oldest / 1e6,
    }


def _show_host_usage(client: SidecarClient, options: Options) -> None:
    found = get_list(client, "/host", "namespaces", namespace=options.namespace or "")
    show({"host": client.url, **found}, _host_text, as_json=options.json)


def _store_text(document: Document) -> str:
    now, rows = time.time(), _rows(document)
    for row in rows:
        row["oldest"] = age(row.get("oldest_seconds", 0), now)
    return document_table(rows, _STORE_COLUMNS) if rows else f"{document['url']} holds no chunks"


def _host_text(document: Document) -> str:
    rows = _rows(document)
    usage = document_table(rows, _HOST_COLUMNS) if rows else "no engine has attached yet"
    lines = [_host_heading(document["host"]), usage]
    for field, heading in _SHARES.items():
        lines += _shares(document["namespaces"], field, heading)
    if unclaimed := document["unclaimed_bytes"]:
        lines.append(f"{approximate_size(unclaimed)} of an earlier run wait for their engine")
    return "\n".join(lines)


def _shares(namespaces: Sequence[Document], field: str, heading: str) -> list[str]:
    """Which part of each namespace's bytes is in each class; nothing of a sidecar without them."""
    used = [one for one in namespaces if one["size_bytes"] and one.get(field)]
    if not used:
        return []
    rows: list[Sequence[object]] = [(heading, *(used[0][field]))]
    for one in used:
        shares = [100 * sums["size_bytes"] / one["size_bytes"] for sums in one[field].values()]
        rows.append((one["namespace"], *(f"{share:.0f}%" for share in shares)))
    return ["", table(rows)]


def _rows(document: Document) -> list[Document]:
    """A row for each namespace, followed by one for each of its tenants."""
    rows: list[Document] = []
    same = {"namespace": "", "model": ""}
    for one in document["namespaces"]:
        rows.append({**one, "model": _model_text(one), "tenant": "all"})
        rows += [same | tenant for tenant in one["tenants"]]
        if one["tenants_left_out"]:
            rows.append(same | {"tenant": f"and {one['tenants_left_out']} that hold less"})
    return rows


class ListWriter:
    """Writes documents to standard output while they come: as one JSON object, or as lines."""

    def __init__(self, line: Callable[[Document], str], *, as_json: bool) -> None:
        self._line = line
        self._as_json = as_json
        self._separator = " "

    def open(self, head: Document, name: str, columns: str) -> None:
        """Begin: with JSON the fields before the list called `name`, else the column names."""
        if self._as_json:
            say(json.dumps({**head, name: []}).removesuffix("]}"))
        else:
            say(columns.rstrip())

    def write(self, documents: Iterable[Document]) -> None:
        """Write some more of the list."""
        for document in documents:
            if self._as_json:
                say(f"{self._separator} {json.dumps(document)}")
                self._separator = ","
            else:
                say(self._line(document))

    def close(self, tail: Document) -> None:
        """End: with JSON the fields after the list."""
        if self._as_json:
            say("], " + json.dumps(tail).removeprefix("{"))
        elif tail.get("more"):
            say("more than --limit; raise it, or narrow it with --key")


# --- lists of the object store -------------------------------------------------------------------


def _list_store(config: Config, options: Options) -> None:
    key = options.key.lower()
    if not re.fullmatch(rf"[0-9a-f]{{0,{2 * KEY_BYTES}}}", key):
        raise CommandError(
            f"key {key!r}: keys are {2 * KEY_BYTES} hexadecimal digits, as kvlake ls "
            "prints them; give the first of them"
        )
    names = TenantNames(config)
    tenant = names.word(options.tenant) if options.tenant else None

    async def command(store: ObjectTier) -> None:
        prefixes = await find_namespaces(store, options.namespace)
        models = await _describe_models(store, prefixes)
        if options.namespace is None:
            found = dict(zip(map(namespace_of, prefixes), models, strict=True))
            document = {"url": store.url, "namespaces": list(found), "models": found}
            nothing = f"{store.url} holds no chunks"
            show(document, lambda _: _namespaces_text(found, nothing), as_json=options.json)
            return
        namespace, place = namespace_of(prefixes[0]), f"{store.url.rstrip('/')}/{prefixes[0]}"
        if not options.json:
            say(f"{namespace}: {_model_text(models[0])}")
        writer = ListWriter(chunk_line, as_json=options.json)
        head = {"url": store.url, "namespace": namespace, **models[0]}
        writer.open(head, "chunks", CHUNK_COLUMNS)

        def write(rows: Rows) -> None:
            writer.write(chunk_documents(rows, names, place=place))

        more = await list_chunks(
            store, prefixes[0], write, key=key, tenant=tenant, chunks_max=options.limit
        )
        writer.close({"more": more})

    run(config, command)


def _namespaces_text(models: Document, nothing: str) -> str:
    rows = [(name, _model_text(model)) for name, model in models.items()]
    return table([("NAMESPACE", "MODEL"), *rows]) if rows else nothing


async def list_chunks(
    store: ObjectTier,
    prefix: str,
    write: Callable[[Rows], None],
    *,
    key: str = "",
    tenant: int | None = None,
    chunks_max: int,
) -> bool:
    """Write the chunks of a namespace, sorted by key; whether there are more than `chunks_max`.

    They are those whose key begins with these digits, and of this tenant, if one is given. Raises
    the tier's errors.
    """
    files = Files(store, catalog_folder(prefix), Counts())
    shards = range(int(f"{key[:2]:0<2}", 16), int(f"{key[:2]:f<2}", 16) + 1)
    left = chunks_max
    async for found in all_rows(files, time.time(), shards):
        rows = await anyio.to_thread.run_sync(_matching, found, key, tenant)
        if not len(rows):
            continue
        starts = Chunks(rows).starts
        if left < len(starts):
            if left:
                write(rows.take(np.arange(starts[left])))
            return True
        left -= len(starts)
        write(rows)
    return False


def _matching(rows: Rows, key: str, tenant: int | None) -> Rows:
    """The rows that are wanted and offered."""
    keep: npt.NDArray[np.bool_] = rows.size_bytes > 0
    for at, digit in enumerate(key):
        byte = rows.keys[:, at // 2]
        keep &= (byte & 15 if at % 2 else byte >> 4) == int(digit, 16)
    rows = rows.take(keep)
    if tenant is None or not len(rows):
        return rows
    chunks = Chunks(rows)
    return rows.take(np.repeat(chunks.tenants == tenant, chunks.counts))


def chunk_documents(
    rows: Rows, names: TenantNames, *, place: str = "", reasons: Reasons | None = None
) -> Iterator[Document]:
    """The chunks of rows that are sorted by key, all rows of a chunk together.

    `place` is the URL of the namespace's folder, if the URLs of objects are wanted; `reasons` the
    limit that withdraws the chunk of each row, if that is wanted.
    """
    chunks, ids = Chunks(rows), rows.segment_ids.tolist()
    starts = chunks.starts
    columns = zip(
        rows.keys[starts].tobytes().hex(" ", KEY_BYTES).split(),
        rows.parents[starts].tobytes().hex(" ", KEY_BYTES).split(),
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


def chunk_line(chunk: Document) -> str:
    """A chunk of the store as a line, and its URLs as further ones."""
    line = _STORE_LINE.format(
        chunk["key"],
        approximate_size(chunk["size_bytes"]),
        chunk["objects"],
        chunk["num_blocks"],
        age(chunk["written_seconds"], time.time()),
        chunk["tenant"],
        chunk.get("bound", ""),
    )
    return "\n  ".join([line.rstrip(), *chunk.get("urls", ())])


# --- lists of host memory ------------------------------------------------------------------------


def _host_heading(url: str) -> str:
    return f"host memory of the sidecar at {url}"


def _list_host(client: SidecarClient, options: Options) -> None:
    if options.namespace is not None:
        _list_host_chunks(client, options)
        return
    found = get_list(client, "/host", "namespaces", namespace="")["namespaces"]
    models = {one["namespace"]: {key: one[key] for key in _ABOUT} for one in found}
    if not options.json:
        say(_host_heading(client.url))
    document = {"host": client.url, "namespaces": list(models), "models": models}
    nothing = "no engine has attached yet"
    show(document, lambda _: _namespaces_text(models, nothing), as_json=options.json)


def _list_host_chunks(client: SidecarClient, options: Options) -> None:
    writer = ListWriter(_host_line, as_json=options.json)
    left, after = options.limit, ""
    while True:
        num_chunks = min(left, PAGE_CHUNKS)
        page = get_list(
            client,
            "/host/chunks",
            "chunks",
            namespace=options.namespace,
            key=options.key.lower(),
            tenant=options.tenant,
            after=after,
            limit=str(num_chunks),
        )
        if not after:
            if not options.json:
                heading = _host_heading(client.url)
                say(f"{heading}\n{page['namespace']}: {_model_text(page)}")
            head = {name: page[name] for name in ("namespace", *_ABOUT)}
            columns = _HOST_LINE.format("KEY", "SIZE", "PARTS", "BLOCKS", "TENANT", "STATE")
            writer.open({"host": client.url, **head}, "chunks", columns)
        writer.write(page["chunks"])
        left, after = left - num_chunks, page["last"]
        if not left or not page["more"]:
            break
    writer.close({"more": page["more"]})


def _host_line(chunk: Document) -> str:
    state = "loadable" if chunk["loadable"] else "in part"
    state += ", pinned" * chunk["pinned"] + ", in the store" * chunk["in_store"]
    size = approximate_size(chunk["size_bytes"])
    cells = (chunk["key"], size, chunk["parts"], chunk["num_blocks"], chunk["tenant"], state)
    return _HOST_LINE.format(*cells)
