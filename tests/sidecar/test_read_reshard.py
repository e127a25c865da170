"""Segments that are built from objects of other ranks: real objects, real templates, every byte."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import anyio
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.core.commands import Read, StoreOutcome
from sidecar.data.read import SegmentReader, SourceError, is_damaged
from sidecar.protocol import Role
from sidecar.sessions.namespaces import RankLayout, Realms
from tests.sidecar.client import attach_message
from tests.sidecar.test_segment_sources import HEADS, LAYERS, grid, segment_sources
from tiers.catalog.names import object_name
from tiers.errors import ChunkMissing, ImageChecksumMismatch, ImageHeaderMismatch
from tiers.kv.layout import ChunkLayout, Segment
from tiers.kv.reshard import SegmentSources
from tiers.kv.slot_image import SlotTemplates
from tiers.store.object_tier import UrlObjects

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from sidecar.sessions.namespaces import RealmLayout
    from tiers.store.client import Seen
    from tiers.store.object_tier import ObjectTier

    Bytes = npt.NDArray[np.uint8]

pytestmark = pytest.mark.anyio

KEY, PARENT = b"k" * 32, b"p" * 32
BLOCK_TOKENS, BLOCKS, CONTENT = 4, 3, 16
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS
WHOLE = ChunkLayout(
    Segment(0, LAYERS, 0, HEADS), BLOCKS, BLOCK_TOKENS, CONTENT, "bfloat16", "plain+token"
)


def reference(num_tokens: int) -> Bytes:
    """The whole model's KV of one chunk: [tokens, layers, heads, content]."""
    shape = (num_tokens, LAYERS, HEADS, CONTENT)
    return np.random.default_rng(num_tokens).integers(0, 256, shape, dtype=np.uint8)


def part(whole: Bytes, segment: Segment, block_tokens: int) -> Bytes:
    """One segment of it: [blocks, layers, heads, tokens, content]."""
    cut = whole[
        :,
        segment.first_layer : segment.first_layer + segment.num_layers,
        segment.first_head : segment.first_head + segment.num_heads,
    ]
    return cut.reshape(-1, block_tokens, *cut.shape[1:]).transpose(0, 2, 3, 1, 4)


def realm_of(segments: list[Segment], others: list[Segment]) -> RealmLayout:
    attach = attach_message(
        Role.SCHEDULER, topology=f"cut {len(segments)}", world_size=len(segments)
    )
    (realm,) = Realms().join(attach.parts)
    for rank, segment in enumerate(segments):
        realm.register(rank, msgspec.structs.replace(WHOLE, segment=segment))
    realm.register_foreign([segment.name for segment in others])
    return realm


def image_of(
    realm: RealmLayout,
    segment: Segment,
    num_tokens: int,
    *,
    key: bytes = KEY,
    block_tokens: int = BLOCK_TOKENS,
) -> Bytes:
    layout = msgspec.structs.replace(
        WHOLE,
        segment=segment,
        block_tokens=block_tokens,
        blocks_per_chunk=CHUNK_TOKENS // block_tokens,
    )
    template = SlotTemplates(layout, realm.namespace_digest)[num_tokens // block_tokens]
    image = np.zeros(template.image_bytes, dtype=np.uint8)
    template.prepare(image)
    template.payload(image)[:] = part(reference(num_tokens), segment, block_tokens).reshape(-1)
    template.seal(image, key, PARENT, np.arange(num_tokens, dtype=np.int32).tobytes())
    return image


async def write(
    store: ObjectTier,
    realm: RealmLayout,
    segments: list[Segment],
    num_tokens: int,
    block_tokens: int = BLOCK_TOKENS,
) -> None:
    for segment in segments:
        name = object_name(realm.namespace_digest, KEY, segment)
        await store.write(name, image_of(realm, segment, num_tokens, block_tokens=block_tokens))


def command(rank: int, sources: tuple[int, ...]) -> Read:
    return Read(1, 1, rank, 0, KEY, sources)


def segment_reader(store: ObjectTier) -> SegmentReader:
    return SegmentReader(store, anyio.CapacityLimiter(1), lambda _: None)


@st.composite
def stages(draw: st.DrawFn) -> list[Segment]:
    """Pipeline stages of any size, whose heads are cut evenly."""
    inner = draw(st.sets(st.integers(1, LAYERS - 1), max_size=3))
    ranks = draw(st.sampled_from((1, 2, 4, 8)))
    heads = HEADS // ranks
    return [
        Segment(first, last - first, rank * heads, heads)
        for first, last in pairwise(sorted({0, LAYERS, *inner}))
        for rank in range(ranks)
    ]


ways = st.one_of(segment_sources.map(lambda cut: grid(*cut)), stages())


@pytest.mark.promise("other-stages", "other-tp-ratios")
@settings(max_examples=60)
@given(
    segments=ways,
    written=ways,
    num_blocks=st.integers(1, BLOCKS),
    block_tokens=st.sampled_from([1, 2, 3, 4, 6, 12]),
)
async def test_any_cut_reads_any_other(
    tmp_path_factory: pytest.TempPathFactory,
    segments: list[Segment],
    written: list[Segment],
    num_blocks: int,
    block_tokens: int,
) -> None:
    num_tokens = num_blocks * BLOCK_TOKENS
    if num_tokens % block_tokens:
        # The tail of a prompt in blocks of that size is not as long.
        num_tokens = CHUNK_TOKENS
    store = UrlObjects(f"file://{tmp_path_factory.mktemp('store')}")
    realm = realm_of(segments, written)
    await write(store, realm, written, num_tokens, block_tokens)
    known = SegmentSources(len(segments))
    for rank, segment in enumerate(segments):
        known.register(rank, segment)
    known.register_foreign([one.layout.segment for one in realm.foreign])
    names = realm.masks_by_segment()
    mask = 0
    for segment in written:
        mask |= names.get(segment.name, 0)
    assert known.obtainable(mask) == realm_full(realm)
    reader = segment_reader(store)
    for rank, segment in enumerate(segments):
        slot = np.full(realm.ranks[rank].templates.slot_bytes, 0xA5, dtype=np.uint8)
        meta, _ = await reader.reshard(realm, command(rank, known.sources(mask, rank)), slot)
        blocks = num_tokens // BLOCK_TOKENS
        assert (meta.key, meta.parent, meta.num_blocks) == (KEY, PARENT, blocks)
        template = realm.ranks[rank].templates[blocks]
        assert np.array_equal(slot[: template.image_bytes], image_of(realm, segment, num_tokens)), (
            "byte for byte what this rank would have written"
        )
    await store.close()


async def test_what_is_no_whole_block_here_is_not_used(tmp_path: Path) -> None:
    store = UrlObjects(f"file://{tmp_path}")
    realm = realm_of(grid(1, 1), grid(1, 2))
    await write(store, realm, grid(1, 2), 6, block_tokens=2)
    slot = np.zeros(realm.ranks[0].templates.slot_bytes, dtype=np.uint8)
    with pytest.raises(SourceError) as caught:
        await segment_reader(store).reshard(realm, command(0, (1, 2)), slot)
    assert "6 tokens" in str(caught.value.__cause__)
    assert not is_damaged(caught.value.__cause__)
    assert not slot.any()
    await store.close()


def test_a_block_size_that_nothing_can_be_made_of_is_taken_as_damage() -> None:
    realm = realm_of(grid(1, 1), [])
    own = realm.ranks[0]
    image = image_of(realm, own.layout.segment, CHUNK_TOKENS)
    assert own.as_stored(image) is own
    at = bytes(image).index(b'"block_tokens":4') + 15
    # What divides no chunk, and what is no number of tokens at all.
    for digit in b"05789":
        image[at] = digit
        assert own.as_stored(image) is own
        with pytest.raises(ImageHeaderMismatch):
            own.templates.for_image_bytes(len(image)).verify(image)
    image[at] = ord("2")
    assert own.as_stored(image).layout.block_tokens == 2
    assert own.as_stored(image) is own.as_stored(image)
    layout = msgspec.structs.replace(WHOLE, encoding="cpu-arm-neon")
    packed = RankLayout(layout, SlotTemplates(layout, realm.namespace_digest))
    assert packed.as_stored(image) is packed, "its encoding is not one that can be regrouped"
    image[:8192] = 0
    assert own.as_stored(image) is own


def realm_full(realm: RealmLayout) -> int:
    return (1 << realm.world_size) - 1


@pytest.mark.parametrize("ranks", [4, 8])
async def test_ranks_that_ask_together_share_a_download(tmp_path: Path, ranks: int) -> None:
    store = UrlObjects(f"file://{tmp_path}")
    segments, written = grid(1, ranks), grid(1, 1)
    realm = realm_of(segments, written)
    await write(store, realm, written, 2 * BLOCK_TOKENS)
    # More ranks than chunks that may be resharded at a time: they still share one download.
    reader = segment_reader(store)
    reads = 0
    read = store.read

    async def counted(name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        nonlocal reads
        reads += 1
        return await read(name, into, seen=seen)

    store.read = counted  # type: ignore[method-assign]
    slots = [np.zeros(one.templates.slot_bytes, dtype=np.uint8) for one in realm.ranks.values()]
    told: list[int] = []

    async def reshard(rank: int) -> None:
        _, num_bytes = await reader.reshard(realm, command(rank, (ranks,)), slots[rank])
        told.append(num_bytes)

    async with anyio.create_task_group() as tasks:
        for rank in range(len(slots)):
            tasks.start_soon(reshard, rank)
    assert reads == 1
    # Or the store would seem as many times faster than it is.
    image = realm.by_bit(ranks).templates[2].image_bytes
    assert sorted(told) == [0] * (len(slots) - 1) + [image]
    for rank, slot in enumerate(slots):
        template = realm.ranks[rank].templates[2]
        assert template.verify(slot[: template.image_bytes], KEY).num_blocks == 2
    # A later read reads again: nothing is kept.
    await reader.reshard(realm, command(0, (ranks,)), slots[0])
    assert reads == 2
    await store.close()


async def test_a_failure_is_told_to_all_who_shared_and_not_remembered(tmp_path: Path) -> None:
    store = UrlObjects(f"file://{tmp_path}")
    realm = realm_of(grid(1, 8), grid(1, 1))
    reader = segment_reader(store)
    slot = np.zeros(realm.ranks[0].templates.slot_bytes, dtype=np.uint8)
    failed: list[int] = []

    async def expect_failure(rank: int) -> None:
        with pytest.raises(SourceError) as caught:
            await reader.reshard(realm, command(rank, (8,)), slot)
        assert isinstance(caught.value.__cause__, ChunkMissing)
        failed.append(rank)

    for _ in range(2):
        async with anyio.create_task_group() as tasks:
            for rank in range(8):
                tasks.start_soon(expect_failure, rank)
    assert len(failed) == 16
    await write(store, realm, grid(1, 1), BLOCK_TOKENS)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await reader.reshard(realm, command(1, (8,)), slot)
    # Nothing of what failed or was cancelled holds a place.
    for rank in range(8):
        meta, _ = await reader.reshard(realm, command(rank, (8,)), slot)
        assert meta.num_blocks == 1
    await store.close()


async def test_a_missing_source_is_named(tmp_path: Path) -> None:
    store = UrlObjects(f"file://{tmp_path}")
    realm = realm_of(grid(1, 1), grid(1, 2))
    await write(store, realm, grid(1, 2)[:1], 2 * BLOCK_TOKENS)
    slot = np.zeros(realm.ranks[0].templates.slot_bytes, dtype=np.uint8)
    with pytest.raises(SourceError) as caught:
        await segment_reader(store).reshard(realm, command(0, (1, 2)), slot)
    assert caught.value.bit == 2
    assert isinstance(caught.value.__cause__, ChunkMissing)
    assert not slot.any(), "nothing was written before all was there"
    await store.close()


@pytest.mark.parametrize("place", ["payload", "row", "other chunk"])
async def test_a_damaged_source_is_never_used(tmp_path: Path, place: str) -> None:
    store = UrlObjects(f"file://{tmp_path}")
    written = grid(1, 2)
    realm = realm_of(grid(1, 1), written)
    await write(store, realm, written[:1], 2 * BLOCK_TOKENS)
    key = b"x" * 32 if place == "other chunk" else KEY
    image = image_of(realm, written[1], 2 * BLOCK_TOKENS, key=key)
    if place != "other chunk":
        image[image.size // 2 if place == "payload" else bytes(image).index(PARENT)] ^= 1
    await store.write(object_name(realm.namespace_digest, KEY, written[1]), image)
    slot = np.zeros(realm.ranks[0].templates.slot_bytes, dtype=np.uint8)
    with pytest.raises(SourceError) as caught:
        await segment_reader(store).reshard(realm, command(0, (1, 2)), slot)
    assert caught.value.bit == 2
    # Only what is as expected but for its bytes is damaged for those who wrote it, too.
    assert is_damaged(caught.value.__cause__) == (place == "payload")
    assert isinstance(caught.value.__cause__, ImageChecksumMismatch) == (place == "payload")
    assert not slot.any()
    await store.close()


@pytest.mark.parametrize(
    ("was", "becomes", "outcome"),
    [
        (b"ARROW1", b"ARROW2", StoreOutcome.OK),
        (b'{"format":1', b'{"format":2', StoreOutcome.UNREADABLE),
        (PARENT, KEY, StoreOutcome.CORRUPT),
        (b'"dtype":"bfloat16"', b'"dtype":"blfoat16"', StoreOutcome.CORRUPT),
    ],
)
async def test_an_object_of_another_release_is_read_or_left(
    tmp_path: Path, was: bytes, becomes: bytes, outcome: StoreOutcome
) -> None:
    """Two releases that move each other's objects aside would cost each other their cache."""
    store = UrlObjects(f"file://{tmp_path}")
    [segment] = grid(1, 1)
    realm = realm_of([segment], [])
    own = image_of(realm, segment, CHUNK_TOKENS)
    stored = np.frombuffer(own.tobytes().replace(was, becomes), dtype=np.uint8)
    await store.write(object_name(realm.namespace_digest, KEY, segment), stored)
    slot = np.zeros(realm.ranks[0].templates.slot_bytes, dtype=np.uint8)
    done = await segment_reader(store).read(realm, command(0, (0,)), slot)
    assert done.outcome is outcome
    if outcome is StoreOutcome.OK:
        assert np.array_equal(slot[: own.size], own), "with this release's header and footer"
        assert (done.num_blocks, done.parent) == (BLOCKS, PARENT)
    await store.close()


def test_foreign_segments_are_few_and_of_use() -> None:
    realm = realm_of(grid(2, 1)[:1], [])
    rank: RankLayout = realm.ranks[0]
    realm.register_foreign(
        ["no segment", "4-8.0-8", "0-4.0-4", rank.layout.segment.name, "0-4.0-4"]
    )
    assert [one.layout.segment.name for one in realm.foreign] == ["0-4.0-4"]
    realm.register_foreign([f"0-1.{head}-{head + 1}" for head in range(100)])
    assert len(realm.foreign) == 9


@pytest.mark.promise("foreign-segments")
def test_segments_that_exceed_the_model_are_not_of_it() -> None:
    """A name in the bucket says how much memory a read of it takes."""
    realm = realm_of(grid(2, 1), [])
    names = [f"0-{LAYERS}.0-{HEADS + 1}", f"0-{LAYERS + 1}.0-{HEADS}", f"0-{LAYERS}.0-{HEADS}"]
    realm.register_foreign(names)
    assert [one.layout.segment.name for one in realm.foreign] == names[-1:]


async def test_ranks_that_need_different_objects_share_those_in_common(tmp_path: Path) -> None:
    """Two of three ranks need both halves of the heads or layers, and each half is read once."""
    store = UrlObjects(f"file://{tmp_path}")
    written = grid(2, 1)
    segments = [Segment(0, LAYERS, 0, HEADS // 2), Segment(0, LAYERS, HEADS // 2, HEADS // 2)]
    realm, other = realm_of(segments, written), realm_of(grid(1, 1), written)
    await write(store, realm, written, 2 * BLOCK_TOKENS)
    reader = segment_reader(store)
    reads: list[str] = []
    read = store.read

    async def counted(name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        reads.append(name)
        return await read(name, into, seen=seen)

    store.read = counted  # type: ignore[method-assign]

    async def reshard(where: RealmLayout, rank: int, sources: tuple[int, ...]) -> None:
        slot = np.zeros(where.ranks[rank].templates.slot_bytes, dtype=np.uint8)
        meta, _ = await reader.reshard(where, command(rank, sources), slot)
        assert meta.num_blocks == 2

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reshard, realm, 0, (2, 3))
        tasks.start_soon(reshard, realm, 1, (3, 2))
        tasks.start_soon(reshard, other, 0, (1, 2))
    assert len(reads) == len(set(reads)) == 2
    await store.close()
