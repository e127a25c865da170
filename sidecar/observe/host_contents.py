"""What host memory holds, by namespace, tenant and chunk: the documents of /host.

Owns the walk over the chunks of host memory while the sidecar serves. Does not own chunks
(`core/directory.py`), HTTP (`http.py`), nor how documents are shown (`cli/contents.py`).

Invariants: nothing is changed; the event loop runs between two slices of `CHUNKS_PER_SLICE`, so an
answer is true for each chunk, but not for all at one moment; one query is answered at a time; an
answer has at most `LIMIT_MAX` chunks. Cache salts and token ids are in no answer.
"""

import asyncio
import bisect
import dataclasses
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sidecar.core.directory import ZERO_KEY, Chunk, SegmentState
from sidecar.service.dispatcher import Dispatcher
from sidecar.sessions.model_names import layers_of, model_name
from sidecar.sessions.namespaces import RealmLayout
from tiers.catalog.names import KEY_BYTES, NAMESPACE_CHARACTERS

CHUNKS_PER_SLICE: Final = 1024
LIMIT_MAX: Final = 1000
AGES: Final = {"1 min": 60.0, "10 min": 600.0, "1 h": 3600.0, "1 day": 86400.0, "longer": math.inf}
"""Seconds since the last use, or since the chunk came, below each."""
DEPTHS: Final = {"1k": 1 << 10, "4k": 1 << 12, "16k": 1 << 14, "64k": 1 << 16, "more": math.inf}
"""Tokens before the chunk, below each."""
UNKNOWN_DEPTH: Final = "unknown"
"""Chunks behind one that is not in host memory."""
TENANTS_LISTED_MAX: Final = 1000
_DIGITS: Final = 2 * KEY_BYTES
_FIELDS: Final = {
    "key": (
        f"[0-9a-f]{{0,{_DIGITS}}}",
        f"keys are {_DIGITS} hexadecimal digits; give the first ones",
    ),
    "after": (f"([0-9a-f]{{{_DIGITS}}}:[0-9]{{9}})?", "must be `last` of the previous answer"),
}

Document = dict[str, Any]


class QueryError(ValueError):
    """An invalid query. The message names the field, its value and the remedy."""


class ChunkQuery(NamedTuple):
    """Which chunks of one namespace: at most `limit`, after the position `after`."""

    namespace: str
    key: str = ""
    after: str = ""
    """`last` of the previous answer."""
    tenant: str = ""
    limit: int = LIMIT_MAX


def parse_query(query: Mapping[str, str]) -> ChunkQuery:
    """The parameters of an HTTP query. Raises `QueryError`."""
    limit = query.get("limit", str(LIMIT_MAX))
    if not re.fullmatch(r"[0-9]{1,9}", limit) or int(limit) > LIMIT_MAX:
        raise QueryError(f"limit={limit[:32]!r}: must be a whole number, at most {LIMIT_MAX}")
    given = {name: query.get(name, "") for name in ("namespace", "key", "after", "tenant")}
    for name, (pattern, rule) in _FIELDS.items():
        if not re.fullmatch(pattern, given[name]):
            raise QueryError(f"{name}={given[name][:80]!r}: {rule}")
    return ChunkQuery(**given, limit=int(limit))


@dataclass(slots=True)
class _Sums:
    chunks: int = 0
    """Chunks that can be loaded: all their parts are in host memory."""
    parts: int = 0
    size_bytes: int = 0

    def add(self, chunk: Chunk, size_bytes: int) -> None:
        self.chunks += chunk.loadable
        self.parts += chunk.hosted
        self.size_bytes += size_bytes


class HostContents:
    """Answers queries about the host memory of one dispatcher."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.lock = asyncio.Lock()
        """Held by the query that is being answered."""

    async def usage(self, namespace: str = "") -> Document:
        """What each namespace and tenant holds; only one namespace if its digits are given.

        Raises `QueryError`.
        """
        chosen = dict([self._namespace(namespace)]) if namespace else self._namespaces()
        async with self.lock:
            found = [
                describe(name, realms) | await self._usage_of(realms)
                for name, realms in chosen.items()
            ]
        unclaimed = self._dispatcher.engine.host.restored_slots.num_bytes
        return {"namespaces": found, "unclaimed_bytes": unclaimed}

    async def _usage_of(self, realms: list[RealmLayout]) -> Document:
        total = _Sums()
        tenants: defaultdict[bytes, _Sums] = defaultdict(_Sums)
        ages, depths = (
            {name: _Sums() for name in names} for names in (AGES, [*DEPTHS, UNKNOWN_DEPTH])
        )
        chunk_tokens = {one.realm_id: one.block_tokens * one.blocks_per_chunk for one in realms}
        places: dict[Chunk, int | None] = {}
        async for chunk in self.walk(realms):
            size_bytes = _size_bytes(chunk)
            seconds = time.monotonic() - chunk.used_at
            age = next(name for name, below in AGES.items() if seconds < below)
            depth, place = UNKNOWN_DEPTH, _place(chunk, places)
            if place is not None:
                tokens = place * chunk_tokens[chunk.realm.realm_id]
                depth = next(name for name, below in DEPTHS.items() if tokens < below)
            for sums in (total, tenants[chunk.tenant], ages[age], depths[depth]):
                sums.add(chunk, size_bytes)
        largest = sorted(tenants.items(), key=lambda one: -one[1].size_bytes)
        return {
            **dataclasses.asdict(total),
            "tenants": [
                {"tenant": self._tenant_name(tenant), **dataclasses.asdict(sums)}
                for tenant, sums in largest[:TENANTS_LISTED_MAX]
            ],
            "tenants_left_out": max(0, len(largest) - TENANTS_LISTED_MAX),
            "ages": {name: dataclasses.asdict(sums) for name, sums in ages.items()},
            "depths": {name: dataclasses.asdict(sums) for name, sums in depths.items()},
        }

    async def chunks(self, query: ChunkQuery) -> Document:
        """The first chunks that match, sorted by key. Raises `QueryError`."""
        name, realms = self._namespace(query.namespace)
        tenant = self._tenant(query.tenant)
        found: list[tuple[str, Chunk]] = []
        async with self.lock:
            async for chunk in self.walk(realms):
                # Two realms of a namespace may each have a chunk with this key.
                place = f"{chunk.key.hex()}:{chunk.realm.realm_id:09d}"
                if place <= query.after or not place.startswith(query.key):
                    continue
                if tenant is not None and chunk.tenant != tenant:
                    continue
                bisect.insort(found, (place, chunk))
                # One more than is asked for, to know whether there are more.
                del found[query.limit + 1 :]
        kept = found[: query.limit]
        # Chunks that were evicted since are left out, so the list may be empty.
        chunks = [self._chunk(chunk) for _, chunk in kept if _held(chunk)]
        return {
            **describe(name, realms),
            "chunks": chunks,
            "last": kept[-1][0] if kept else "",
            "more": len(found) > len(kept),
        }

    async def walk(self, realms: Iterable[RealmLayout]) -> AsyncIterator[Chunk]:
        """The chunks of these realms in host memory. Hold `lock` meanwhile."""
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
            "size_bytes": _size_bytes(chunk),
            "parts": chunk.hosted,
            "num_blocks": max(segment.num_blocks for segment in chunk.segments),
            "tenant": self._tenant_name(chunk.tenant),
            "loadable": chunk.loadable,
            "pinned": chunk.pins > 0,
            "in_store": chunk.realm.in_store(chunk.key),
        }

    # --- names -----------------------------------------------------------------------------

    def _namespaces(self) -> dict[str, list[RealmLayout]]:
        """The realms of each namespace, by its first digits."""
        found: defaultdict[str, list[RealmLayout]] = defaultdict(list)
        for realm in self._dispatcher.realms.all():
            found[realm.namespace_digest.hex()[:NAMESPACE_CHARACTERS]].append(realm)
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
        if not name:
            return None
        known = {label: tenant for tenant, label in self._dispatcher.engine.tenants.names.items()}
        if name in known:
            return known[name]
        if not re.fullmatch("[0-9a-f]{16}", name):
            raise QueryError(
                f"tenant {name[:64]!r}: the configuration names {', '.join(sorted(known))}; give "
                "one of these, or an id of 16 hexadecimal digits"
            )
        tenant = bytes.fromhex(name)
        return tenant if any(tenant) else b""


def _held(chunk: Chunk) -> bool:
    return chunk.hosted > 0 and not chunk.detached


def _place(chunk: Chunk, known: dict[Chunk, int | None]) -> int | None:
    """How many chunks precede this one, if host memory has all of them; `known` grows."""
    path: list[Chunk] = []
    one: Chunk | None = chunk
    place: int | None = None
    while one is not None:
        if one in known:
            place = known[one]
            break
        # A circle of parents, which no chain of hashes has, ends as unknown.
        known[one] = None
        path.append(one)
        if one.parent == ZERO_KEY:
            place = -1
            break
        one = one.realm.chunks.get(one.parent)
        if one is not None and not _held(one):
            break
    for one in reversed(path):
        known[one] = place = None if place is None else place + 1
    return place


def _size_bytes(chunk: Chunk) -> int:
    return sum(one.slot_bytes for one in chunk.segments if one.state is SegmentState.HOST)


def describe(name: str, realms: list[RealmLayout]) -> Document:
    """A namespace, as `kvlake du` shows it."""
    about: Document = json.loads(realms[0].namespace)
    served_as = next((realm.model for realm in realms if realm.model), "")
    return {
        "namespace": name,
        "model": model_name(about, served_as),
        "layers": layers_of(about) or None,
        "about": about,
    }
