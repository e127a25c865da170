"""Ranks that hold copies of one segment, as with MLA: it is stored once, and all read it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.core.commands import Gather, Scatter, Write
from sidecar.protocol import Done, Outcome, Role
from sidecar.protocol.codec import ProtocolError, decode_first, encode
from tests.sidecar.client import (
    RunningSidecar,
    Scheduler,
    Worker,
    attach_message,
    config_in,
    key_of,
    layout_of,
)
from tests.sidecar.engine_answers import messages, only
from tests.sidecar.engine_names import key
from tests.sidecar.engine_world import World
from tests.sidecar.worlds import make_world
from tiers.catalog.names import parse_name
from tiers.kv.index import FLAG_HOST, FLAG_STORE

if TYPE_CHECKING:
    from collections.abc import Sequence

KEYS = range(1, 13)


def engine_of(world: World, name: str, segments: int, replicas: int) -> list[int]:
    """Sessions of the workers of an engine, by rank; its scheduler is there too."""
    sizes: dict[str, Any] = {"world_size": segments * replicas, "replicas": replicas}
    world.open(Role.SCHEDULER, engine_id=name, **sizes)
    ranks = range(segments * replicas)
    return [world.open(Role.WORKER, engine_id=name, rank=rank, **sizes) for rank in ranks]


def ended(world: World, session_id: int, job_id: int, commands: Sequence[Any]) -> set[Outcome]:
    """Let the copies among `commands` end well; the outcomes of one session's job."""
    told = list(commands)
    for command in commands:
        if isinstance(command, Gather | Scatter):
            told += world.copied(command.copy_id)
    jobs = [job for one in messages(told, session_id) if isinstance(one, Done) for job in one.jobs]
    return {job.outcome for job in jobs if job.job_id == job_id}


@settings(max_examples=25)
@given(
    segments=st.sampled_from([1, 2, 4]),
    writer=st.sampled_from([1, 2, 3, 8]),
    reader=st.sampled_from([1, 2, 3, 8]),
    data=st.data(),
)
def test_each_segment_is_stored_once_and_loaded_by_every_rank(
    segments: int, writer: int, reader: int, data: st.DataObject
) -> None:
    world = make_world(slabs=32, slab_slots=16)
    workers = engine_of(world, "writer", segments, writer)
    gathers: list[Gather] = []
    writes: list[Write] = []
    for rank in data.draw(st.permutations(range(len(workers)))):
        commands = world.store(workers[rank], 1, KEYS)
        found = only(commands, Gather)
        # One rank stores each segment of a chunk; which one depends on the key alone.
        assert all(one.rank == rank // writer for one in found)
        gathers += found
        for command in commands:
            if isinstance(command, Gather):
                writes += only(world.copied(command.copy_id), Write)
    assert sorted((one.key, one.rank) for one in gathers) == sorted(
        (key(number), segment) for number in KEYS for segment in range(segments)
    )
    for one in writes:
        world.written(one.write_id)
    assert world.engine.counters.stores_duplicate == 0
    assert world.engine.counters.chunks_stored == len(KEYS)
    readers = engine_of(world, "reader", segments, reader)
    for rank, session_id in enumerate(readers):
        commands = world.load(session_id, 7, KEYS)
        slots = {one.key: one.slot for one in gathers if one.rank == rank // reader}
        assert {one.key: one.slot for one in only(commands, Scatter)} == slots
        assert ended(world, session_id, 7, commands) == {Outcome.OK}


def test_copies_take_turns() -> None:
    world = make_world(slabs=32, slab_slots=16)
    stored = [
        len(only(world.store(session_id, 1, range(1, 200)), Gather))
        for session_id in engine_of(world, "a", 1, 4)
    ]
    assert sum(stored) == 199
    assert min(stored) > 30


@pytest.mark.parametrize("replicas", [0, -1, 3, 8])
def test_copies_come_in_whole_sets(replicas: int) -> None:
    message = attach_message(Role.SCHEDULER, world_size=4, replicas=replicas)
    with pytest.raises(ProtocolError, match=f"replicas={replicas}"):
        decode_first(encode(message))


def test_a_cut_into_another_number_of_segments_is_another_realm(short_directory: Path) -> None:
    with (
        RunningSidecar(config_in(short_directory)) as running,
        Scheduler(running.path, engine_id="a", world_size=4, replicas=4) as copies,
        Scheduler(running.path, engine_id="b", world_size=2, replicas=2) as fewer,
        Scheduler(running.path, engine_id="c", world_size=4, replicas=2) as halves,
    ):
        assert copies.attached.index_salt == fewer.attached.index_salt
        assert copies.attached.index_salt != halves.attached.index_salt


class Engine:
    """A scheduler and workers of which each holds all of the model's KV."""

    def __init__(self, running: RunningSidecar, name: str, ranks: int) -> None:
        changes: dict[str, Any] = {"engine_id": name, "world_size": ranks, "replicas": ranks}
        self.scheduler = Scheduler(running.path, **changes)
        self.workers = [
            Worker(running.path, layout=layout_of(), rank=rank, **changes) for rank in range(ranks)
        ]

    def store(self, keys: list[bytes]) -> list[bytes]:
        """Store one chunk for each key, of blocks that are equal on every rank."""
        contents = [worker.fill(range(len(keys)), seed=1) for worker in self.workers]
        assert all(content == contents[0] for content in contents)
        for worker in self.workers:
            for number, name in enumerate(keys):
                assert worker.store(number, name, [number]) is Outcome.OK
        return contents[0]

    def check_loads(self, keys: list[bytes], contents: list[bytes]) -> None:
        for worker in self.workers:
            worker.poison()
            for number, name in enumerate(keys):
                assert worker.load(100 + number, name, [20 + number]) is Outcome.OK
                assert worker.read(20 + number) == contents[number]

    def close(self) -> None:
        for client in (self.scheduler, *self.workers):
            client.close()


@pytest.mark.promise("mla")
@pytest.mark.parametrize(("writer", "reader"), [(1, 4), (4, 1), (2, 4)])
def test_what_any_number_of_ranks_stored_any_other_reads(
    short_directory: Path, writer: int, reader: int
) -> None:
    bucket, keys = short_directory / "bucket", [key_of(str(number)) for number in range(6)]
    store = {"url": f"file://{bucket}", "refresh_seconds": 0.05, "recompute": "never"}
    (short_directory / "one").mkdir()
    (short_directory / "two").mkdir()
    with RunningSidecar(config_in(short_directory / "one", store=store)) as running:
        first, other = Engine(running, "first", writer), Engine(running, "other", reader)
        contents = first.store(keys)
        # One copy in host memory serves every rank of every engine.
        assert all(flags & FLAG_HOST for flags in other.scheduler.flags(*keys))
        other.check_loads(keys, contents)
        running.wait_until(lambda status: status["counters"]["chunks_written"] == len(keys))
        assert running.status()["counters"]["chunks_stored"] == len(keys)
        first.close()
        other.close()
    names = [parse_name(str(path.relative_to(bucket))) for path in bucket.rglob("*.arrow")]
    assert sorted(name.key for name in names if name is not None) == sorted(keys)
    with RunningSidecar(config_in(short_directory / "two", store=store)) as running:
        third = Engine(running, "third", reader)
        running.wait_until(lambda _: all(f & FLAG_STORE for f in third.scheduler.flags(*keys)))
        assert third.scheduler.lookup(1, keys).ready == len(keys)
        third.check_loads(keys, contents)
        third.close()
