"""Rows carried to and from a scripted sidecar: each transfer ends once, at its deadline at the
latest, and vLLM's region is not touched for a transfer that has ended."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from connector.export import ExportedMemory
from connector.offloading.staging import (
    BLOCK_TOKENS,
    TOKEN_IDS,
    Batch,
    Rows,
    StagedRow,
    Staging,
    row_layout,
)
from connector.worker import WorkerRole
from sidecar.protocol import Done, JobOutcome, Outcome, Submit
from sidecar.protocol.codec import decode_client, encode
from tests.connector.double import LIMITS
from tests.connector.workersession import WorkerSession
from tiers.kv.keys import NO_PARENT
from tiers.kv.layout import CONTENT_BYTES_MAX

ROW_BYTES = 8192
ROWS = 4
PATIENT_SECONDS = 1_000.0


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class World(WorkerSession):
    """A bounce memory, vLLM's region, and the sidecar's slots."""

    def __init__(self) -> None:
        super().__init__(topology="offloading", block_tokens=BLOCK_TOKENS, blocks_per_chunk=1)
        self.region: Rows = np.zeros((16, ROW_BYTES), dtype=np.uint8)
        for number, row in enumerate(self.region):
            row[:] = number
        self.slots: dict[bytes, bytes] = {}
        self.seen = 0
        self.bounce = Staging(self.region, ROWS, self._role, clock=self.clock)
        self.attach()

    def _role(self, memory: ExportedMemory) -> WorkerRole:
        self.memory = mmap.mmap(os.dup(memory.fd), memory.shared.size_bytes)
        return WorkerRole(lambda: memory, self.make_client, self.describe, clock=self.clock)

    def begin(self, batch: int, rows: list[StagedRow], *, is_load: bool) -> None:
        self.bounce.begin(batch, rows, is_load=is_load, seconds_max=PATIENT_SECONDS)

    def submits(self) -> list[Submit]:
        """What came since the last call, as the sidecar decodes it."""
        new = self.client.sent[self.seen :]
        self.seen = len(self.client.sent)
        decoded = [decode_client(encode(message)) for message in new]
        return [message for message in decoded if isinstance(message, Submit)]

    def row(self, number: int) -> slice:
        return slice(number * ROW_BYTES, (number + 1) * ROW_BYTES)

    def serve(self) -> None:
        """Do what was asked for."""
        assert self.client.live is not None
        jobs: list[JobOutcome] = []
        for submit in self.submits():
            for store in submit.stores:
                for chunk in store.chunks:
                    assert chunk.token_ids == TOKEN_IDS
                    self.slots[chunk.key] = self.memory[self.row(chunk.block_ids[0])]
                jobs.append(JobOutcome(store.job_id, Outcome.OK))
            for load in submit.loads:
                (piece,) = load.chunks
                held = self.slots.get(piece.key)
                if held is not None:
                    self.memory[self.row(piece.block_ids[0])] = held
                jobs.append(
                    JobOutcome(load.job_id, Outcome.MISSING if held is None else Outcome.OK)
                )
        if jobs:
            self.client.inbox.append(Done(self.client.live.epoch, jobs))

    def run(self, count: int = 1, *, serving: bool = True) -> list[Batch]:
        """Pump until this many batches ended."""
        ended: list[Batch] = []
        deadline = time.monotonic() + 60
        while len(ended) < count:
            assert time.monotonic() < deadline, f"{count} batches did not end"
            self.bounce.pump(self.client.live)
            if serving:
                self.serve()
            ended += self.bounce.finished()
            time.sleep(0.0005)
        return ended

    def pump_until_sent(self) -> list[Submit]:
        deadline = time.monotonic() + 60
        while not (submits := self.submits()):
            assert time.monotonic() < deadline, "nothing was sent"
            self.bounce.pump(self.client.live)
            time.sleep(0.0005)
        return submits


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.bounce.close()


def test_more_rows_than_there_is_room_for(world: World) -> None:
    rows = [
        StagedRow(key(number), number, key(number - 1) if number else NO_PARENT)
        for number in range(10)
    ]
    world.begin(1, rows, is_load=False)
    (batch,) = world.run()
    assert (batch.batch_id, batch.is_load, batch.failed) == (1, False, [])
    assert sorted(batch.done) == sorted(row.key for row in rows)
    assert world.slots == {row.key: bytes([row.chunk_id]) * ROW_BYTES for row in rows}
    world.region[:] = 0xEE
    world.begin(2, [StagedRow(row.key, 15 - row.chunk_id) for row in rows], is_load=True)
    (batch,) = world.run()
    assert batch.is_load
    assert not batch.failed
    for number in range(10):
        assert (world.region[15 - number] == number).all()
    assert (world.region[:6] == 0xEE).all()


def test_a_missing_chunk_fails_no_other(world: World) -> None:
    world.slots[key(1)] = b"\x01" * ROW_BYTES
    world.begin(1, [StagedRow(key(1), 3), StagedRow(key(2), 4)], is_load=True)
    (batch,) = world.run()
    assert (batch.done, batch.failed) == ([key(1)], [key(2)])
    assert (world.region[3] == 1).all()
    assert (world.region[4] == 4).all()


def test_retention_is_sent_with_the_chunks(world: World) -> None:
    world.begin(1, [StagedRow(key(1), 1, ttl_ms=5_000), StagedRow(key(2), 2)], is_load=False)
    world.begin(2, [StagedRow(key(3), 3, stays=True)], is_load=False)
    stored: dict[bytes, tuple[int, bool]] = {}
    while len(stored) < 3:
        for submit in world.pump_until_sent():
            for job in submit.stores:
                stored |= {chunk.key: (job.ttl_ms, job.stays) for chunk in job.chunks}
    assert stored == {key(1): (5_000, False), key(2): (0, False), key(3): (0, True)}


def test_an_empty_batch_ends(world: World) -> None:
    world.begin(7, [], is_load=False)
    assert [batch.batch_id for batch in world.run()] == [7]


def test_without_a_sidecar_everything_fails_at_once(world: World) -> None:
    world.client.attach(None)
    world.begin(1, [StagedRow(key(1), 1)], is_load=False)
    world.begin(2, [StagedRow(key(1), 2)], is_load=True)
    ended = world.run(2, serving=False)
    assert [batch.done for batch in ended] == [[], []]
    assert not world.client.sent


def test_a_sidecar_that_hangs_in_a_copy_delays_nobody(world: World) -> None:
    """It holds the fence's lock, so its job cannot be revoked; the transfer ends anyway."""
    world.begin(1, [StagedRow(key(1), 1)], is_load=True)
    (submit,) = world.pump_until_sent()
    (load,) = submit.loads
    row = load.chunks[0].block_ids[0]
    with world.fences[0].copying(load.job_id) as allowed:
        assert allowed
        world.clock.now += PATIENT_SECONDS + 1
        (batch,) = world.run(serving=False)
        assert batch.failed == [key(1)]
        # vLLM uses its row for something else; the sidecar's copy goes on in ours.
        world.region[1] = 77
        world.memory[world.row(row)] = b"\xff" * ROW_BYTES
        world.bounce.pump(world.client.live)
    world.bounce.pump(world.client.live)
    assert (world.region[1] == 77).all()
    # The row is of use again once it is known that nothing writes to it.
    world.slots |= {key(number): bytes([number]) * ROW_BYTES for number in range(2, 2 + ROWS)}
    rows = [StagedRow(key(number), number) for number in range(2, 2 + ROWS)]
    world.begin(2, rows, is_load=True)
    (batch,) = world.run()
    assert not batch.failed
    assert (world.region[1] == 77).all()


def test_a_late_answer_changes_nothing(world: World) -> None:
    world.slots[key(1)] = b"\x55" * ROW_BYTES
    world.begin(1, [StagedRow(key(1), 1)], is_load=True)
    world.bounce.pump(world.client.live)
    world.serve()
    world.clock.now += PATIENT_SECONDS + 1
    world.bounce.drain()
    (batch,) = world.bounce.finished()
    assert batch.failed == [key(1)]
    world.bounce.pump(world.client.live)
    assert not world.bounce.finished()
    assert (world.region[1] == 1).all()


def test_drain_ends_transfers_in_flight(world: World) -> None:
    rows = [StagedRow(key(number), number) for number in range(10)]
    world.begin(1, rows, is_load=False)
    world.begin(2, rows, is_load=True)
    world.bounce.pump(world.client.live)
    world.bounce.drain()
    ended = world.bounce.finished()
    assert {batch.batch_id for batch in ended} == {1, 2}
    assert all(len(batch.done) + len(batch.failed) == 10 for batch in ended)
    before = world.region.copy()
    world.serve()
    world.bounce.pump(world.client.live)
    assert (world.region == before).all()


def test_a_killed_sidecar_and_its_successor(world: World) -> None:
    world.begin(1, [StagedRow(key(1), 1)], is_load=False)
    world.pump_until_sent()
    world.client.attach(None)
    (batch,) = world.run(serving=False)
    assert batch.failed == [key(1)]
    world.attach()
    world.begin(2, [StagedRow(key(number), number) for number in range(ROWS)], is_load=False)
    (batch,) = world.run()
    assert not batch.failed
    assert len(world.slots) == ROWS


def test_stores_leave_room_for_loads(world: World) -> None:
    """A sidecar that accepts no stores still serves loads."""
    world.slots[key(99)] = b"\x09" * ROW_BYTES
    world.begin(1, [StagedRow(key(number), number) for number in range(10)], is_load=False)
    world.pump_until_sent()
    world.begin(2, [StagedRow(key(99), 12)], is_load=True)
    deadline = time.monotonic() + 60
    while not any(submit.loads for submit in world.pump_until_sent()):
        assert time.monotonic() < deadline


def test_no_more_jobs_than_the_sidecar_accepts(world: World) -> None:
    session = world.client.live
    assert session is not None
    session.limits = msgspec.structs.replace(LIMITS, jobs_inflight_max=1)
    world.begin(1, [StagedRow(key(number), number) for number in range(ROWS)], is_load=True)
    (submit,) = world.pump_until_sent()
    world.bounce.pump(session)
    assert len(submit.loads) == 1
    assert not world.submits()


@pytest.mark.parametrize("row_bytes", [4096, 3 * CONTENT_BYTES_MAX, 40 * CONTENT_BYTES_MAX])
def test_rows_of_any_size_have_a_layout(row_bytes: int) -> None:
    layout = row_layout(8, row_bytes)
    assert layout.num_blocks == 8
    assert layout.chunk(1).payload_bytes(1) == row_bytes
