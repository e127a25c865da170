"""`kvlake du`: what each namespace and tenant holds, in the object store or in host memory.

The store's numbers are those of its catalog: what is offered, not what a listing of the bucket
would find. Nothing is written. A running sidecar answers for host memory
(`sidecar/observe/host_contents.py`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio.to_thread

from sidecar.cli.client import asks_host, get_list, host_memory
from sidecar.cli.console import Document, age, load_config, say, say_json, table
from sidecar.cli.store import (
    TENANTS_SHOWN_MAX,
    TenantNames,
    describe_models,
    find_namespaces,
    model_text,
    namespace_of,
    run,
)
from sidecar.exits import Exit
from tiers.catalog.manifest import Counts
from tiers.catalog.names import catalog_folder
from tiers.catalog.reader import Files
from tiers.catalog.scan import all_rows
from tiers.catalog.usage import UsageTable
from tiers.sizes import approximate_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from sidecar.config.model import Config
    from tiers.catalog.usage import Usage
    from tiers.store.object_tier import ObjectTier


def main(options: argparse.Namespace) -> int:
    """Show usage as a table or as JSON."""
    config = load_config(options.config)
    if asks_host(options, config):
        with host_memory(options) as client:
            found = get_list(client, "/host", "namespaces", namespace=options.namespace or "")
        document, text = {"host": client.url, **found}, _host_text
    else:
        document, text = _store_usage(config, options.namespace), _store_text
    if options.json:
        say_json(document)
    else:
        say(text(document))
    return Exit.OK


def _store_usage(config: Config, namespace: str | None) -> Document:
    names = TenantNames(config)

    async def command(store: ObjectTier) -> Document:
        found: list[Document] = []
        prefixes = await find_namespaces(store, namespace)
        models = await describe_models(store, prefixes)
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

    return run(config, command)


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


def _store_text(document: Document) -> str:
    head = ("NAMESPACE", "MODEL", "TENANT", "CHUNKS", "OBJECTS", "SIZE", "WITHDRAWN", "OLDEST")
    now = time.time()

    def cells(held: Document) -> tuple[object, ...]:
        size, oldest = approximate_size(held["size_bytes"]), age(held["oldest_seconds"], now)
        return held["chunks"], held["objects"], size, held.get("withdrawn", ""), oldest

    rows = _rows(document, cells, columns=len(head))
    return table([head, *rows]) if rows else f"{document['url']} holds no chunks"


def _host_text(document: Document) -> str:
    head = ("NAMESPACE", "MODEL", "TENANT", "CHUNKS", "PARTS", "SIZE")

    def cells(held: Document) -> tuple[object, ...]:
        return held["chunks"], held["parts"], approximate_size(held["size_bytes"])

    rows = _rows(document, cells, columns=len(head))
    lines = [
        f"host memory of the sidecar at {document['host']}",
        table([head, *rows]) if rows else "no engine has attached yet",
    ]
    if unclaimed := document["unclaimed_bytes"]:
        lines.append(f"{approximate_size(unclaimed)} of an earlier run wait for their engine")
    return "\n".join(lines)


def _rows(
    document: Document, cells: Callable[[Document], tuple[object, ...]], *, columns: int
) -> list[tuple[object, ...]]:
    """A row for each namespace, followed by one for each of its tenants."""
    rows: list[tuple[object, ...]] = []
    for one in document["namespaces"]:
        rows.append((one["namespace"], model_text(one), "all", *cells(one)))
        rows += [("", "", who["tenant"], *cells(who)) for who in one["tenants"]]
        if one["tenants_left_out"]:
            left_out = f"and {one['tenants_left_out']} that hold less"
            rows.append(("", "", left_out, *[""] * (columns - 3)))
    return rows
