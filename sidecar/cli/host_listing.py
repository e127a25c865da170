"""`kvlake du` and `kvlake ls` on host memory: what a running sidecar holds, as text or JSON.

Owns asking the sidecar, page by page, and the tables. Does not own what is told
(`observe/host_contents.py` in the sidecar), nor the store's side of both commands (`store.py`,
`ls.py`).

Invariant: one page of chunks is in memory, whatever the limit.
"""

from __future__ import annotations

import json
import urllib.parse
from typing import TYPE_CHECKING, Any, Final, Protocol

from sidecar.cli.ls import table
from sidecar.cli.status import StatusError
from sidecar.cli.store import model_text
from tiers.sizes import approximate_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sidecar.cli.ls import ListingFilter
    from sidecar.cli.status import SidecarAddress

PAGE_CHUNKS: Final = 1000
"""As many as a sidecar tells in one answer."""
_ABOUT: Final = ("model", "layers", "about")

Document = dict[str, Any]


class HostAnswer(Protocol):
    """What a command found, in lines."""

    def as_json(self) -> Iterator[str]:
        """One JSON object."""
        ...

    def as_text(self) -> Iterator[str]:
        """For people."""
        ...


def du(sidecar: SidecarAddress, namespace: str | None) -> HostUsage:
    """What each namespace and tenant holds. Raises `StatusError`."""
    query = urllib.parse.urlencode({"namespace": namespace or ""})
    return HostUsage(sidecar.url, _asked(sidecar, f"/host?{query}", "namespaces"))


def ls(sidecar: SidecarAddress, wanted: ListingFilter) -> HostAnswer:
    """The chunks of a namespace, sorted by key; without one, all namespaces."""
    if wanted.namespace is None:
        return Namespaces(sidecar.url, du(sidecar, None).document)
    return HostChunks(sidecar, wanted)


class HostUsage:
    """The answer of `du`."""

    def __init__(self, url: str, document: Document) -> None:
        self._url = url
        self.document = document

    def as_json(self) -> Iterator[str]:
        """See `HostAnswer`."""
        yield json.dumps({"host": self._url, **self.document}, indent=2)

    def as_text(self) -> Iterator[str]:
        """See `HostAnswer`."""
        yield _heading(self._url)
        rows: list[Sequence[object]] = [("NAMESPACE", "MODEL", "TENANT", "CHUNKS", "PARTS", "SIZE")]
        for one in self.document["namespaces"]:
            rows.append((one["namespace"], model_text(one), "all", *_counted(one)))
            rows += [("", "", who["tenant"], *_counted(who)) for who in one["tenants"]]
            if one["tenants_left_out"]:
                rows.append(("", "", f"and {one['tenants_left_out']} that hold less", *[""] * 3))
        yield table(rows) if len(rows) > 1 else "no engine has attached yet"
        if unclaimed := self.document["unclaimed_bytes"]:
            yield f"{approximate_size(unclaimed)} of an earlier run wait for their engine"


class Namespaces:
    """The answer of `ls` without a namespace."""

    def __init__(self, url: str, document: Document) -> None:
        self._url = url
        self._found = {one["namespace"]: one for one in document["namespaces"]}

    def as_json(self) -> Iterator[str]:
        """See `HostAnswer`."""
        models = {name: {key: one[key] for key in _ABOUT} for name, one in self._found.items()}
        document = {"host": self._url, "namespaces": list(models), "models": models}
        yield json.dumps(document, indent=2)

    def as_text(self) -> Iterator[str]:
        """See `HostAnswer`."""
        yield _heading(self._url)
        rows = [(name, model_text(one)) for name, one in self._found.items()]
        yield table([("NAMESPACE", "MODEL"), *rows]) if rows else "no engine has attached yet"


class HostChunks:
    """The answer of `ls` of one namespace."""

    def __init__(self, sidecar: SidecarAddress, wanted: ListingFilter) -> None:
        self._sidecar = sidecar
        self._wanted = wanted

    def as_json(self) -> Iterator[str]:
        """See `HostAnswer`."""
        told, more = 0, False
        for number, page in enumerate(self._pages()):
            if number == 0:
                head = {"host": self._sidecar.url} | {
                    name: page[name] for name in ("namespace", *_ABOUT)
                }
                yield json.dumps(head)[:-1] + ', "chunks": ['
            for chunk in page["chunks"]:
                yield f"{',' if told else ' '} {json.dumps(chunk)}"
                told += 1
            more = page["more"]
        yield f'], "more": {json.dumps(more)}}}'

    def as_text(self) -> Iterator[str]:
        """See `HostAnswer`."""
        more = False
        for number, page in enumerate(self._pages()):
            if number == 0:
                yield _heading(self._sidecar.url)
                yield f"{page['namespace']}: {model_text(page)}"
                yield _line("KEY", "SIZE", "PARTS", "BLOCKS", "TENANT", "STATE")
            for chunk in page["chunks"]:
                yield _chunk_line(chunk)
            more = page["more"]
        if more:
            yield "more than --limit; raise it, or narrow it with --key"

    def _pages(self) -> Iterator[Document]:
        """Answers of the sidecar, up to the limit."""
        left, after = self._wanted.limit, ""
        while True:
            num_chunks = min(left, PAGE_CHUNKS)
            query = {
                "namespace": self._wanted.namespace or "",
                "key": self._wanted.key,
                "tenant": self._wanted.tenant,
                "after": after,
                "limit": str(num_chunks),
            }
            path = f"/host/chunks?{urllib.parse.urlencode(query)}"
            page = _asked(self._sidecar, path, "chunks")
            yield page
            left, after = left - num_chunks, page["last"]
            if not left or not page["more"]:
                return


def _asked(sidecar: SidecarAddress, path: str, field: str) -> Document:
    document = sidecar.ask(path)
    if not isinstance(document.get(field), list):
        raise StatusError(f"{sidecar.url} answered something else; is that a kvlake sidecar?")
    return document


def _heading(url: str) -> str:
    return f"host memory of the sidecar at {url}"


def _counted(held: Document) -> tuple[object, ...]:
    return (held["chunks"], held["parts"], approximate_size(held["size_bytes"]))


def _chunk_line(chunk: Document) -> str:
    state = "loadable" if chunk["loadable"] else "in part"
    state += ", pinned" * chunk["pinned"] + ", in the store" * chunk["in_store"]
    size = approximate_size(chunk["size_bytes"])
    return _line(chunk["key"], size, chunk["parts"], chunk["num_blocks"], chunk["tenant"], state)


def _line(*cells: object) -> str:
    key, size, parts, num_blocks, tenant, state = map(str, cells)
    return f"{key:<64}  {size:<10}  {parts:<5}  {num_blocks:<6}  {tenant:<16}  {state}".rstrip()
