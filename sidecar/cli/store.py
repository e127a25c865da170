"""`kvlake du`, `kvlake ls` and `kvlake gc`: look into the store, and keep it within its bounds.

Owns opening the configured store for one command, what is counted, and the tables. Does not own
lists of chunks (`ls.py`), rounds of collection (`tiers/catalog/compaction.py`) or the
catalog's files.

Invariants: `du` and `ls` write nothing; what they tell is the catalog: what is offered, not what a
listing of the bucket would find; a command that the store refuses ends with a sentence that says
what to change.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
import numpy as np

from sidecar.catalog.garbage_collector import (
    LEASE_SECONDS,
    collect,
    holder_name,
    namespaces,
    plan_of,
)
from sidecar.cli.ls import Listing, ListingFilter, TenantNames, age, list_chunks, table
from sidecar.config.units import format_duration
from sidecar.errors import StartError
from sidecar.service.store_stack import open_store
from sidecar.sessions.model_names import UNKNOWN, layers_of, model_name
from tiers.catalog.about import read_about
from tiers.catalog.compaction import CompactionReport, Superseded, compact
from tiers.catalog.lease import CatalogLease
from tiers.catalog.leftovers import Leftovers, remove_leftovers
from tiers.catalog.manifest import Counts
from tiers.catalog.names import KEY_BYTES, NAMESPACE_CHARACTERS, catalog_folder
from tiers.catalog.reader import Files
from tiers.catalog.retention import Why
from tiers.catalog.scan import all_rows
from tiers.catalog.usage import CHUNKS, OBJECTS, SIZE, UsageTable, tenant_of
from tiers.errors import TierError
from tiers.sizes import approximate_size

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from sidecar.config.model import Config
    from tiers.catalog.retention import Whys
    from tiers.catalog.rows import Rows
    from tiers.catalog.usage import Usage
    from tiers.store.object_tier import ObjectTier

LEASE_POLL_SECONDS: Final = 2.0
TENANTS_TOLD_MAX: Final = 1000
"""Tenants of a namespace that a table names, those that hold most."""
_DIGITS: Final = re.compile(rf"^[0-9a-f]{{0,{2 * KEY_BYTES}}}$")

Document = dict[str, Any]


class StoreCommandError(Exception):
    """The command cannot be carried out; the message says what to change."""


def run(config: Config, command: Callable[[ObjectTier], Awaitable[Document]]) -> Document:
    """Carry out a command on the configured store. Raises `StoreCommandError`."""
    settings = config.store
    if settings is None:
        raise StoreCommandError(
            "the built-in defaults have no store; give the sidecar's own file: --config FILE"
            if config.file is None
            else f"{config.file} has no section store; give the sidecar's own file with --config"
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


async def described(store: ObjectTier, prefixes: Sequence[str]) -> list[Document]:
    """Of each namespace its model, if the store says so. Raises the tier's errors.

    Sidecars of before wrote nothing of it.
    """
    found: dict[str, Document] = {}

    async def read(prefix: str) -> None:
        about = await read_about(store, prefix)
        namespace = {} if about is None else about.fields()
        found[prefix] = {
            "model": None if about is None else model_name(namespace, about.served_as),
            "layers": layers_of(namespace) or None,
            "about": None if about is None else namespace,
        }

    # As many at once as the store's own limit lets through.
    async with anyio.create_task_group() as tasks:
        for prefix in prefixes:
            tasks.start_soon(read, prefix)
    return [found[prefix] for prefix in prefixes]


def model_text(one: Document) -> str:
    """What a namespace is, for a table."""
    return ", ".join(filter(None, (one["model"] or UNKNOWN, one["layers"])))


# --- du ------------------------------------------------------------------------------------------


def du(config: Config, namespace: str | None) -> Document:
    """What each namespace and tenant holds."""

    async def command(store: ObjectTier) -> Document:
        told: list[Document] = []
        names = TenantNames(config)
        prefixes = await chosen(store, namespace)
        models = await described(store, prefixes)
        for prefix, model in zip(prefixes, models, strict=True):
            census = await census_of(store, prefix)
            tenants = census.largest(TENANTS_TOLD_MAX)
            told.append(
                {
                    "namespace": prefix.rpartition("/")[2],
                    **model,
                    **_held(census.whole),
                    "withdrawn": census.withdrawn,
                    "tenants": [
                        {"tenant": names.name(tenant), **_held(held)}
                        for tenant, held in tenants.items()
                    ],
                    "tenants_left_out": census.num_tenants - len(tenants),
                }
            )
        return {"url": store.url, "namespaces": told}

    return run(config, command)


async def census_of(store: ObjectTier, prefix: str) -> UsageTable:
    """What a namespace's catalog offers. Raises the tier's errors."""
    census = UsageTable()
    files = Files(store, catalog_folder(prefix), Counts())
    async for rows in all_rows(files, time.time()):
        await anyio.to_thread.run_sync(census.add, rows)
    return census


def _held(held: Usage) -> Document:
    return {
        "chunks": held.chunks,
        "objects": held.objects,
        "size_bytes": held.size_bytes,
        "oldest_seconds": held.oldest / 1e6,
    }


def du_text(document: Document) -> str:
    """`du` as a table."""
    rows: list[Sequence[object]] = [
        ("NAMESPACE", "MODEL", "TENANT", "CHUNKS", "OBJECTS", "SIZE", "WITHDRAWN", "OLDEST")
    ]
    now = time.time()

    def counted(held: Document) -> tuple[object, ...]:
        return (held["chunks"], held["objects"], approximate_size(held["size_bytes"]))

    for one in document["namespaces"]:
        oldest = age(one["oldest_seconds"], now)
        name = (one["namespace"], model_text(one))
        rows.append((*name, "all", *counted(one), one["withdrawn"], oldest))
        rows += [
            ("", "", who["tenant"], *counted(who), "", age(who["oldest_seconds"], now))
            for who in one["tenants"]
        ]
        if one["tenants_left_out"]:
            rows.append(("", "", f"and {one['tenants_left_out']} that hold less", *[""] * 5))
    return table(rows) if len(rows) > 1 else f"{document['url']} holds no chunks"


# --- ls ------------------------------------------------------------------------------------------


def ls(config: Config, wanted: ListingFilter, say: Callable[[str], None], *, as_json: bool) -> None:
    """Write the chunks of a namespace, sorted by key; without one, all namespaces."""
    if not _DIGITS.match(wanted.key):
        raise StoreCommandError(
            f"key {wanted.key!r}: keys are {2 * KEY_BYTES} hexadecimal digits, as kvlake ls prints "
            "them; give the first of them"
        )
    names = TenantNames(config)
    if wanted.tenant and names.word(wanted.tenant) is None:
        raise StoreCommandError(
            f"tenant {wanted.tenant!r}: the configuration names {names.known or 'none'}; give one "
            "of these, or an id of 16 hexadecimal digits"
        )

    async def command(store: ObjectTier) -> Document:
        prefixes = await chosen(store, wanted.namespace)
        found = [one.rpartition("/")[2] for one in prefixes]
        if wanted.namespace is None:
            models = dict(zip(found, await described(store, prefixes), strict=True))
            return {"url": store.url, "namespaces": found, "models": models}
        [model] = await described(store, prefixes)
        place = f"{store.url.rstrip('/')}/{prefixes[0]}"
        listing = Listing(say, names, as_json=as_json, place=place)
        if not as_json:
            say(f"{found[0]}: {model_text(model)}")
        listing.open({"url": store.url, "namespace": found[0], **model}, "chunks")
        more = await list_chunks(store, prefixes[0], wanted, names, listing)
        listing.close({"more": more})
        if more and not as_json:
            say("more than --limit; raise it, or narrow it with --key")
        return {}

    document = run(config, command)
    if not document:
        return
    if as_json:
        say(json.dumps(document, indent=2))
    elif not document["models"]:
        say(f"{document['url']} holds no chunks")
    else:
        rows = [(name, model_text(model)) for name, model in document["models"].items()]
        say(table([("NAMESPACE", "MODEL"), *rows]))


# --- gc ------------------------------------------------------------------------------------------


def gc(
    config: Config,
    *,
    dry_run: bool,
    wait: bool,
    namespace: str | None,
    victims: Listing | None = None,
) -> Document:
    """A whole round of collection on each namespace; with `wait`, the one that deletes too.

    With `dry_run`, whatever would be withdrawn is written to `victims`.
    """
    names = TenantNames(config)

    async def tell(rows: Rows, whys: Whys) -> None:
        if victims is not None:
            victims.chunks(rows, whys)

    async def tried(store: ObjectTier, prefix: str) -> CompactionReport:
        plan = plan_of(config, whole=True, dry_run=True)
        return await compact(store, prefix, plan, time.time(), tell=tell)

    def told(reports: list[CompactionReport], left: Leftovers) -> Document:
        return {
            "dry_run": dry_run,
            "grace": format_duration(plan_of(config).grace_seconds),
            "namespaces": [_told(report, names) for report in reports],
            "leftovers": dataclasses.asdict(left),
        }

    async def leftovers(
        store: ObjectTier, prefixes: Sequence[str], lease: CatalogLease | None = None
    ) -> Leftovers:
        assert config.store is not None, "one was opened"
        return await remove_leftovers(
            store,
            time.time() if lease is None else lease.store_seconds,
            quarantine_seconds=config.store.gc.quarantine_keep,
            namespace="" if namespace is None else prefixes[0],
            dry_run=dry_run,
            alive=None if lease is None else lease.renew,
        )

    async def rounds(
        store: ObjectTier, lease: CatalogLease, prefixes: Sequence[str]
    ) -> list[CompactionReport]:
        plan = plan_of(config, whole=True)
        reports, failure = await collect(store, lease, plan, prefixes, Counts())
        if failure is not None:
            raise failure
        return reports

    async def command(store: ObjectTier) -> Document:
        if dry_run:
            prefixes = await chosen(store, namespace)
            reports = [await tried(store, prefix) for prefix in prefixes]
            return told(reports, await leftovers(store, prefixes))
        if not (await store.probe()).creates:
            raise StoreCommandError(
                f"{store.url} cannot create an object without replacing one that is there, which "
                "compaction needs; bound it with a lifecycle rule of the store's own"
            )
        lease = CatalogLease(store, holder_name("kvlake gc"), seconds=LEASE_SECONDS)
        await _take(lease)
        try:
            prefixes = await chosen(store, namespace)
            reports = await rounds(store, lease, prefixes)
            while any(report.logs_left for report in reports):
                again = await rounds(store, lease, prefixes)
                reports = [_both(one, two) for one, two in zip(reports, again, strict=True)]
            left = await leftovers(store, prefixes, lease)
            if wait and any(report.waiting for report in reports):
                await _wait(lease, plan_of(config).grace_seconds)
                again = await rounds(store, lease, prefixes)
                reports = [_both(one, two) for one, two in zip(reports, again, strict=True)]
        finally:
            with anyio.move_on_after(LEASE_POLL_SECONDS, shield=True):
                await lease.give_back()
        return told(reports, left)

    return run(config, command)


async def _take(lease: CatalogLease) -> None:
    """Take the lease, waiting for a holder that may have died."""
    until = time.monotonic() + 2 * LEASE_SECONDS
    while not await lease.take():
        if time.monotonic() > until:
            raise StoreCommandError(
                f"the store's lease is held by {lease.other}, which is collecting; try again later"
            )
        await anyio.sleep(LEASE_POLL_SECONDS)


async def _wait(lease: CatalogLease, grace_seconds: float) -> None:
    # One second more: a store's times may be whole seconds.
    until = time.monotonic() + grace_seconds + 1.0
    while time.monotonic() < until:
        await anyio.sleep(min(LEASE_POLL_SECONDS, max(0.0, until - time.monotonic())))
        if not await lease.renew():
            raise Superseded("the lease was lost while waiting; nothing is left half done")


def _both(first: CompactionReport, second: CompactionReport) -> CompactionReport:
    second.logs_merged += first.logs_merged
    second.withdrawn += first.withdrawn
    second.withdrawn_bytes += first.withdrawn_bytes
    second.fallen.add(first.fallen.cells)
    second.deleted += first.deleted
    second.found += first.found
    second.lost += first.lost
    second.files_removed += first.files_removed
    return second


def _told(report: CompactionReport, names: TenantNames) -> Document:
    fallen = report.fallen.cells
    order = np.argsort(-fallen.amounts[:, SIZE], kind="stable")
    columns = zip(
        fallen.spans[order[:TENANTS_TOLD_MAX]].tolist(),
        fallen.tenants[order[:TENANTS_TOLD_MAX]].tolist(),
        fallen.amounts[order[:TENANTS_TOLD_MAX]].tolist(),
        strict=True,
    )
    held = report.census.whole
    return {
        "namespace": report.prefix.rpartition("/")[2],
        "withdrawn": report.withdrawn,
        "withdrawn_bytes": report.withdrawn_bytes,
        "withdrawn_by": [
            {
                "bound": Why(why).setting,
                "tenant": names.name(tenant_of(word)),
                "chunks": amounts[CHUNKS],
                "objects": amounts[OBJECTS],
                "size_bytes": amounts[SIZE],
            }
            for why, word, amounts in columns
        ],
        "withdrawn_by_left_out": max(0, len(fallen) - TENANTS_TOLD_MAX),
        "deleted": report.deleted,
        "waiting": report.waiting,
        "found": report.found,
        "lost": report.lost,
        "logs_merged": report.logs_merged,
        "logs_left": report.logs_left,
        "files_removed": report.files_removed,
        "objects": held.objects,
        "size_bytes": held.size_bytes,
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
    if any(one["withdrawn_by"] for one in document["namespaces"]):
        lines += ["", _fallen_text(document), ""]
    lines += _leftovers_text(document["leftovers"])
    waiting = sum(one["waiting"] for one in document["namespaces"])
    if logs_left := sum(one["logs_left"] for one in document["namespaces"]):
        lines.append(
            f"this is without what {logs_left} files of the catalog say: they are more than one "
            "round merges; kvlake gc without --dry-run goes on until all are"
        )
    if document["dry_run"]:
        lines.append("nothing was changed (--dry-run)")
    elif waiting:
        lines.append(
            f"{waiting} objects are withdrawn and can be deleted {document['grace']} after that, "
            "by any sidecar or the next kvlake gc (--wait waits for it)"
        )
    return "\n".join(lines)


def _leftovers_text(left: Document) -> list[str]:
    """What was found beside the chunks, where there was anything."""
    lines: list[str] = []
    if left["quarantined"] or left["quarantine_kept"]:
        gone, kept = (
            f"{left[what]} ({approximate_size(left[f'{what}_bytes'])})"
            for what in ("quarantined", "quarantine_kept")
        )
        lines.append(f"damaged objects in quarantine/: {gone} old enough to go, {kept} kept")
    if left["probes"]:
        lines.append(f"probes of sidecars that died: {left['probes']}")
    return lines


def _fallen_text(document: Document) -> str:
    """What was withdrawn, by the bound that it fell to and by tenant."""
    rows: list[Sequence[object]] = [("NAMESPACE", "BOUND", "TENANT", "CHUNKS", "OBJECTS", "BYTES")]
    for one in document["namespaces"]:
        for index, part in enumerate(one["withdrawn_by"]):
            size = approximate_size(part["size_bytes"])
            counted = (part["chunks"], part["objects"], size)
            rows.append(
                ("" if index else one["namespace"], part["bound"], part["tenant"], *counted)
            )
        if one["withdrawn_by_left_out"]:
            rows.append(("", f"and {one['withdrawn_by_left_out']} lines with less", *[""] * 4))
    return table(rows)
