"""Realms: which engines share chunks, and the geometry, templates and index that they share.

A realm is a namespace (model, dtype, encoding), a topology (how the model is split over ranks) and
a chunk geometry. Clients of one realm share one index. Clients of two realms never see each other's
chunks in host memory; those of one namespace read each other's from the store. Owns each realm's
`IndexWriter`, its salt, and what every rank holds. Does not own chunks or slots.

Invariants:

* An engine with several KV cache groups has one realm for each. They share the index of the first
  one, their home, so that a scheduler reads one mapping. A key belongs to one group.
* A realm outlives its clients, and so do its chunks. There are at most `realms_max`;
  `service/realm_eviction.py` makes room for another. An id is never reused.
* A rank's geometry never changes within a realm. A worker that disagrees is refused.
* Ranks that hold copies of one segment count as one rank. Engines with other numbers of copies
  share the realm if their topology has the same name.
"""

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from sidecar.errors import AttachRefused
from sidecar.protocol import Attach, tiers_owner
from sidecar.sessions.model_names import model_name
from tiers.catalog.names import object_name
from tiers.errors import LayoutError
from tiers.kv.arrow_file import PAGE_BYTES, find_descriptor
from tiers.kv.index import IndexWriter
from tiers.kv.layout import Bytes, ChunkLayout, Segment
from tiers.kv.reshard import FOREIGN_MAX, overlap, refusal
from tiers.kv.slot_image import SlotTemplates

INDEX_ENTRIES_FIRST: Final = 1 << 12
"""Entries of a new realm's index (200 KiB of shared memory); it doubles whenever it gets full."""

REGROUPED_MAX: Final = 256
"""Geometries of other block sizes that are kept."""
NAMES_MAX: Final = 256
"""Names of models that are kept; others are read from their namespace again."""
_SALT_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class RankLayout:
    """What one rank of a realm holds: its chunk geometry and its slot images."""

    layout: ChunkLayout
    templates: SlotTemplates

    def as_stored(self, image: Bytes) -> "RankLayout":
        """The same segment in blocks of the size that a foreign image declares.

        Itself where the sizes are equal, and where its blocks cannot be made from those of the
        image: then the image fails its checks.
        """
        claimed = find_descriptor(image[:PAGE_BYTES].tobytes())
        if claimed is None or claimed.block_tokens == self.layout.block_tokens:
            return self
        digest = self.templates.namespace_digest
        return _regrouped(self.layout, digest, claimed.block_tokens) or self


@functools.lru_cache(maxsize=REGROUPED_MAX)
def _regrouped(layout: ChunkLayout, digest: bytes, block_tokens: int) -> RankLayout | None:
    chunk_tokens = layout.blocks_per_chunk * layout.block_tokens
    if not 0 < block_tokens <= chunk_tokens or chunk_tokens % block_tokens:
        return None
    count = chunk_tokens // block_tokens
    with contextlib.suppress(LayoutError):
        other = msgspec.structs.replace(layout, block_tokens=block_tokens, blocks_per_chunk=count)
        if refusal(other, layout) is None:
            return RankLayout(other, SlotTemplates(other, digest))
    return None


@functools.lru_cache(maxsize=NAMES_MAX)
def _model_name(namespace: bytes, served_as: str) -> str:
    return model_name(json.loads(namespace), served_as)


@dataclass(slots=True, eq=False)
class RealmLayout:
    """One namespace, topology and chunk geometry."""

    realm_id: int
    namespace: bytes
    namespace_digest: bytes
    owner: str
    """The owner of its chunks in KV events."""
    topology: str
    world_size: int
    """Segments of a chunk: ranks, with copies of one segment counted once."""
    block_tokens: int
    blocks_per_chunk: int
    index_salt: bytes
    model: str
    """The name that the first engine gave a model that is files; else empty."""
    index: IndexWriter
    """Not used where it has a home: use `indexed_in.index`, which may have been replaced since."""
    home: "RealmLayout | None" = None
    """The realm of the engine's first KV cache group; None in that realm itself."""
    group: int | None = None
    """The number of its KV cache group, of engines that have several."""
    ranks: dict[int, RankLayout] = field(default_factory=dict[int, RankLayout])
    foreign: list[RankLayout] = field(default_factory=list[RankLayout])
    """Segments of other parallel layouts, named by the catalog, by bit from `world_size` on."""
    last_used: int = 0
    """A counter's value when a client of this realm last attached or left."""
    forgotten: bool = False
    """Whether it was removed. Tasks that hold it across a wait must look here."""

    @property
    def model_name(self) -> str:
        """Its model's name, to show to people."""
        return _model_name(self.namespace, self.model)

    @property
    def indexed_in(self) -> "RealmLayout":
        """The realm whose index has this realm's chunks."""
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
        """The segment that a bit of a mask of the store stands for."""
        return self.ranks[bit] if bit < self.world_size else self.foreign[bit - self.world_size]

    def object_name(self, bit: int, key: bytes) -> str:
        """The object of that segment of a chunk."""
        return object_name(self.namespace_digest, key, self.by_bit(bit).layout.segment)

    def register_foreign(self, names: Iterable[str]) -> None:
        """Add segments of other parallel layouts of this realm's model. All ranks are known."""
        known = self.masks_by_segment()
        own = [rank.layout for rank in self.ranks.values()]
        segments = [layout.segment for layout in own]
        layers = max(one.first_layer + one.num_layers for one in segments)
        heads = max(one.first_head + one.num_heads for one in segments)
        for name in dict.fromkeys(names):
            if name in known or len(self.foreign) >= FOREIGN_MAX:
                continue
            try:
                segment = Segment.parse(name)
                layout = msgspec.structs.replace(own[0], segment=segment)
            except LayoutError:
                # Not a segment of this model.
                continue
            # A segment that exceeds the model is not of it, and would be read into as much memory
            # as its name says.
            inside = (
                segment.first_layer + segment.num_layers <= layers
                and segment.first_head + segment.num_heads <= heads
            )
            if inside and any(overlap(segment, one) for one in segments):
                self.foreign.append(
                    RankLayout(layout, SlotTemplates(layout, self.namespace_digest))
                )

    def register(self, rank: int, layout: ChunkLayout) -> None:
        """Set a rank's geometry. Raises `AttachRefused` where it differs from the known one."""
        known = self.ranks.get(rank)
        if known is None:
            self.ranks[rank] = RankLayout(layout, SlotTemplates(layout, self.namespace_digest))
        elif known.layout != layout:
            raise AttachRefused(
                "layout",
                f"layout={layout}: rank {rank} of this namespace and topology stores "
                f"{known.layout}; what differs belongs into the namespace or the topology",
            )


class Realms:
    """All realms of this sidecar; `realms_max` at most."""

    def __init__(self, realms_max: int = 256) -> None:
        self.realms_max = realms_max
        self._by_identity: dict[tuple[object, ...], RealmLayout] = {}
        self._by_id: dict[int, RealmLayout] = {}
        self._last_id = 0
        self._uses = 0
        self.forgotten = 0
        """How many made room for others. Never decreases."""

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def index_bytes(self) -> int:
        """Shared memory of all indexes."""
        return sum(one.index.size_bytes for one in self._by_id.values() if one.home is None)

    def __getitem__(self, realm_id: int) -> RealmLayout:
        return self._by_id[realm_id]

    def all(self) -> list[RealmLayout]:
        """All realms, oldest first."""
        return list(self._by_id.values())

    def knows(self, realm: RealmLayout) -> bool:
        """Whether a realm is still one of these."""
        return self._by_id.get(realm.realm_id) is realm

    def families(self) -> list[tuple[RealmLayout, ...]]:
        """Groups of realms that share an index, each with its home first."""
        found: dict[RealmLayout, list[RealmLayout]] = {}
        for realm in self._by_id.values():
            found.setdefault(realm.indexed_in, []).append(realm)
        return [tuple(family) for family in found.values()]

    def use(self, realms: Iterable[RealmLayout]) -> None:
        """Note that a client of these realms attached or left."""
        self._uses += 1
        for realm in realms:
            realm.last_used = self._uses

    def find(self, parts: Sequence[Attach]) -> tuple[RealmLayout | None, ...]:
        """The realm of each group of a client, None where there is none yet."""
        return tuple(map(self._by_identity.get, _identities(parts)))

    def join(self, parts: Sequence[Attach]) -> tuple[RealmLayout, ...]:
        """The realm of each group of a client, created where there is none yet.

        Raises `AttachRefused`, or `OSError` where there is no memory for an index. Then no realm
        was created.
        """
        joined: list[RealmLayout] = []
        made: list[RealmLayout] = []
        try:
            for identity, part in zip(_identities(parts), parts, strict=True):
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
        """Remove realms without sessions and chunks, once. Give a home with its groups."""
        for realm in realms:
            if realm.forgotten:
                continue
            identity = next(key for key, one in self._by_identity.items() if one is realm)
            del self._by_identity[identity], self._by_id[realm.realm_id]
            realm.forgotten = True
            if realm.home is None:
                realm.index.close()

    def _make(self, attach: Attach, home: RealmLayout | None, group: int | None) -> RealmLayout:
        """A new realm; `service/realm_eviction.py` has checked its namespace and made room."""
        assert len(self._by_id) < self.realms_max
        self._last_id += 1
        digest = hashlib.sha256(attach.namespace).digest()
        salted = "|".join(map(str, _geometry(attach)))
        salt = hashlib.sha256(salted.encode()).digest()[:_SALT_BYTES]
        return RealmLayout(
            realm_id=self._last_id,
            namespace=attach.namespace,
            namespace_digest=digest,
            owner=tiers_owner(
                digest, attach.topology, attach.block_tokens, "" if home is None else home.owner
            ),
            topology=attach.topology,
            world_size=attach.num_segments,
            block_tokens=attach.block_tokens,
            blocks_per_chunk=attach.blocks_per_chunk,
            model=attach.model,
            index_salt=salt if home is None else home.index_salt,
            index=IndexWriter(INDEX_ENTRIES_FIRST) if home is None else home.index,
            home=home,
            group=group,
        )

    def close(self) -> None:
        """Close every index. Readers keep their mapping."""
        self.forget(self.all())


def _geometry(attach: Attach) -> tuple[str, int, int, int]:
    return attach.topology, attach.num_segments, attach.block_tokens, attach.blocks_per_chunk


def _identities(parts: Sequence[Attach]) -> list[tuple[object, ...]]:
    """What tells the realms of a client's groups from others.

    It includes the home's: engines that differ in their first group share no index.
    """
    home, *others = ((hashlib.sha256(one.namespace).digest(), *_geometry(one)) for one in parts)
    return [home, *((*home, *other) for other in others)]
