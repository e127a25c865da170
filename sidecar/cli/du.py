"""`kvlake du`: what each namespace and tenant holds, in the object store or in host memory.

The store's numbers are those of its catalog: what is offered, not what a listing of the bucket
would find. Nothing is written. A running sidecar answers for host memory
(`sidecar/observe/host_contents.py`).
"""

import time
from typing import Final

import anyio.to_thread

from sidecar.cli.client import asks_host, get_list, host_heading, host_memory
from sidecar.cli.console import Document, Options, age, document_table, load_config, show
from sidecar.cli.store import (
    TENANTS_SHOWN_MAX,
    TenantNames,
    describe_models,
    find_namespaces,
    model_text,
    namespace_of,
    run,
)
from sidecar.config.model import Config
from tiers.catalog.manifest import Counts
from tiers.catalog.names import catalog_folder
from tiers.catalog.reader import Files
from tiers.catalog.scan import all_rows
from tiers.catalog.usage import Usage, UsageTable
from tiers.sizes import approximate_size
from tiers.store.object_tier import ObjectTier

_COLUMNS: Final = {
    "NAMESPACE": "namespace",
    "MODEL": "model",
    "TENANT": "tenant",
    "CHUNKS": "chunks",
}
_HOST_COLUMNS: Final = {**_COLUMNS, "PARTS": "parts", "SIZE": "size_bytes"}
_STORE_COLUMNS: Final = {
    **_COLUMNS,
    "OBJECTS": "objects",
    "SIZE": "size_bytes",
    "WITHDRAWN": "withdrawn",
    "OLDEST": "oldest",
}


def main(options: Options) -> None:
    """Show usage as a table or as JSON."""
    config = load_config(options.config)
    if asks_host(options, config):
        with host_memory(options) as client:
            found = get_list(client, "/host", "namespaces", namespace=options.namespace or "")
        show({"host": client.url, **found}, _host_text, as_json=options.json)
    else:
        show(_store_usage(config, options.namespace), _store_text, as_json=options.json)


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
    now, rows = time.time(), _rows(document)
    for row in rows:
        row["oldest"] = age(row.get("oldest_seconds", 0), now)
    return document_table(rows, _STORE_COLUMNS) if rows else f"{document['url']} holds no chunks"


def _host_text(document: Document) -> str:
    rows = _rows(document)
    usage = document_table(rows, _HOST_COLUMNS) if rows else "no engine has attached yet"
    lines = [host_heading(document["host"]), usage]
    if unclaimed := document["unclaimed_bytes"]:
        lines.append(f"{approximate_size(unclaimed)} of an earlier run wait for their engine")
    return "\n".join(lines)


def _rows(document: Document) -> list[Document]:
    """A row for each namespace, followed by one for each of its tenants."""
    rows: list[Document] = []
    same = {"namespace": "", "model": ""}
    for one in document["namespaces"]:
        rows.append({**one, "model": model_text(one), "tenant": "all"})
        rows += [same | tenant for tenant in one["tenants"]]
        if one["tenants_left_out"]:
            rows.append(same | {"tenant": f"and {one['tenants_left_out']} that hold less"})
    return rows
