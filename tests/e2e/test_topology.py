"""Two clusters share a bucket: one cuts the model over two ranks, the other does not cut it.

What one stored is assembled for the other from the segments that overlap. The oracle is a bucket
that holds the same KV cut by numpy the way the reader wants it.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from sidecar.demo.engine import Engine, EngineSpec
from sidecar.demo.sidecars import SidecarProcess
from tests.e2e.arms import (
    BLOCK_TOKENS,
    Call,
    Measured,
    blocks_of,
    check_equal,
    counters,
    empty,
    fresh_salt,
    same_output,
    words,
)
from tiers.arrow import SlotTemplates
from tiers.arrow_file import Descriptor, find_descriptor
from tiers.catalog.names import object_name, parse_name
from tiers.layout import ChunkLayout, Segment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

pytestmark = pytest.mark.engine

TOKENS: Final = 1500
WHOLE_TOKENS: Final = 1472
CHUNKS: Final = 6
LAYERS: Final = 6
WHOLE: Final = (Segment(0, LAYERS, 0, 4),)
HALVES: Final = (Segment(0, LAYERS, 0, 2), Segment(0, LAYERS, 2, 2))


class Cluster(NamedTuple):
    """A sidecar's folder and two engines that attach to whatever sidecar serves there."""

    folder: Path
    engines: tuple[Engine, Engine]
    ranks: int


@contextlib.contextmanager
def serving(cluster: Cluster, bucket: Path) -> Iterator[SidecarProcess]:
    """An empty sidecar on a bucket, with both engines attached."""
    bucket.mkdir(exist_ok=True)
    config: dict[str, Any] = {
        "host": {"size": "256MiB"},
        # The model computes sooner than a store is read: wait for it all the same.
        "store": {"url": f"file://{bucket}", "refresh_seconds": "100ms", "recompute": "never"},
        "limits": {
            "lookup_wait": "60s",
            "load_deadline": "60s",
            "lease_ttl": "60s",
            "store_deadline": "60s",
        },
    }
    with SidecarProcess(cluster.folder, config) as sidecar:
        sessions = 2 * (1 + cluster.ranks)
        sidecar.wait("both engines attach", lambda now: len(now["sessions"]) == sessions)
        for engine in cluster.engines:
            proven(engine, sidecar)
        yield sidecar
        for engine in cluster.engines:
            empty(engine)
        assert sidecar.drain() == 0


def proven(engine: Engine, sidecar: SidecarProcess) -> None:
    """The sidecar knows a session a moment before the engine does: a store proves it is there."""
    stored = counters(sidecar)["chunks_stored"]
    for _ in range(100):
        engine.generate(words(2 * BLOCK_TOKENS, 1), max_tokens=1, cache_salt=fresh_salt())
        engine.reset_prefix_cache()
        if counters(sidecar)["chunks_stored"] > stored:
            return
    raise AssertionError("an attached engine stored nothing")


@pytest.fixture(scope="module")
def clusters(folder: Path, model: str) -> Iterator[tuple[Cluster, Cluster]]:
    """TP=1 and TP=2, two engines each."""
    with contextlib.ExitStack() as stack:
        made: list[Cluster] = []
        for name, ranks in (("one", 1), ("two", 2)):
            place = folder / name
            place.mkdir()
            args = {
                "tensor_parallel_size": ranks,
                "num_gpu_blocks_override": 256,
                "max_model_len": 4096,
            }
            bind = "|".join(str(core) for core in range(ranks))
            spec = EngineSpec(model, SidecarProcess(place, {}).socket, args, threads_bind=bind)
            first, second = (
                stack.enter_context(Engine(spec, place / f"engine{number}.log"))
                for number in range(2)
            )
            made.append(Cluster(place, (first, second), ranks))
        for cluster in made:
            for engine in cluster.engines:
                engine.wait_ready()
        yield made[0], made[1]


def told(sidecar: SidecarProcess, chunks: int) -> None:
    """Wait until the catalog was read whole, and has so many chunks."""

    def whole(status: dict[str, Any]) -> bool:
        store = status["tiers"]["store"]
        return bool(store["listings"] and store["chunks"] >= chunks)

    sidecar.wait("the catalog is read", whole)


def written(sidecar: SidecarProcess, chunks: int) -> None:
    sidecar.wait("all is written", lambda now: now["counters"]["chunks_written"] >= chunks)


def hit(engine: Engine, call: Call, salt: str) -> Measured:
    """Generate from poison on, with what the sidecar has."""
    empty(engine)
    generation = engine.generate(call.prompt, max_tokens=call.max_tokens, cache_salt=salt)
    return Measured(generation, blocks_of(engine), salt)


@pytest.mark.parametrize("writer", [0, 1], ids=["TP1 writes", "TP2 writes"])
def test_a_prompt_of_one_cluster_is_a_hit_in_the_other(
    folder: Path, clusters: tuple[Cluster, Cluster], writer: int
) -> None:
    ours, theirs = clusters[writer], clusters[1 - writer]
    bucket, call, salt = folder / f"bucket{writer}", Call(words(TOKENS, 10 + writer)), fresh_salt()
    with serving(ours, bucket) as sidecar:
        before = counters(sidecar)["chunks_written"]
        computed = ours.engines[0].generate(call.prompt, cache_salt=salt)
        empty(ours.engines[0])
        written(sidecar, before + CHUNKS)
        with serving(theirs, bucket) as other:
            # What attaching left is in the catalog, too.
            told(other, sidecar.status()["tiers"]["store"]["chunks"])
            read = counters(other)["chunks_read"]
            first = hit(theirs.engines[0], call, salt)
            assert first.generation.cached_tokens == WHOLE_TOKENS
            assert counters(other)["chunks_read"] - read == CHUNKS
            # The other engine finds in host memory what the first one brought there.
            second = hit(theirs.engines[1], call, salt)
            assert counters(other)["chunks_read"] - read == CHUNKS
            check_equal(second, first)
            assert counters(other)["reads_unreadable"] == 0
            assert counters(other)["chunks_written"] < CHUNKS, "the bucket has it, cut otherwise"
    # Ranks add up in another order: equal but for rounding.
    assert first.generation.tokens == computed.tokens
    for one, two in zip(first.generation.logprobs, computed.logprobs, strict=True):
        for token in one.keys() & two.keys():
            assert math.isclose(one[token], two[token], abs_tol=0.2)
    wanted = HALVES if theirs.ranks == 2 else WHOLE
    with serving(theirs, recut(bucket, folder / f"oracle{writer}", wanted)) as oracle:
        told(oracle, CHUNKS)
        expected = hit(theirs.engines[0], call, salt)
    check_equal(first, expected)
    assert same_output(first.generation, expected.generation)


def recut(bucket: Path, oracle: Path, wanted: tuple[Segment, ...]) -> Path:
    """A bucket with the KV of every chunk in `bucket`, cut by numpy into `wanted` segments."""
    chunks: dict[tuple[str, bytes], dict[Segment, Path]] = {}
    for path in bucket.rglob("*.arrow"):
        name = parse_name(str(path.relative_to(bucket)))
        if name is not None:
            chunks.setdefault((name.namespace, name.key), {})[name.segment] = path
    for (_, key), parts in chunks.items():
        if len({segment.num_heads for segment in parts}) == 1:
            _recut_chunk(oracle, key, parts, wanted)
    return oracle


def _recut_chunk(
    oracle: Path, key: bytes, parts: dict[Segment, Path], wanted: tuple[Segment, ...]
) -> None:
    whole: dict[int, npt.NDArray[np.uint8]] = {}
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
        blocks = len(tokens) // 4 // layout.block_tokens
        # [1, blocks, layers, heads, tokens, content elements]
        held = np.ascontiguousarray(row.column("kv").to_numpy_ndarray())[0]
        assert held.shape[:3] == (blocks, segment.num_layers, segment.num_heads)
        for head in range(segment.num_heads):
            values = np.ascontiguousarray(held[:, :, head])
            whole[segment.first_head + head] = values.view(np.uint8).reshape(blocks, LAYERS, -1)
    assert layout is not None
    for segment in wanted:
        own = msgspec.structs.replace(layout, segment=segment)
        heads = [whole[segment.first_head + head] for head in range(segment.num_heads)]
        payload = np.stack(heads, axis=2)
        template = SlotTemplates(own, digest)[payload.shape[0]]
        image = np.zeros(template.image_bytes, dtype=np.uint8)
        template.prepare(image)
        template.payload(image)[:] = payload.reshape(-1)
        template.seal(image, key, parent, tokens)
        path = oracle / object_name(digest, key, segment)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image.tobytes())


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
