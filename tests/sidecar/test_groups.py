"""Engines of several KV cache groups: one session, one memory, a realm for each group.

The second group lies over the first, as in a hybrid model: other layers, other tokens per block
and padded pages in the same bytes, where a block is of one group at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sidecar.errors import AttachRefused
from sidecar.protocol import (
    Events,
    Group,
    LoadChunk,
    LoadJob,
    Lookup,
    LookupDone,
    Outcome,
    Role,
    StoreChunk,
    StoreJob,
)
from sidecar.sessions.session import check_shape
from tests import places
from tests.sidecar.client import (
    LAYERS,
    NAMESPACE,
    ROOT,
    RefusedError,
    RunningSidecar,
    Scheduler,
    Worker,
    attach_message,
    config_in,
    key_of,
    layout_of,
)
from tiers.kv.index import FLAG_HOST, FLAG_STORE
from tiers.kv.layout import KVLayout, Segment

OTHER_NAMESPACE = b'{"group":1,' + NAMESPACE[1:]
OTHER_BLOCK_TOKENS = 32
OTHER_PER_CHUNK = 2


OTHER_HEADS = 2


def other_layout(rank: int = 0, world_size: int = 1) -> KVLayout:
    """Group 1 in the memory of `layout_of()`: its pages are half as large, and padded."""
    first, heads = layout_of(rank, world_size), OTHER_HEADS // world_size
    return KVLayout(
        segment=Segment(0, 2, rank * heads, heads),
        num_blocks=first.num_blocks,
        block_tokens=OTHER_BLOCK_TOKENS,
        content_bytes=32,
        dtype="float16",
        encoding="plain",
        size_bytes=first.size_bytes,
        layer_offsets_bytes=first.layer_offsets_bytes[:2],
        block_stride_bytes=first.block_stride_bytes,
        head_stride_bytes=32 * OTHER_BLOCK_TOKENS,
        token_stride_bytes=32,
    )


def other_group(role: Role, rank: int = 0, world_size: int = 1, **changes: Any) -> Group:
    layout = other_layout(rank, world_size) if role is Role.WORKER else None
    segment = None if layout is None else layout.segment
    group = Group(OTHER_NAMESPACE, OTHER_BLOCK_TOKENS, OTHER_PER_CHUNK, segment, layout)
    return msgspec.structs.replace(group, **changes)


class HybridWorker(Worker):
    """A worker of two groups."""

    def __init__(self, path: Path, rank: int = 0, world_size: int = 1, **changes: Any) -> None:
        super().__init__(
            path,
            groups=(other_group(Role.WORKER, rank, world_size),),
            rank=rank,
            world_size=world_size,
            **changes,
        )
        self.first, self.other = self.layout, other_layout(rank, world_size)

    def fill_group(self, group: int, blocks: Sequence[int]) -> list[bytes]:
        self.layout = self.other if group else self.first
        return self.fill(blocks, seed=group)

    def read_group(self, group: int, block: int) -> bytes:
        self.layout = self.other if group else self.first
        return self.read(block)


def store_of(group: int, key: bytes, blocks: Sequence[int]) -> StoreChunk:
    tokens = np.arange(len(blocks) * (OTHER_BLOCK_TOKENS if group else 16), dtype="<i4")
    return StoreChunk(key, ROOT, tokens.tobytes(), list(blocks), group=group)


def told_of(message: object) -> bool:
    return isinstance(message, Events)


def hybrid_scheduler(path: Path, **changes: Any) -> Scheduler:
    return Scheduler(path, groups=(other_group(Role.SCHEDULER),), **changes)


@pytest.mark.promise("padded-pages")
def test_one_job_stores_and_loads_chunks_of_both_groups(sidecar: RunningSidecar) -> None:
    keys = [key_of("full"), key_of("window")]
    with HybridWorker(sidecar.path) as worker, hybrid_scheduler(sidecar.path) as scheduler:
        contents = [worker.fill_group(0, [1, 2, 3, 4]), worker.fill_group(1, [9, 8])]
        chunks = [store_of(0, keys[0], [1, 2, 3, 4]), store_of(1, keys[1], [9, 8])]
        worker.submit(stores=[StoreJob(1, chunks)])
        assert worker.outcome(1) is Outcome.OK
        assert scheduler.flags(*keys) == [FLAG_HOST, FLAG_HOST]

        worker.poison()
        scheduler.lease(2, keys)
        pieces = [LoadChunk(keys[0], 1, [30, 31]), LoadChunk(keys[1], 0, [20, 40], 1)]
        worker.submit(loads=[LoadJob(2, pieces)])
        assert worker.outcome(2) is Outcome.OK
        assert [worker.read_group(0, block) for block in (30, 31)] == contents[0][1:3]
        assert [worker.read_group(1, block) for block in (20, 40)] == contents[1]
        # The pad of a page belongs to nobody.
        page = other_layout().layer_offsets_bytes[0] + 20 * other_layout().block_stride_bytes
        assert (worker.memory[page + 2048 : page + 4096] == 0xEE).all()
        sidecar.wait_until(lambda status: not status["leases"])


def test_events_name_the_group(sidecar: RunningSidecar) -> None:
    with (
        HybridWorker(sidecar.path) as worker,
        hybrid_scheduler(sidecar.path, want_events=True) as scheduler,
    ):
        key = key_of("window")
        worker.submit(stores=[StoreJob(1, [store_of(1, key, [9, 8])])])
        assert worker.outcome(1) is Outcome.OK
        scheduler.release()
        told = scheduler.wait_for(told_of)
        assert isinstance(told, Events)
        (stored,) = told.stored
        assert (stored.key, stored.group, stored.num_tokens) == (key, 1, 2 * OTHER_BLOCK_TOKENS)


def test_a_key_is_of_its_group_alone(sidecar: RunningSidecar) -> None:
    key = key_of("full")
    with HybridWorker(sidecar.path) as worker:
        worker.submit(stores=[StoreJob(1, [store_of(0, key, [1, 2])])])
        assert worker.outcome(1) is Outcome.OK
        worker.submit(loads=[LoadJob(2, [LoadChunk(key, 0, [5], 1)])])
        assert worker.outcome(2) is Outcome.MISSING


def test_a_load_of_which_one_group_is_missing_copies_nothing(sidecar: RunningSidecar) -> None:
    key = key_of("full")
    with HybridWorker(sidecar.path) as worker:
        worker.fill_group(0, [1, 2])
        worker.submit(stores=[StoreJob(1, [store_of(0, key, [1, 2])])])
        assert worker.outcome(1) is Outcome.OK
        worker.poison()
        pieces = [LoadChunk(key, 0, [5, 6]), LoadChunk(key_of("window"), 0, [7], 1)]
        worker.submit(loads=[LoadJob(2, pieces)])
        assert worker.outcome(2) is Outcome.MISSING
        assert (worker.memory == 0xEE).all()


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"stores": [StoreJob(1, [store_of(2, key_of(1), [1])])]}, "group=2"),
        ({"loads": [LoadJob(1, [LoadChunk(key_of(1), 0, [1], 2)])]}, "group=2"),
        ({"loads": [LoadJob(1, [LoadChunk(key_of(1), 0, [1, 2, 3], 1)])]}, "at most 2"),
        ({"stores": [StoreJob(1, [StoreChunk(key_of(1), ROOT, bytes(64), [1], group=1)])]}, "128"),
    ],
)
def test_jobs_that_do_not_fit_their_group_are_refused(
    sidecar: RunningSidecar, message: dict[str, Any], what: str
) -> None:
    with HybridWorker(sidecar.path) as worker:
        worker.submit(**message)
        assert what in worker.error().message


def test_ranks_of_one_engine_need_the_same_groups(sidecar: RunningSidecar) -> None:
    with (
        HybridWorker(sidecar.path),
        pytest.raises(RefusedError, match=r"other groups \(2\)"),
    ):
        Scheduler(sidecar.path)
    with pytest.raises(RefusedError, match="layout"):
        Worker(sidecar.path, groups=(other_group(Role.WORKER, block_tokens=16),))
    # A refused client leaves no realm behind.
    sidecar.wait_until(lambda status: [realm["sessions"] for realm in status["realms"]] == [0, 0])


def test_a_group_that_is_refused_after_another_was_taken_leaves_nothing(
    short_directory: Path,
) -> None:
    """What was learnt of the first was to be looked up in the store: of a realm that was gone."""
    store = {"url": f"file://{short_directory}/bucket", "refresh_seconds": 60.0}
    too_large = other_group(Role.WORKER, blocks_per_chunk=2048)
    with RunningSidecar(config_in(short_directory, store=store)) as sidecar:
        sidecar.wait_until(lambda status: status["tiers"]["store"]["state"] == "ok")
        for _ in range(3):
            with pytest.raises(RefusedError, match="pool"):
                Worker(sidecar.path, groups=(too_large,))
        assert sidecar.status()["realms"] == []
        with Worker(sidecar.path) as worker:
            worker.submit(stores=[StoreJob(1, [store_of(0, key_of("a"), [1, 2, 3, 4])])])
            assert worker.outcome(1) is Outcome.OK
            sidecar.wait_until(lambda status: status["counters"]["chunks_written"] == 1)


def test_chunks_of_both_groups_come_back_from_the_store(short_directory: Path) -> None:
    store = {"url": f"file://{short_directory}/bucket", "refresh_seconds": 0.05}
    keys = [key_of("full"), key_of("window")]
    with (
        RunningSidecar(config_in(short_directory, store=store)) as sidecar,
        HybridWorker(sidecar.path) as worker,
    ):
        contents = [worker.fill_group(0, [1, 2, 3, 4]), worker.fill_group(1, [9, 8])]
        chunks = [store_of(0, keys[0], [1, 2, 3, 4]), store_of(1, keys[1], [9, 8])]
        worker.submit(stores=[StoreJob(1, chunks)])
        assert worker.outcome(1) is Outcome.OK
        sidecar.wait_until(lambda status: status["counters"]["chunks_written"] == 2)
    with (
        RunningSidecar(config_in(short_directory, store=store)) as sidecar,
        HybridWorker(sidecar.path) as worker,
        hybrid_scheduler(sidecar.path) as scheduler,
    ):
        sidecar.wait_until(lambda _: scheduler.flags(*keys) == [FLAG_STORE, FLAG_STORE])
        scheduler.send(Lookup(scheduler.epoch, 1, keys, 20_000, groups=[0, 1]))
        answer = scheduler.wait_for(lambda one: isinstance(one, LookupDone))
        assert isinstance(answer, LookupDone)
        assert (answer.ready, answer.outcome) == (2, Outcome.OK)
        worker.poison()
        pieces = [LoadChunk(keys[0], 0, [1, 2, 3, 4]), LoadChunk(keys[1], 0, [20, 40], 1)]
        worker.submit(loads=[LoadJob(2, pieces)])
        assert worker.outcome(2) is Outcome.OK
        assert [worker.read_group(0, block) for block in (1, 2, 3, 4)] == contents[0]
        assert [worker.read_group(1, block) for block in (20, 40)] == contents[1]


def by_layer(content: bytes, layers: int) -> list[bytes]:
    """A block's payload, whose outermost axis is its layers."""
    size = len(content) // layers
    return [content[layer * size : (layer + 1) * size] for layer in range(layers)]


@pytest.mark.promise("other-ranks-groups")
def test_another_number_of_ranks_reads_every_group(short_directory: Path) -> None:
    """Per group the heads of all ranks, which are side by side in each layer."""
    store = {
        "url": f"file://{short_directory}/bucket", "refresh_seconds": 0.05, "recompute": "never"
    }  # fmt: skip
    keys, blocks = [key_of("full"), key_of("window")], ([1, 2, 3, 4], [9, 8])
    for name in ("one", "two"):
        (short_directory / name).mkdir()
    expected: list[list[bytes]] = []
    with (
        RunningSidecar(config_in(short_directory / "one", store=store)) as sidecar,
        HybridWorker(sidecar.path, 0, 2, topology="tp2") as first,
        HybridWorker(sidecar.path, 1, 2, topology="tp2") as second,
    ):
        for group, layers in enumerate((LAYERS, 2)):
            halves = [worker.fill_group(group, blocks[group]) for worker in (first, second)]
            expected.append(
                [
                    b"".join(
                        part
                        for parts in zip(by_layer(one, layers), by_layer(two, layers), strict=True)
                        for part in parts
                    )
                    for one, two in zip(*halves, strict=True)
                ]
            )
            for worker in (first, second):
                job = StoreJob(group, [store_of(group, keys[group], blocks[group])])
                worker.submit(stores=[job])
                assert worker.outcome(group) is Outcome.OK
        sidecar.wait_until(lambda status: status["counters"]["chunks_written"] == 2)
    with (
        RunningSidecar(config_in(short_directory / "two", store=store)) as sidecar,
        HybridWorker(sidecar.path, topology="tp1") as whole,
        hybrid_scheduler(sidecar.path, topology="tp1") as scheduler,
    ):
        sidecar.wait_until(lambda _: scheduler.flags(*keys) == [FLAG_STORE, FLAG_STORE])
        scheduler.send(Lookup(scheduler.epoch, 1, keys, 20_000, groups=[0, 1]))
        answer = scheduler.wait_for(lambda one: isinstance(one, LookupDone))
        assert isinstance(answer, LookupDone)
        assert (answer.ready, answer.outcome) == (2, Outcome.OK)
        whole.poison()
        pieces = [LoadChunk(keys[0], 0, blocks[0]), LoadChunk(keys[1], 0, [20, 40], 1)]
        whole.submit(loads=[LoadJob(2, pieces)])
        assert whole.outcome(2) is Outcome.OK
        assert [whole.read_group(0, block) for block in blocks[0]] == expected[0]
        assert [whole.read_group(1, block) for block in (20, 40)] == expected[1]


def test_a_group_is_found_again_after_a_warm_restart(short_directory: Path) -> None:
    config = config_in(short_directory, host={"after_stop": "keep"})
    keys = [key_of("full"), key_of("window")]
    with RunningSidecar(config) as sidecar, HybridWorker(sidecar.path) as worker:
        content = worker.fill_group(1, [9, 8])
        chunks = [store_of(0, keys[0], [1, 2, 3, 4]), store_of(1, keys[1], [9, 8])]
        worker.submit(stores=[StoreJob(1, chunks)])
        assert worker.outcome(1) is Outcome.OK
    with (
        RunningSidecar(config) as sidecar,
        HybridWorker(sidecar.path) as worker,
        hybrid_scheduler(sidecar.path) as scheduler,
    ):
        assert scheduler.flags(*keys) == [FLAG_HOST, FLAG_HOST]
        worker.poison()
        worker.submit(loads=[LoadJob(1, [LoadChunk(keys[1], 0, [3, 4], 1)])])
        assert worker.outcome(1) is Outcome.OK
        assert [worker.read_group(1, block) for block in (3, 4)] == content


def test_groups_say_what_they_are_of(sidecar: RunningSidecar) -> None:
    with HybridWorker(sidecar.path):
        known = sidecar.status()["realms"]
    assert [realm["namespace"].get("group") for realm in known] == [None, 1]
    assert len(attach_message(Role.WORKER, layout_of()).parts) == 1


def test_the_index_grows_for_every_group(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "INDEX_ENTRIES_FIRST", 8)
    keys = [key_of("many", number) for number in range(40)]
    with (
        RunningSidecar(config_in(short_directory)) as sidecar,
        HybridWorker(sidecar.path) as worker,
        hybrid_scheduler(sidecar.path) as scheduler,
    ):
        chunks = [store_of(number % 2, key, [number]) for number, key in enumerate(keys)]
        worker.submit(stores=[StoreJob(1, chunks)])
        assert worker.outcome(1) is Outcome.OK
        while scheduler.flags(*keys) != [FLAG_HOST] * 40:
            scheduler.take_moved_index()


def test_groups_together_are_no_larger_than_one_may_be() -> None:
    """A plan is kept for each group: many of them must not take what one may not."""
    heads, tokens = 65_536, 128
    layout = KVLayout(
        segment=Segment(0, 1, 0, heads),
        num_blocks=1,
        block_tokens=tokens,
        content_bytes=2,
        dtype="float16",
        encoding="plain",
        size_bytes=heads * tokens * 2,
        layer_offsets_bytes=(0,),
        block_stride_bytes=0,
        head_stride_bytes=tokens * 2,
        token_stride_bytes=2,
    )
    group = Group(OTHER_NAMESPACE, tokens, 1, layout.segment, layout)
    one: Any = {"block_tokens": tokens, "blocks_per_chunk": 1}
    check_shape(attach_message(Role.WORKER, layout, groups=(group,), **one))
    with pytest.raises(AttachRefused, match="groups=3"):
        check_shape(attach_message(Role.WORKER, layout, groups=(group, group), **one))
