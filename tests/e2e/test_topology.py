"""Two clusters share a bucket: one cuts the model over two ranks, the other does not cut it.

Each has two engines, and the bucket is that of a real S3 server. One engine of the latter cluster
has blocks of twice the tokens. What one stored is assembled for the others from the segments that
overlap, in blocks of their own size. The oracle is a store that holds the same KV, cut by numpy the
way the reader wants it.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from tests.e2e.arms import (
    Call,
    Measured,
    attach,
    blocks_of,
    check_equal,
    counters,
    empty,
    fresh_salt,
    idle,
    same_output,
    words,
)
from tests.e2e.setups import SMALL, Bucket, folder_store, held, sidecar_in
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.servers import S3Server, s3_server
from tests.tiers.packed import packed
from tiers.catalog.names import object_name, parse_name
from tiers.kv.arrow_file import Descriptor, find_descriptor
from tiers.kv.layout import ChunkLayout, Segment
from tiers.kv.slot_image import SlotTemplates

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

    from tests.harness.engine import Generation
    from tests.harness.sidecars import SidecarProcess

    Bytes = npt.NDArray[np.uint8]

pytestmark = [pytest.mark.engine, pytest.mark.promise("connector", "suite-layouts")]

TOKENS: Final = 1500
WHOLE_TOKENS: Final = 1472
CHUNKS: Final = 6
LAYERS: Final = 6
WHOLE: Final = (Segment(0, LAYERS, 0, 4),)
HALVES: Final = (Segment(0, LAYERS, 0, 2), Segment(0, LAYERS, 2, 2))


class Cluster(NamedTuple):
    """Two engines, and where the sidecar serves that they attach to: under a name in a folder."""

    folder: Path
    name: str
    engines: tuple[EngineProcess, EngineProcess]
    ranks: int
    block_tokens: tuple[int, int]
    """Per engine. Two sizes: they share no host memory, only the bucket."""


@contextlib.contextmanager
def serving(cluster: Cluster, store: dict[str, Any]) -> Iterator[SidecarProcess]:
    """An empty sidecar with this store, and both engines attached."""
    with sidecar_in(cluster.folder, name=cluster.name, store=store) as sidecar:
        sessions = 2 * (1 + cluster.ranks)
        for engine in cluster.engines:
            attach(engine, sidecar, sessions=sessions)
        yield sidecar
        for engine in cluster.engines:
            empty(engine)
        assert sidecar.drain() == 0


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[S3Server]:
    with s3_server(folder) as server:
        yield server


@pytest.fixture(scope="module")
def clusters(folder: Path, model: str) -> Iterator[tuple[Cluster, Cluster]]:
    """TP=1 and TP=2, two engines each; one engine has blocks of another size."""
    with contextlib.ExitStack() as stack:
        made: list[Cluster] = []
        for name, ranks, sizes in (("one", 1, (32, 64)), ("two", 2, (32, 32))):
            args = {"tensor_parallel_size": ranks, **SMALL}
            bind = "|".join(str(core) for core in range(ranks))
            socket = sidecar_in(folder, name=name).socket
            first, second = (
                stack.enter_context(
                    EngineProcess(
                        EngineSpec(model, socket, args | {"block_size": size}, threads_bind=bind),
                        folder / f"{name}{number}.log",
                    )
                )
                for number, size in enumerate(sizes)
            )
            made.append(Cluster(folder, name, (first, second), ranks, sizes))
        for cluster in made:
            for engine in cluster.engines:
                engine.wait_ready()
        yield made[0], made[1]


def told(sidecar: SidecarProcess, place: Path) -> None:
    """Wait until every kind of engine knows all that is in the folder `place`.

    A number would not do: what the engines store to show that they are there counts, too.
    """

    def whole(status: dict[str, Any]) -> bool:
        known = in_catalog(status)
        # After it was asked: what is written meanwhile can not stand in for what it lacks.
        return bool(status["tiers"]["store"]["listings"]) and known >= held(place)

    sidecar.wait("the catalog is read", whole)


def in_catalog(status: dict[str, Any]) -> int:
    """Chunks that every kind of engine here knows to be in the store."""
    return min(int(realm["chunks_in_store"]) for realm in status["realms"])


def announced(sidecar: SidecarProcess) -> None:
    """Wait until the catalog in the bucket has all that this sidecar wrote."""
    sidecar.wait(
        "all is announced", lambda now: not now["tiers"]["store"]["catalog"]["rows_waiting"]
    )


def refreshed(sidecar: SidecarProcess) -> None:
    """Wait for the end of the first refresh that begins from now on.

    Counted are readings of one realm's catalog, and the refresh under way may have read any of them
    before: it says nothing.
    """
    before = sidecar.status()

    def read(status: dict[str, Any]) -> bool:
        new = status["tiers"]["store"]["listings"] - before["tiers"]["store"]["listings"]
        return bool(new >= 2 * len(before["realms"]))

    sidecar.wait("the catalog is refreshed", read)


def written(sidecar: SidecarProcess, chunks: int) -> None:
    """Wait until all is written that was stored, and at least this many chunks.

    The number alone would not do: what the engines attached with may be written late, and counts.
    """
    sidecar.wait(
        "all is written", lambda now: idle(now) and now["counters"]["chunks_written"] >= chunks
    )


def hit(engine: EngineProcess, call: Call, salt: str) -> Measured:
    """Generate from poison on, with what the sidecar has."""
    empty(engine)
    generation = engine.generate(call.prompt, max_tokens=call.max_tokens, cache_salt=salt)
    return Measured(generation, blocks_of(engine), salt)


@pytest.mark.promise("other-tp")
@pytest.mark.parametrize(
    "writer",
    [pytest.param(0, marks=pytest.mark.nightly), 1],
    ids=["TP1 writes", "TP2 writes"],
)
def test_a_prompt_of_one_cluster_is_a_hit_in_the_other(
    folder: Path, clusters: tuple[Cluster, Cluster], server: S3Server, writer: int
) -> None:
    """Both are up, and share nothing but a bucket of an S3 server.

    The hit comes with the first refresh after the writing is in the catalog: nothing is waited for
    but that.
    """
    ours, theirs = clusters[writer], clusters[1 - writer]
    bucket, call, salt = (
        Bucket(server, f"shared{writer}"),
        Call(words(TOKENS, 10 + writer)),
        fresh_salt(),
    )
    with serving(ours, bucket.store) as sidecar, serving(theirs, bucket.store) as other:
        before = counters(sidecar)["chunks_written"]
        computed = ours.engines[0].generate(call.prompt, cache_salt=salt)
        empty(ours.engines[0])
        written(sidecar, before + CHUNKS)
        announced(sidecar)
        refreshed(other)
        read, made = (counters(other)[f"chunks_{what}"] for what in ("read", "written"))
        first = hit(theirs.engines[0], call, salt)
        assert first.generation.cached_tokens == WHOLE_TOKENS
        assert counters(other)["chunks_read"] - read == CHUNKS
        # The other engine finds in host memory what the first one brought there, if its blocks are
        # of the same size; else it has it made again.
        times = len(set(theirs.block_tokens))
        second = hit(theirs.engines[1], call, salt)
        assert counters(other)["chunks_read"] - read == CHUNKS * times
        assert second.generation.cached_tokens == WHOLE_TOKENS
        assert counters(other)["reads_unreadable"] == 0
        assert counters(other)["chunks_written"] - made < CHUNKS, "it is there, cut otherwise"
    # Ranks add up in another order: equal but for rounding.
    check_close(first.generation, computed)
    check_close(second.generation, computed)
    copied = bucket.fetched(folder / f"fetched{writer}")
    cut = HALVES if theirs.ranks == 2 else WHOLE
    for number, found in enumerate((first, second)):
        size = theirs.block_tokens[number]
        place = recut(copied, folder / f"oracle{writer}{number}", cut, size)
        with serving(theirs, folder_store(place)) as oracle:
            told(oracle, place)
            expected = hit(theirs.engines[number], call, salt)
        check_equal(found, expected, block_tokens=size)
        assert same_output(found.generation, expected.generation)


@pytest.mark.promise("other-block-sizes")
def test_blocks_of_another_size_are_a_hit_in_the_same_cluster(
    folder: Path, clusters: tuple[Cluster, Cluster]
) -> None:
    cluster = clusters[0]
    narrow, wide = cluster.engines
    bucket, call, salt = folder / "bucket-sizes", Call(words(TOKENS, 20)), fresh_salt()
    with serving(cluster, folder_store(bucket)) as sidecar:
        before, read = counters(sidecar)["chunks_written"], counters(sidecar)["chunks_read"]
        computed = narrow.generate(call.prompt, cache_salt=salt)
        empty(narrow)
        written(sidecar, before + CHUNKS)
        told(sidecar, bucket)
        found = hit(wide, call, salt)
        assert found.generation.cached_tokens == WHOLE_TOKENS
        assert counters(sidecar)["chunks_read"] - read == CHUNKS
        assert counters(sidecar)["quarantined_store"] == 0
    check_close(found.generation, computed)
    place = recut(bucket, folder / "oracle-sizes", WHOLE, 64)
    with serving(cluster, folder_store(place)) as oracle:
        told(oracle, place)
        expected = hit(wide, call, salt)
    check_equal(found, expected, block_tokens=64)


def check_close(one: Generation, other: Generation) -> None:
    """Log probabilities that only rounding tells apart, as long as what is before them is equal.

    Where two tokens are as likely, rounding chooses, and what follows is another text.
    """
    pairs = zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True)
    for token, expected, given, wanted in pairs:
        assert {str(token), str(expected)} <= given.keys() & wanted.keys()
        for known in given.keys() & wanted.keys():
            assert math.isclose(given[known], wanted[known], abs_tol=0.2)
        if token != expected:
            break


def recut(bucket: Path, oracle: Path, wanted: tuple[Segment, ...], block_tokens: int) -> Path:
    """A bucket with the KV of every chunk in `bucket`, cut by numpy into `wanted` segments."""
    chunks: dict[tuple[str, bytes], dict[Segment, Path]] = {}
    for path in bucket.rglob("*.arrow"):
        name = parse_name(str(path.relative_to(bucket)))
        if name is not None:
            chunks.setdefault((name.namespace, name.key), {})[name.segment] = path
    for (_, key), parts in chunks.items():
        if len({segment.num_heads for segment in parts}) == 1:
            _recut_chunk(oracle, key, parts, wanted, block_tokens)
    return oracle


def _recut_chunk(
    oracle: Path,
    key: bytes,
    parts: dict[Segment, Path],
    wanted: tuple[Segment, ...],
    block_tokens: int,
) -> None:
    # Per head [layers, tokens, content bytes], K and V of a token side by side.
    whole: dict[int, Bytes] = {}
    layout, digest, parent, tokens = None, b"", b"", b""
    for segment, path in parts.items():
        raw = path.read_bytes()
        descriptor = find_descriptor(raw)
        assert descriptor is not None
        digest = bytes.fromhex(descriptor.namespace)
        with pa.ipc.open_file(pa.BufferReader(raw)) as reader:
            row = reader.get_batch(0)
        parent = row.column("parent_hash")[0].as_py()
        tokens = np.array(row.column("token_ids")[0].as_py(), dtype="<i4").tobytes()
        layout = descriptor_layout(descriptor, segment)
        # [1, blocks, layers, heads, tokens, content elements]
        held = np.ascontiguousarray(row.column("kv").to_numpy_ndarray())[0]
        assert held.shape[:4] == (
            descriptor.blocks, LAYERS, segment.num_heads, descriptor.block_tokens,
        )  # fmt: skip
        places = _places(layout)
        raw_bytes = held.view(np.uint8).reshape(*held.shape[:3], -1)
        content = np.empty_like(raw_bytes)
        content[..., places] = raw_bytes
        for head in range(segment.num_heads):
            values = content[:, :, head].transpose(1, 0, 2)
            whole[segment.first_head + head] = values.reshape(LAYERS, -1, layout.content_bytes)
    assert layout is not None
    num_tokens = len(tokens) // 4
    if num_tokens % block_tokens:
        return
    for segment in wanted:
        own = msgspec.structs.replace(
            layout,
            segment=segment,
            block_tokens=block_tokens,
            blocks_per_chunk=max(1, num_tokens // block_tokens),
        )
        heads = np.stack([whole[segment.first_head + head] for head in range(segment.num_heads)])
        # [heads, layers, blocks, bytes of a block] -> [blocks, layers, heads, bytes of a block]
        blocks = heads.reshape(*heads.shape[:2], num_tokens // block_tokens, -1)
        payload = blocks.transpose(2, 1, 0, 3)[..., _places(own)]
        template = SlotTemplates(own, digest)[payload.shape[0]]
        image = np.zeros(template.image_bytes, dtype=np.uint8)
        template.prepare(image)
        template.payload(image)[:] = payload.reshape(-1)
        template.seal(image, key, parent, tokens)
        path = oracle / object_name(digest, key, segment)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image.tobytes())


def _places(layout: ChunkLayout) -> npt.NDArray[np.int64]:
    """Which byte of `[tokens, content]` each byte of a (block, head) is."""
    shape = layout.block_tokens, layout.content_bytes
    content = np.arange(math.prod(shape)).reshape(shape)
    return packed(content, layout.encoding, layout.itemsize)


def descriptor_layout(descriptor: Descriptor, segment: Segment) -> ChunkLayout:
    """The geometry that a file says it has."""
    return ChunkLayout(
        segment,
        descriptor.blocks,
        descriptor.block_tokens,
        descriptor.content_bytes,
        descriptor.dtype,
        descriptor.encoding,
    )
