"""Realms: who may share chunks, and the geometry, templates and index that they share.

A realm is a namespace (model, dtype, encoding), a topology (how the model is cut over ranks) and a
chunk geometry. Clients of one realm see one shared index; clients of two realms never see each
other's chunks in host memory, and those of one namespace read each other's from the store. Owns
each realm's `IndexWriter`, its salt, and what every rank holds (`RankLayout`, learnt from the
rank's first worker). Does not own chunks or slots: the engine and the pool do.

Invariants:

* An engine of several KV cache groups is of several realms: one for each group, with chunks,
  templates and objects of its own. They share the index of the first one, their home, so that a
  scheduler reads one mapping; a key is of one group, so they never meet in it.
* A realm outlives its clients, and so do its chunks. There are at most `realms_max`; which one is
  forgotten for another is decided in `service/forgetting.py`. An id is never used again.
* A rank's geometry never changes within a realm; a worker that disagrees is refused.
* Ranks that hold copies of one segment are one rank here, and an engine of more of them, or of
  none, is of the same realm if its topology has the same name.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

import msgspec

from sidecar.core.stored_table import FOREIGN_MAX
from sidecar.errors import AttachRefused
from tiers.catalog.about import NAMESPACE_DEPTH_MAX, deeper_than
from tiers.errors import LayoutError
from tiers.kv.arrow_file import PAGE_BYTES, find_descriptor
from tiers.kv.index import IndexWriter
from tiers.kv.layout import Segment
from tiers.kv.reshard import overlap, refusal
from tiers.kv.slot_image import SlotTemplates

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import numpy.typing as npt

    from sidecar.protocol import Attach
    from tiers.kv.layout import ChunkLayout

    Bytes = npt.NDArray[np.uint8]

REALMS_MAX: Final = 256
INDEX_ENTRIES_FIRST: Final = 1 << 12
"""Entries of a new realm's index (200 KiB of shared memory); it doubles whenever it gets full."""

_SALT_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class RankLayout:
    """What one rank of a realm holds: its chunk geometry and its slot images."""

    layout: ChunkLayout
    templates: SlotTemplates
    _by_block_tokens: dict[int, RankLayout] = field(
        default_factory=dict[int, "RankLayout"], repr=False, compare=False
    )

    def as_stored(self, image: Bytes) -> RankLayout:
        """The same segment in blocks of the size that a foreign image says it has.

        Itself where that is its own size, or one from which its blocks cannot be made: then the
        image fails its checks.
        """
        claimed = find_descriptor(image[:PAGE_BYTES].tobytes())
        if claimed is None or claimed.block_tokens == self.layout.block_tokens:
            return self
        known = self._by_block_tokens.get(claimed.block_tokens)
        if known is None:
            known = self._regrouped(claimed.block_tokens)
            if known is not self:
                # As many as chunks of a size have divisors: what is no whole chunk is not kept.
                # Two threads may make the same one at once; they make equal ones.
                self._by_block_tokens[claimed.block_tokens] = known
        return known

    def _regrouped(self, block_tokens: int) -> RankLayout:
        chunk_tokens = self.layout.blocks_per_chunk * self.layout.block_tokens
        if not 0 < block_tokens <= chunk_tokens or chunk_tokens % block_tokens:
            return self
        try:
            layout = msgspec.structs.replace(
                self.layout,
                block_tokens=block_tokens,
                blocks_per_chunk=chunk_tokens // block_tokens,
            )
            if refusal(layout, self.layout) is not None:
                return self
            return RankLayout(layout, SlotTemplates(layout, self.templates.namespace_digest))
        except LayoutError:
            return self


@dataclass(slots=True, eq=False)
class RealmLayout:
    """One namespace, topology and chunk geometry."""

    realm_id: int
    namespace: bytes
    namespace_digest: bytes
    topology: str
    world_size: int
    """Segments of a chunk: ranks, those that hold the same one counted once."""
    block_tokens: int
    blocks_per_chunk: int
    index_salt: bytes
    model: str
    """What the first engine that said so calls the model, where it is files."""
    index: IndexWriter
    """Its home's, where it has one: then this is the home's first, and nobody asks for it."""
    home: RealmLayout | None = None
    """The realm of the first KV cache group, of an engine's other groups."""
    group: int | None = None
    """The number of its KV cache group, of engines that have several."""
    ranks: dict[int, RankLayout] = field(default_factory=dict[int, RankLayout])
    foreign: list[RankLayout] = field(default_factory=list[RankLayout])
    """Segments of other cuts of the model that the catalog named, by bit from `world_size` on."""
    last_used: int = 0
    """Grows with every use of any realm: by the attach, and by the end, of a client."""
    forgotten: bool = False
    """Nothing is known of it any more. Tasks that hold it across a wait look here."""

    @property
    def indexed_in(self) -> RealmLayout:
        """The realm whose index has this one's chunks."""
        return self.home or self

    @property
    def complete(self) -> bool:
        """Whether all its ranks are known, so that segments can be matched to them."""
        return len(self.ranks) >= self.world_size

    def masks_by_segment(self) -> dict[str, int]:
        """Segment name -> ranks that hold it, as bits. Ranks with replicated heads share one."""
        found: dict[str, int] = {}
        for number, rank in self.ranks.items():
            name = rank.layout.segment.name
            found[name] = found.get(name, 0) | 1 << number
        for number, other in enumerate(self.foreign, self.world_size):
            found[other.layout.segment.name] = 1 << number
        return found

    def by_bit(self, bit: int) -> RankLayout:
        """What a bit of a mask of the store stands for."""
        return self.ranks[bit] if bit < self.world_size else self.foreign[bit - self.world_size]

    def meet(self, names: Iterable[str]) -> None:
        """Take note of segments of other cuts that hold something of this realm's ranks."""
        known = self.masks_by_segment()
        own = [rank.layout for rank in self.ranks.values()]
        for name in dict.fromkeys(names):
            if name in known or len(self.foreign) >= FOREIGN_MAX:
                continue
            try:
                segment = Segment.parse(name)
                layout = msgspec.structs.replace(own[0], segment=segment)
            except LayoutError:
                # Not one of ours, whatever it is.
                continue
            if any(overlap(segment, one.segment) for one in own):
                self.foreign.append(
                    RankLayout(layout, SlotTemplates(layout, self.namespace_digest))
                )

    def learn(self, rank: int, layout: ChunkLayout) -> bool:
        """Take a worker's geometry. True if it was not known yet.

        Raises `AttachRefused` where it differs from what the rank's chunks were stored with.
        """
        known = self.ranks.get(rank)
        if known is None:
            self.ranks[rank] = RankLayout(layout, SlotTemplates(layout, self.namespace_digest))
            return True
        if known.layout != layout:
            raise AttachRefused(
                "layout",
                f"layout={layout}: rank {rank} of this namespace and topology stores "
                f"{known.layout}; what differs belongs into the namespace or the topology",
            )
        return False


class Realms:
    """All realms of this sidecar, by what makes them; `realms_max` at most."""

    def __init__(self, realms_max: int = REALMS_MAX) -> None:
        self.realms_max = realms_max
        self._by_identity: dict[tuple[object, ...], RealmLayout] = {}
        self._by_id: dict[int, RealmLayout] = {}
        self._last_id = 0
        self._uses = 0
        self.forgotten = 0
        """How many gave way to others. Never decreases."""

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def index_bytes(self) -> int:
        """Shared memory of all indexes."""
        return sum(one.index.size_bytes for one in self._by_id.values() if one.home is None)

    def __getitem__(self, realm_id: int) -> RealmLayout:
        return self._by_id[realm_id]

    def all(self) -> list[RealmLayout]:
        """Every realm, oldest first."""
        return list(self._by_id.values())

    def get(self, realm_id: int) -> RealmLayout | None:
        """The realm with this id, if it is known."""
        return self._by_id.get(realm_id)

    def knows(self, realm: RealmLayout) -> bool:
        """Whether a realm was not forgotten."""
        return self._by_id.get(realm.realm_id) is realm

    def families(self) -> list[tuple[RealmLayout, ...]]:
        """Realms that share an index, the home of each first."""
        found: dict[RealmLayout, list[RealmLayout]] = {}
        for realm in self._by_id.values():
            found.setdefault(realm.indexed_in, []).append(realm)
        return [tuple(family) for family in found.values()]

    def use(self, realms: Iterable[RealmLayout]) -> None:
        """A client of these realms attached, or left."""
        self._uses += 1
        for realm in realms:
            realm.last_used = self._uses

    def find(self, parts: Sequence[Attach]) -> tuple[RealmLayout | None, ...]:
        """The realm of each group of a client, where there is one already."""
        home = _identity(parts[0])
        return tuple(self._by_identity.get(_of_group(home, part)) for part in parts)

    def join(self, parts: Sequence[Attach]) -> tuple[RealmLayout, ...]:
        """The realm of each group of a client, made where it is the first of its kind.

        Raises `AttachRefused`, or `OSError` where there is no room for an index, having made none.
        """
        home = _identity(parts[0])
        joined: list[RealmLayout] = []
        made: list[RealmLayout] = []
        try:
            for part in parts:
                identity = _of_group(home, part)
                realm = self._by_identity.get(identity)
                if realm is None:
                    group = len(joined) if len(parts) > 1 else None
                    realm = self._make(part, joined[0] if joined else None, group)
                    self._by_identity[identity] = self._by_id[realm.realm_id] = realm
                    made.append(realm)
                realm.model = realm.model or part.model
                joined.append(realm)
        except BaseException:
            self.forget(made)
            raise
        self.use(joined)
        return tuple(joined)

    def forget(self, realms: Iterable[RealmLayout]) -> None:
        """Forget realms of which there is no session and no chunk; of a home, all its groups'.

        Those that are forgotten already are passed over.
        """
        for realm in realms:
            if self._by_id.get(realm.realm_id) is not realm:
                continue
            identity = next(key for key, one in self._by_identity.items() if one is realm)
            del self._by_identity[identity], self._by_id[realm.realm_id]
            realm.forgotten = True
            if realm.home is None:
                realm.index.close()

    def _make(self, attach: Attach, home: RealmLayout | None, group: int | None) -> RealmLayout:
        require_json_object(attach.namespace)
        if len(self._by_id) >= self.realms_max:
            raise full(self.realms_max)
        self._last_id += 1
        salted = "|".join(
            (
                attach.topology,
                str(attach.num_segments),
                str(attach.block_tokens),
                str(attach.blocks_per_chunk),
            )
        )
        return RealmLayout(
            realm_id=self._last_id,
            namespace=attach.namespace,
            namespace_digest=hashlib.sha256(attach.namespace).digest(),
            topology=attach.topology,
            world_size=attach.num_segments,
            block_tokens=attach.block_tokens,
            blocks_per_chunk=attach.blocks_per_chunk,
            model=attach.model,
            index_salt=(
                hashlib.sha256(salted.encode()).digest()[:_SALT_BYTES]
                if home is None
                else home.index_salt
            ),
            index=IndexWriter(INDEX_ENTRIES_FIRST) if home is None else home.index,
            home=home,
            group=group,
        )

    def close(self) -> None:
        """Close every index. Readers keep their mapping."""
        for realm in self._by_id.values():
            if realm.home is None:
                realm.index.close()


def _identity(attach: Attach) -> tuple[object, ...]:
    return (
        hashlib.sha256(attach.namespace).digest(),
        attach.topology,
        attach.num_segments,
        attach.block_tokens,
        attach.blocks_per_chunk,
    )


def _of_group(home: tuple[object, ...], part: Attach) -> tuple[object, ...]:
    """What makes a group's realm: engines that differ in their first group share no index."""
    own = _identity(part)
    return own if own == home else (*home, *own)


def full(realms_max: int) -> AttachRefused:
    """Why a client is refused for which no realm can be forgotten."""
    return AttachRefused(
        "realms",
        f"limits.realms_max={realms_max} namespaces and topologies are in use by engines that are "
        "attached; stop some of them, or raise the limit",
    )


def require_json_object(namespace: bytes) -> None:
    """Raise `AttachRefused` unless a namespace is a JSON object that `/status` can show."""
    try:
        decoded: object = msgspec.json.decode(namespace)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AttachRefused("namespace", f"namespace is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise AttachRefused(
            "namespace", f"namespace is a JSON {type(decoded).__name__}: must be an object"
        )
    # /status shows it, further down the stack than here: what is only just read here is not there.
    if deeper_than(cast("object", decoded), NAMESPACE_DEPTH_MAX):
        raise AttachRefused(
            "namespace",
            f"namespace is nested more than {NAMESPACE_DEPTH_MAX} deep: make it flatter",
        )
