"""`kvlake gc`: keep the object store within its limits, now.

Owns the order of one collection by hand, and its report. Does not own rounds of collection
(`sidecar/catalog/garbage_collector.py`, `tiers/catalog/compaction.py`).
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Final

import anyio
import numpy as np

from sidecar.catalog.garbage_collector import LEASE_SECONDS, collect, holder_name, plan_of
from sidecar.cli.console import (
    CommandError,
    Document,
    NoAnswer,
    Options,
    document_table,
    load_config,
    say,
    show,
)
from sidecar.cli.contents import WITHDRAWN_COLUMNS, ListWriter, chunk_documents, chunk_line
from sidecar.cli.store import TENANTS_SHOWN_MAX, TenantNames, find_namespaces, namespace_of, run
from sidecar.config.model import Config
from sidecar.sessions.model_names import printable
from tiers.catalog.compaction import compact
from tiers.catalog.lease import CatalogLease
from tiers.catalog.major_compaction import CompactionReport
from tiers.catalog.manifest import Counts
from tiers.catalog.orphans import Leftovers, remove_leftovers
from tiers.catalog.retention import Reasons, RetentionReason
from tiers.catalog.rows import Rows
from tiers.catalog.scan import Superseded
from tiers.catalog.usage import CHUNKS, OBJECTS, SIZE, tenant_of
from tiers.sizes import approximate_size, format_duration
from tiers.store.object_tier import ObjectTier

LEASE_POLL_SECONDS: Final = 2.0
_SUMMED: Final = (
    *("withdrawn", "withdrawn_bytes", "deleted", "found", "lost"),
    *("logs_merged", "files_removed"),
)
"""Numbers of a report that add up over rounds."""
_NAMESPACE_COLUMNS: Final = {
    "NAMESPACE": "namespace",
    "WITHDRAWN": "withdrawn",
    "BYTES": "withdrawn_bytes",
    "DELETED": "deleted",
    "FOUND": "found",
    "LOST": "lost",
    "KEPT": "objects",
    "SIZE": "size_bytes",
}
_WITHDRAWN_COLUMNS: Final = {
    "NAMESPACE": "namespace",
    "BOUND": "bound",
    "TENANT": "tenant",
    "CHUNKS": "chunks",
    "OBJECTS": "objects",
    "BYTES": "size_bytes",
}


def main(options: Options) -> None:
    """Collect, or show what would be collected."""
    config = load_config(options.config)
    if not options.list:
        if options.dry_run:
            document = try_collection(config, options.namespace)
        else:
            document = run_collection(config, options.namespace, wait=options.wait)
        show(document, _text, as_json=options.json)
        return
    if not options.dry_run:
        raise CommandError("--list shows what would be withdrawn: give it together with --dry-run")
    writer = ListWriter(chunk_line, as_json=options.json)
    writer.open({}, "victims", WITHDRAWN_COLUMNS)
    document = try_collection(config, options.namespace, writer)
    writer.close(document)
    if not options.json:
        say(f"\n{_text(document)}")


def try_collection(
    config: Config, namespace: str | None, writer: ListWriter | None = None
) -> Document:
    """What a collection would do. Chunks that it would withdraw go to `writer`."""
    names = TenantNames(config)

    async def write(rows: Rows, reasons: Reasons) -> None:
        if writer is not None:
            writer.write(chunk_documents(rows, names, reasons=reasons))

    async def command(store: ObjectTier) -> Document:
        prefixes = await find_namespaces(store, namespace)
        plan = plan_of(config, major=True, dry_run=True)
        reports = [
            await compact(store, prefix, plan, time.time(), on_withdrawn=write)
            for prefix in prefixes
        ]
        left = await _remove_leftovers(config, store, namespace and prefixes[0], None)
        return _document(config, reports, left, dry_run=True) | {"left_to_others": []}

    return run(config, command)


def run_collection(config: Config, namespace: str | None = None, *, wait: bool = False) -> Document:
    """A whole round of collection on each namespace; with `wait`, until the deletions are done."""

    async def command(store: ObjectTier) -> Document:
        if not (await store.probe()).creates:
            raise CommandError(
                f"{store.url} cannot create an object without replacing an existing one, which "
                "compaction needs; bound it with a lifecycle rule of the store's own"
            )
        lease = CatalogLease(store, holder_name("kvlake gc"), seconds=LEASE_SECONDS)
        await _take(lease)
        try:
            prefixes = await find_namespaces(store, namespace)
            reports = await _collect(config, store, lease, prefixes)
            while any(report.logs_left for report in reports):
                reports = await _collect(config, store, lease, prefixes, reports)
            left = await _remove_leftovers(config, store, namespace and prefixes[0], lease)
            # What was withdrawn in the grace of what an earlier round withdrew has the next one.
            for _ in range(2 if any(report.late for report in reports) else 1):
                if wait and any(report.waiting for report in reports):
                    await _wait(lease, plan_of(config).grace_seconds)
                    reports = await _collect(config, store, lease, prefixes, reports)
        finally:
            with anyio.move_on_after(LEASE_POLL_SECONDS, shield=True):
                await lease.release()
        document = _document(config, reports, left, dry_run=False)
        done = {report.prefix for report in reports}
        others = [namespace_of(prefix) for prefix in prefixes if prefix not in done]
        return document | {"left_to_others": others}

    return run(config, command)


async def _collect(
    config: Config,
    store: ObjectTier,
    lease: CatalogLease,
    prefixes: Sequence[str],
    before: Sequence[CompactionReport] = (),
) -> list[CompactionReport]:
    """One round. Its reports include what the rounds `before` did."""
    plan = plan_of(config, major=True)
    reports, failure = await collect(store, lease, plan, prefixes, Counts())
    if failure is not None:
        raise failure
    # Another process may have compacted a namespace in one of the rounds.
    earlier = {report.prefix: report for report in before}
    for second in reports:
        if (first := earlier.pop(second.prefix, None)) is not None:
            for name in _SUMMED:
                setattr(second, name, getattr(second, name) + getattr(first, name))
            second.withdrawn_cells.add(first.withdrawn_cells.cells)
    return [*reports, *earlier.values()]


async def _remove_leftovers(
    config: Config, store: ObjectTier, prefix: str | None, lease: CatalogLease | None
) -> Leftovers:
    """Remove what is beside the chunks; without a lease, only count it."""
    assert config.store is not None, "one was opened"
    return await remove_leftovers(
        store,
        time.time() if lease is None else lease.store_seconds,
        quarantine_seconds=config.store.gc.quarantine_keep,
        namespace=prefix or "",
        dry_run=lease is None,
        renew_lease=None if lease is None else lease.renew,
    )


async def _take(lease: CatalogLease) -> None:
    """Take the lease, after waiting for a holder that may have died."""
    until = time.monotonic() + 2 * LEASE_SECONDS
    while not await lease.acquire():
        if time.monotonic() > until:
            # Anybody who can write to the store can choose the name.
            holder = printable(lease.other.holder)
            raise NoAnswer(
                f"the store's lease is held by {holder}, which is collecting; try again later"
            )
        await anyio.sleep(LEASE_POLL_SECONDS)


async def _wait(lease: CatalogLease, grace_seconds: float) -> None:
    # One second more: a store's times may be whole seconds.
    until = time.monotonic() + grace_seconds + 1.0
    while time.monotonic() < until:
        await anyio.sleep(min(LEASE_POLL_SECONDS, max(0.0, until - time.monotonic())))
        if not await lease.renew():
            raise Superseded("the lease was lost while waiting; nothing is left half done")


# --- the report ----------------------------------------------------------------------------------


def _document(
    config: Config, reports: Sequence[CompactionReport], left: Leftovers, *, dry_run: bool
) -> Document:
    names = TenantNames(config)
    return {
        "dry_run": dry_run,
        "grace": format_duration(plan_of(config).grace_seconds),
        "namespaces": [_namespace(report, names) for report in reports],
        "leftovers": dataclasses.asdict(left),
    }


def _namespace(report: CompactionReport, names: TenantNames) -> Document:
    withdrawn, held = report.withdrawn_cells.cells, report.usage.total
    order = np.argsort(-withdrawn.amounts[:, SIZE], kind="stable")
    largest = withdrawn.take(order[:TENANTS_SHOWN_MAX])
    columns = [column.tolist() for column in (largest.spans, largest.tenants, largest.amounts)]
    return {
        "namespace": namespace_of(report.prefix),
        **{name: getattr(report, name) for name in (*_SUMMED, "waiting", "logs_left")},
        "withdrawn_by": [
            {
                "bound": RetentionReason(reason).setting,
                "tenant": names.name(tenant_of(word)),
                "chunks": amounts[CHUNKS],
                "objects": amounts[OBJECTS],
                "size_bytes": amounts[SIZE],
            }
            for reason, word, amounts in zip(*columns, strict=True)
        ],
        "withdrawn_by_left_out": len(withdrawn) - len(largest),
        "objects": held.objects,
        "size_bytes": held.size_bytes,
    }


def _text(document: Document) -> str:
    namespaces, left = document["namespaces"], document["leftovers"]
    table = document_table(namespaces, _NAMESPACE_COLUMNS)
    lines = [table if namespaces else "the store holds no chunks"]
    if rows := _withdrawn_rows(namespaces):
        lines += ["", document_table(rows, _WITHDRAWN_COLUMNS), ""]
    if left["quarantined"] or left["quarantine_kept"]:
        gone, kept = (
            f"{left[what]} ({approximate_size(left[f'{what}_bytes'])})"
            for what in ("quarantined", "quarantine_kept")
        )
        lines.append(f"damaged objects in quarantine/: {gone} old enough to go, {kept} kept")
    if left["probes"]:
        lines.append(f"probes of sidecars that died: {left['probes']}")
    if logs_left := sum(one["logs_left"] for one in namespaces):
        lines.append(
            f"this does not include {logs_left} files of the catalog, which are more than one "
            "round merges; kvlake gc without --dry-run merges all of them"
        )
    if others := document["left_to_others"]:
        lines.append(
            f"another process compacted {', '.join(others)} at the same time; run kvlake gc again "
            "for it"
        )
    if document["dry_run"]:
        lines.append("nothing was changed (--dry-run)")
    elif waiting := sum(one["waiting"] for one in namespaces):
        lines.append(
            f"{waiting} objects are withdrawn and can be deleted {document['grace']} after that, "
            "by any sidecar or the next kvlake gc (--wait waits for it)"
        )
    return "\n".join(lines)


def _withdrawn_rows(namespaces: Sequence[Document]) -> list[Document]:
    """What was withdrawn, by limit and tenant."""
    rows: list[Document] = []
    for one in namespaces:
        name = {"namespace": one["namespace"]}
        rows += [name | part for part in one["withdrawn_by"]]
        if left_out := one["withdrawn_by_left_out"]:
            rows.append(name | {"bound": f"and {left_out} lines with less"})
    return rows
