"""What host memory holds, by namespace and tenant and chunk by chunk, for whoever asks over HTTP.

Owns going through the chunks of host memory while the sidecar serves, and the documents that come
of it. Does not own chunks (`core/directory.py`), HTTP (`http.py`), nor how it is shown
(`cli/host_listing.py`).

Invariants: nothing is changed; the event loop goes on between two slices of `CHUNKS_PER_SLICE`, so
what is told was so for each chunk, but not for all at one moment; one question is answered at a
time; an answer has at most `LIMIT_MAX` chunks. Cache salts and token ids are in no answer.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sidecar.core.directory import SegmentState
from sidecar.sessions.model_names import layers_of, model_name
from tiers.catalog.names import KEY_BYTES, NAMESPACE_CHARACTERS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from sidecar.core.directory import Chunk
    from sidecar.service.dispatcher import Dispatcher
    from sidecar.sessions.namespaces import RealmLayout

CHUNKS_PER_SLICE: Final = 1024
LIMIT_MAX: Final = 1000
TENANTS_TOLD_MAX: Final = 1000
_KEY: Final = re.compile(rf"^[0-9a-f]{{0,{2 * KEY_BYTES}}}$")
_PLACE: Final = re.compile(rf"^([0-9a-f]{{{2 * KEY_BYTES}}}:[0-9]{{9}})?$")
_TENANT: Final = re.compile(r"^[0-9a-f]{16}$")

Document = dict[str, Any]


class QueryError(ValueError):
    """A question that makes no sense; the message names the field, its value and the remedy."""


class Wanted(NamedTuple):
    """Which chunks are asked for: of one namespace, so many at most, behind the last ones."""

    namespace: str
    key: str = ""
    after: str = ""
    """`last` of an answer."""
    tenant: str = ""
    limit: int = LIMIT_MAX


def wanted_in(query: Mapping[str, str]) -> Wanted:
    """The question in a query of HTTP. Raises `QueryError`."""
    limit = query.get("limit", str(LIMIT_MAX))
    if not limit.isdecimal() or int(limit[:9]) > LIMIT_MAX:
        raise QueryError(f"limit={limit[:32]!r}: a whole number, {LIMIT_MAX} at most")
    if not _KEY.match(digits := query.get("key", "")):
        raise QueryError(
            f"key={digits[:80]!r}: keys are {2 * KEY_BYTES} hexadecimal digits; give the first of "
            "them"
        )
    if not _PLACE.match(after := query.get("after", "")):
        raise QueryError(f"after={after[:80]!r}: give `last` of the answer before")
    given = {name: query.get(name, "") for name in ("namespace", "key", "after", "tenant")}
    return Wanted(**given, limit=int(limit))


@dataclass(slots=True)
class _Held:
    chunks: int = 0
    """Those that can be loaded: all their parts are there."""
    parts: int = 0
    size_bytes: int = 0

    def add(self, chunk: Chunk, size_bytes: int) -> None:
        self.chunks += chunk.loadable
        self.parts += chunk.hosted
        self.size_bytes += size_bytes

    def document(self) -> Document:
        return {"chunks": self.chunks, "parts": self.parts, "size_bytes": self.size_bytes}


@dataclass(slots=True)
class _Usage:
    whole: _Held = field(default_factory=_Held)
    tenants: dict[bytes, _Held] = field(default_factory=dict[bytes, _Held])


class HostContents:
    """Answers questions about one hub's host memory."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._one = asyncio.Lock()

    async def usage(self, namespace: str = "") -> Document:
        """What each namespace and tenant holds; of one namespace alone where its digits are given.

        Raises `QueryError`.
        """
        chosen = dict([self._namespace(namespace)]) if namespace else self._namespaces()
        async with self._one:
            told: list[Document] = []
            for name, realms in chosen.items():
                told.append(_described(name, realms) | await self._usage_of(realms))
        unclaimed = self._dispatcher.engine.snapshot().unclaimed_bytes
        return {"namespaces": told, "unclaimed_bytes": unclaimed}

    async def _usage_of(self, realms: list[RealmLayout]) -> Document:
        usage = _Usage()
        async for chunk in self._chunks(realms):
            size_bytes = self._size_bytes(chunk)
            usage.whole.add(chunk, size_bytes)
            usage.tenants.setdefault(chunk.tenant, _Held()).add(chunk, size_bytes)
        largest = sorted(usage.tenants.items(), key=lambda one: -one[1].size_bytes)
        return {
            **usage.whole.document(),
            "tenants": [
                {"tenant": self._tenant_name(tenant), **held.document()}
                for tenant, held in largest[:TENANTS_TOLD_MAX]
            ],
            "tenants_left_out": max(0, len(largest) - TENANTS_TOLD_MAX),
        }

    async def chunks(self, wanted: Wanted) -> Document:
        """The first chunks that are wanted, sorted by key. Raises `QueryError`."""
        name, realms = self._namespace(wanted.namespace)
        tenant = self._tenant(wanted.tenant)
        found: list[tuple[str, Chunk]] = []
        more = False
        async with self._one:
            async for chunk in self._chunks(realms):
                # Two ways of cutting a model may each have a chunk of one key.
                place = f"{chunk.key.hex()}:{chunk.realm.realm_id:09d}"
                if place <= wanted.after or not place.startswith(wanted.key):
                    continue
                if tenant is not None and chunk.tenant != tenant:
                    continue
                found.append((place, chunk))
                if len(found) >= 2 * LIMIT_MAX:
                    found, more = _first(found, wanted.limit), True
        kept = _first(found, wanted.limit)
        # Those that went since they were found are left out; there may be none for that alone.
        chunks = [self._chunk(chunk) for _, chunk in kept if _held(chunk)]
        return {
            **_described(name, realms),
            "chunks": chunks,
            "last": kept[-1][0] if kept else "",
            "more": more or len(found) > len(kept),
        }

    async def _chunks(self, realms: Iterable[RealmLayout]) -> AsyncIterator[Chunk]:
        for one in realms:
            realm = self._dispatcher.engine.directory.realms.get(one.realm_id)
            known = [] if realm is None else list(realm.chunks.values())
            for first in range(0, len(known), CHUNKS_PER_SLICE):
                for chunk in known[first : first + CHUNKS_PER_SLICE]:
                    if _held(chunk):
                        yield chunk
                await asyncio.sleep(0)

    def _chunk(self, chunk: Chunk) -> Document:
        return {
            "key": chunk.key.hex(),
            "parent": chunk.parent.hex(),
            "size_bytes": self._size_bytes(chunk),
            "parts": chunk.hosted,
            "num_blocks": max(segment.num_blocks for segment in chunk.segments),
            "tenant": self._tenant_name(chunk.tenant),
            "loadable": chunk.loadable,
            "pinned": chunk.pins > 0,
            "in_store": chunk.realm.in_store(chunk.key),
        }

    def _size_bytes(self, chunk: Chunk) -> int:
        host = self._dispatcher.engine.host
        return sum(
            host.slot_bytes(segment)
            for segment in chunk.segments
            if segment.state is SegmentState.HOST
        )

    # --- names -----------------------------------------------------------------------------

    def _namespaces(self) -> dict[str, list[RealmLayout]]:
        """The realms of each namespace, by its first digits."""
        found: dict[str, list[RealmLayout]] = {}
        for realm in self._dispatcher.realms.all():
            name = realm.namespace_digest.hex()[:NAMESPACE_CHARACTERS]
            found.setdefault(name, []).append(realm)
        return dict(sorted(found.items()))

    def _namespace(self, digits: str) -> tuple[str, list[RealmLayout]]:
        known = self._namespaces()
        found = [name for name in known if name.startswith(digits)]
        if len(found) != 1:
            raise QueryError(
                f"namespace {digits[:32]!r}: {len(found)} of the namespaces in host memory begin "
                f"with it; give one of them, up to {NAMESPACE_CHARACTERS} digits: "
                f"{', '.join(known) or 'none at all'}"
            )
        return found[0], known[found[0]]

    def _tenant_name(self, tenant: bytes) -> str:
        return self._dispatcher.engine.tenants.names.get(tenant) or tenant.hex()

    def _tenant(self, name: str) -> bytes | None:
        names = self._dispatcher.engine.tenants.names
        known = {label: tenant for tenant, label in names.items()}
        if not name:
            return None
        if name in known:
            return known[name]
        if not _TENANT.match(name):
            raise QueryError(
                f"tenant {name[:64]!r}: the configuration names {', '.join(sorted(known))}; give "
                "one of these, or an id of 16 hexadecimal digits"
            )
        tenant = bytes.fromhex(name)
        return tenant if any(tenant) else b""


def _held(chunk: Chunk) -> bool:
    return chunk.hosted > 0 and not chunk.detached


def _first(found: list[tuple[str, Chunk]], limit: int) -> list[tuple[str, Chunk]]:
    return sorted(found, key=lambda one: one[0])[:limit]


def _described(name: str, realms: list[RealmLayout]) -> Document:
    """What a namespace is, in the words of `kvlake du`."""
    about: Document = json.loads(realms[0].namespace)
    served_as = next((realm.model for realm in realms if realm.model), "")
    return {
        "namespace": name,
        "model": model_name(about, served_as),
        "layers": layers_of(about) or None,
        "about": about,
    }
