"""`kvlake du`, `kvlake ls` and `kvlake gc`: look into the store, and keep it within its bounds.

Owns opening the configured store for one command, what is counted and listed, and the tables.
Does not own rounds of collection (`tiers/catalog/compaction.py`) or the catalog's files.

Invariants: `du` and `ls` write nothing; what they tell is the catalog: what is offered, not what a
listing of the bucket would find; a command that the store refuses ends with a sentence that says
what to change, and never in the middle of a table.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread

from sidecar.attach import StartError
from sidecar.collector import LEASE_SECONDS, collect, holder_name, namespaces, plan_of
from sidecar.storage import open_store
from sidecar.units import approximate_size, format_duration
from tiers.catalog.compaction import Report, Superseded, compact
from tiers.catalog.lease import Lease
from tiers.catalog.manifest import Counts
from tiers.catalog.merge import Census
from tiers.catalog.names import NAMESPACE_CHARACTERS, catalog_folder
from tiers.catalog.reader import Files
from tiers.catalog.rows import NO_TENANT
from tiers.catalog.shards import Shards, load
from tiers.errors import TierError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from sidecar.config import Config
    from tiers.catalog.rows import Rows
    from tiers.objects import ObjectTier

LEASE_POLL_SECONDS: Final = 2.0

Document = dict[str, Any]


class StoreCommandError(Exception):
    """The command cannot be carried out; the message says what to change."""


def run(config: Config, command: Callable[[ObjectTier], Awaitable[Document]]) -> Document:
    """Carry out a command on the configured store. Raises `StoreCommandError`."""
    settings = config.store
    if settings is None:
        raise StoreCommandError(
            "the configuration has no store; give the sidecar's own file: --config FILE"
        )

    async def main() -> Document:
        store = open_store(settings)
        try:
            return await command(store)
        finally:
            with anyio.CancelScope(shield=True):
                await store.close()

    try:
        return anyio.run(main)
    except (TierError, StartError, Superseded) as error:
        raise StoreCommandError(str(error)) from error


async def chosen(store: ObjectTier, namespace: str | None) -> list[str]:
    """Folders of the namespaces that a command is for. Raises `StoreCommandError`."""
    found = await namespaces(store)
    if namespace is None:
        return found
    prefixes = [one for one in found if one.rpartition("/")[2].startswith(namespace)]
    if len(prefixes) != 1:
        there = ", ".join(one.rpartition("/")[2] for one in found) or "none at all"
        raise StoreCommandError(
            f"namespace {namespace!r}: {len(prefixes)} of the store's namespaces begin with it; "
            f"give one of them, up to {NAMESPACE_CHARACTERS} digits: {there}"
        )
    return prefixes


# --- du ------------------------------------------------------------------------------------------


def du(config: Config, namespace: str | None) -> Document:
    """What each namespace and tenant holds."""

    async def command(store: ObjectTier) -> Document:
        told: list[Document] = []
        for prefix in await chosen(store, namespace):
            census = await census_of(store, prefix)
            told.append(
                {
                    "namespace": prefix.rpartition("/")[2],
                    "chunks": census.chunks,
                    "objects": census.objects,
                    "size_bytes": census.size_bytes,
                    "withdrawn": census.withdrawn,
                    "oldest_seconds": census.oldest / 1e6,
                    "tenants": [
                        {
                            "tenant": _tenant_name(config, tenant),
                            "objects": census.tenant_objects[tenant],
                            "size_bytes": size_bytes,
                        }
                        for tenant, size_bytes in census.tenant_bytes.most_common()
                    ],
                }
            )
        return {"url": store.url, "namespaces": told}

    return run(config, command)


async def census_of(store: ObjectTier, prefix: str) -> Census:
    """What a namespace's catalog offers. Raises the tier's errors."""
    census = Census()
    files = Files(store, catalog_folder(prefix), Counts())
    async for _, rows, _ in Shards(files, await load(files, time.time())).rows():
        await anyio.to_thread.run_sync(census.add, rows)
    return census


def _tenant_name(config: Config, tenant: bytes) -> str:
    if tenant == NO_TENANT:
        return "unsalted"
    name, _ = config.tenants.rules().named.get(tenant, ("", None))
    return name or tenant.hex()


def du_text(document: Document) -> str:
    """`du` as a table."""
    rows: list[Sequence[object]] = [
        ("NAMESPACE", "TENANT", "CHUNKS", "OBJECTS", "SIZE", "WITHDRAWN", "OLDEST")
    ]
    for one in document["namespaces"]:
        counted = (one["chunks"], one["objects"], approximate_size(one["size_bytes"]))
        oldest = _age(one["oldest_seconds"])
        rows.append((one["namespace"], "all", *counted, one["withdrawn"], oldest))
        rows += [
            ("", who["tenant"], "", who["objects"], approximate_size(who["size_bytes"]), "", "")
            for who in one["tenants"]
        ]
    return table(rows) if len(rows) > 1 else f"{document['url']} holds no chunks"


# --- ls ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """What `ls` is to list."""

    namespace: str | None = None
    key: str = ""
    tenant: str = ""
    limit: int = 1000


def ls(config: Config, wanted: Wanted) -> Document:
    """The chunks of a namespace, sorted by key; without one, all namespaces."""

    async def command(store: ObjectTier) -> Document:
        prefixes = await chosen(store, wanted.namespace)
        if wanted.namespace is None:
            found = [one.rpartition("/")[2] for one in prefixes]
            return {"url": store.url, "namespaces": found}
        return {
            "url": store.url,
            "namespace": prefixes[0].rpartition("/")[2],
            **await _chunks(store, prefixes[0], config, wanted),
        }

    return run(config, command)


async def _chunks(store: ObjectTier, prefix: str, config: Config, wanted: Wanted) -> Document:
    files = Files(store, catalog_folder(prefix), Counts())
    chunks: dict[str, Document] = {}
    async for _, rows, _ in Shards(files, await load(files, time.time())).rows():
        for line in _lines(rows, config, wanted):
            if line["key"] not in chunks and len(chunks) >= wanted.limit:
                return {"chunks": list(chunks.values()), "more": True}
            chunk = chunks.setdefault(
                line["key"], {**line, "objects": 0, "size_bytes": 0, "segments": []}
            )
            chunk["objects"] += 1
            chunk["size_bytes"] += line["size_bytes"]
            chunk["segments"].append(line["segment"])
            chunk["written_seconds"] = max(chunk["written_seconds"], line["written_seconds"])
            chunk.pop("segment", None)
    return {"chunks": list(chunks.values()), "more": False}


def _lines(rows: Rows, config: Config, wanted: Wanted) -> list[Document]:
    found: list[Document] = []
    for index in range(len(rows)):
        row = rows.row(index)
        tenant = _tenant_name(config, row.tenant or NO_TENANT)
        if row.withdrawn or not row.key.hex().startswith(wanted.key):
            continue
        if wanted.tenant and wanted.tenant != tenant:
            continue
        found.append(
            {
                "key": row.key.hex(),
                "parent": row.parent.hex(),
                "segment": row.segment,
                "size_bytes": row.size_bytes,
                "num_blocks": row.num_blocks,
                "written_seconds": row.written_at / 1e6,
                "tenant": tenant,
            }
        )
    return found


def ls_text(document: Document) -> str:
    """`ls` as a table."""
    if "chunks" not in document:
        names: list[str] = document["namespaces"]
        return "\n".join(names) if names else f"{document['url']} holds no chunks"
    rows: list[Sequence[object]] = [("KEY", "SIZE", "OBJECTS", "BLOCKS", "AGE", "TENANT")]
    for one in document["chunks"]:
        size = approximate_size(one["size_bytes"])
        age = _age(one["written_seconds"])
        rows.append((one["key"], size, one["objects"], one["num_blocks"], age, one["tenant"]))
    more = "\nmore than --limit; raise it, or narrow it with --key" if document["more"] else ""
    return table(rows) + more


# --- gc ------------------------------------------------------------------------------------------


def gc(config: Config, *, dry_run: bool, wait: bool, namespace: str | None) -> Document:
    """A whole round of collection on each namespace; with `wait`, the one that deletes too."""

    async def tried(store: ObjectTier, prefix: str) -> Report:
        return await compact(store, prefix, plan_of(config, whole=True, dry_run=True), time.time())

    def told(reports: list[Report]) -> Document:
        return {
            "dry_run": dry_run,
            "grace": format_duration(plan_of(config).grace_seconds),
            "namespaces": [_told(report) for report in reports],
        }

    async def command(store: ObjectTier) -> Document:
        if dry_run:
            return told([await tried(store, prefix) for prefix in await chosen(store, namespace)])
        if not (await store.probe()).creates:
            raise StoreCommandError(
                f"{store.url} cannot create an object without replacing one that is there, which "
                "compaction needs; bound it with a lifecycle rule of the store's own"
            )
        lease = Lease(store, holder_name("kvlake gc"), seconds=LEASE_SECONDS)
        await _take(lease)
        try:
            prefixes = await chosen(store, namespace)
            plan = plan_of(config, whole=True)
            reports = await collect(store, lease, plan, prefixes, Counts())
            if wait and any(report.waiting for report in reports):
                await _wait(lease, plan.grace_seconds)
                again = await collect(store, lease, plan, prefixes, Counts())
                reports = [_both(one, two) for one, two in zip(reports, again, strict=True)]
        finally:
            with anyio.move_on_after(LEASE_POLL_SECONDS, shield=True):
                await lease.give_back()
        return told(reports)

    return run(config, command)


async def _take(lease: Lease) -> None:
    """Take the lease, waiting for a holder that may have died."""
    until = time.monotonic() + 2 * LEASE_SECONDS
    while not await lease.take():
        if time.monotonic() > until:
            raise StoreCommandError(
                f"the store's lease is held by {lease.other}, which is collecting; try again later"
            )
        await anyio.sleep(LEASE_POLL_SECONDS)


async def _wait(lease: Lease, grace_seconds: float) -> None:
    # One second more: a store's times may be whole seconds.
    until = time.monotonic() + grace_seconds + 1.0
    while time.monotonic() < until:
        await anyio.sleep(min(LEASE_POLL_SECONDS, max(0.0, until - time.monotonic())))
        if not await lease.renew():
            raise Superseded("the lease was lost while waiting; nothing is left half done")


def _both(first: Report, second: Report) -> Report:
    second.logs_merged += first.logs_merged
    second.withdrawn += first.withdrawn
    second.withdrawn_bytes += first.withdrawn_bytes
    second.deleted += first.deleted
    second.found += first.found
    second.lost += first.lost
    second.files_removed += first.files_removed
    return second


def _told(report: Report) -> Document:
    return {
        "namespace": report.prefix.rpartition("/")[2],
        "withdrawn": report.withdrawn,
        "withdrawn_bytes": report.withdrawn_bytes,
        "deleted": report.deleted,
        "waiting": report.waiting,
        "found": report.found,
        "lost": report.lost,
        "logs_merged": report.logs_merged,
        "files_removed": report.files_removed,
        "objects": report.census.objects,
        "size_bytes": report.census.size_bytes,
    }


def gc_text(document: Document) -> str:
    """`gc` as a table and a sentence."""
    rows: list[Sequence[object]] = [
        ("NAMESPACE", "WITHDRAWN", "BYTES", "DELETED", "FOUND", "LOST", "KEPT", "SIZE")
    ]
    rows += [
        (
            one["namespace"],
            one["withdrawn"],
            approximate_size(one["withdrawn_bytes"]),
            one["deleted"],
            one["found"],
            one["lost"],
            one["objects"],
            approximate_size(one["size_bytes"]),
        )
        for one in document["namespaces"]
    ]
    lines = [table(rows)] if len(rows) > 1 else ["the store holds no chunks"]
    waiting = sum(one["waiting"] for one in document["namespaces"])
    if document["dry_run"]:
        lines.append("nothing was changed (--dry-run)")
    elif waiting:
        lines.append(
            f"{waiting} objects are withdrawn and can be deleted {document['grace']} after that, "
            "by any sidecar or the next kvlake gc (--wait waits for it)"
        )
    return "\n".join(lines)


# --- tables --------------------------------------------------------------------------------------


def _age(seconds: float) -> str:
    if not seconds:
        return "-"
    age = int(max(0.0, time.time() - seconds))
    for name, factor in (("d", 86_400), ("h", 3600), ("m", 60)):
        if age >= factor:
            return f"{age // factor}{name}"
    return f"{age}s"


def table(rows: list[Sequence[object]]) -> str:
    """Columns as wide as their widest cell."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in texts
    )
