"""The worker role against real fence pages: each job ends once, and never while a copy may run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from connector.export import ExportedMemory
from connector.plan import IDLE_WAIT_MS, LOADS_WAIT_MS, Load, StepPlan, Store
from connector.worker import WorkerRole
from sidecar.protocol import (
    KIND_MEMFD,
    Done,
    Error,
    JobOutcome,
    LoadChunk,
    LoadJob,
    Memory,
    Outcome,
    StoreChunk,
    StoreJob,
    Submit,
)
from sidecar.protocol.codec import decode_client, encode
from tests.connector.double import LIMITS
from tests.connector.workersession import WorkerSession
from tiers.kv.fence import SidecarFence, WorkerFence
from tiers.kv.layout import KVLayout, Segment

SEGMENT = Segment(first_layer=0, num_layers=1, first_head=0, num_heads=1)
LAYOUT = KVLayout.from_views(
    SEGMENT,
    [(0, (8, 1, 4, 8), (64, 64, 16, 2))],
    itemsize=2,
    dtype="bfloat16",
    encoding="test",
    size_bytes=4096,
)
KEY, PARENT = b"k" * 32, b"p" * 32
LOAD_SECONDS = LIMITS.load_deadline_ms_max / 1000
STORE_SECONDS = LIMITS.store_deadline_ms_max / 1000


def load(job_id: int, request_id: str = "") -> Load:
    job = LoadJob(job_id, [LoadChunk(KEY, 1, [3, 4])])
    return Load(request_id or f"request-{job_id}", job)


def store(job_id: int) -> Store:
    return Store(StoreJob(job_id, [StoreChunk(KEY, PARENT, bytes(32), [5, 6])]))


class Rank(WorkerSession):
    """One rank's worker role with a sidecar that does what the test says."""

    def __init__(self) -> None:
        super().__init__(topology="tp1", block_tokens=4, blocks_per_chunk=4)
        self.memory: ExportedMemory
        self.role = WorkerRole(self.export, self.make_client, self.describe, clock=self.clock)
        self.attach()

    def export(self) -> ExportedMemory:
        self.memory = ExportedMemory(os.memfd_create("kv"), Memory(KIND_MEMFD, 4096), [LAYOUT])
        return self.memory

    @property
    def fence(self) -> SidecarFence:
        return self.fences[-1]

    def answer(self, *outcomes: tuple[int, Outcome]) -> None:
        session = self.client.session
        assert session is not None
        jobs = [JobOutcome(job_id, outcome) for job_id, outcome in outcomes]
        self.client.inbox.append(Done(session.epoch, jobs))

    def void(self, job_id: int, fence: SidecarFence | None = None) -> bool:
        with (fence or self.fence).copying(job_id) as allowed:
            return not allowed

    def close(self) -> None:
        self.role.close()
        for fence in self.fences:
            fence.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.close()


class TestSubmit:
    def test_one_message_carries_the_step(self, rank: Rank) -> None:
        rank.role.submit(StepPlan([load(2)], [store(3), store(4)]))
        (message,) = rank.client.sent_of(Submit)
        # It is what the sidecar accepts, byte by byte.
        assert decode_client(encode(message)) == message
        assert [job.job_id for job in message.loads] == [2]
        assert [job.job_id for job in message.stores] == [3, 4]
        assert message.loads[0].chunks[0].first_block == 1
        assert rank.fence.reached(message.fence)
        assert not rank.fence.reached(message.fence + 1)

    def test_large_steps_are_sent_in_several_messages(self, rank: Rank) -> None:
        """As where a sidecar that starts empty is beside an engine with a warm cache."""
        chunk = StoreChunk(KEY, PARENT, bytes(8 * 1024), [2**31] * 128, b"t" * 8)
        stores = [Store(StoreJob(job_id, [chunk] * 64)) for job_id in range(3, 13)]
        rank.role.submit(StepPlan([load(2)], stores))
        messages = rank.client.sent_of(Submit)
        assert len(messages) > 1
        for message in messages:
            assert decode_client(encode(message)) == message
            assert rank.fence.reached(message.fence)
        assert [job.job_id for job in messages[0].loads] == [2]
        assert [job.job_id for one in messages for job in one.stores] == list(range(3, 13))
        # Each waits for its own answer.
        assert not rank.role.collect().report.ended
        rank.answer(*((job_id, Outcome.OK) for job_id in range(2, 13)))
        results = rank.role.collect()
        assert results.loaded == {"request-2"}
        assert results.report.ended.keys() == set(range(3, 13))
        assert not results.report.failed

    def test_more_jobs_than_one_may_hold(self, rank: Rank) -> None:
        rank.role.submit(StepPlan([load(2)], [store(3 + one) for one in range(5_000)]))
        messages = rank.client.sent_of(Submit)
        assert [decode_client(encode(message)) for message in messages] == messages
        assert sum(len(message.stores) for message in messages) == 5_000

    def test_an_empty_step_sends_nothing(self, rank: Rank) -> None:
        rank.role.submit(StepPlan())
        results = rank.role.collect()
        assert not rank.client.sent
        assert not results.loaded
        assert not results.report.ended

    def test_a_retired_rank_detaches(self, rank: Rank) -> None:
        """What is open ends, but for a copy that runs: that may still touch this memory."""
        rank.role.submit(StepPlan([load(1, "one")], [store(2)]))
        with rank.fence.copying(2) as allowed:
            assert allowed
            rank.role.submit(StepPlan([load(3, "three")], retired=True))
            assert rank.client.closed
            results = rank.role.collect()
            assert results.failed == {"three"}
            assert not results.report.ended
        results = rank.role.collect()
        assert results.failed == {"one"}
        assert results.report.ended == {2: 1}
        rank.role.submit(StepPlan(retired=True))
        assert len(rank.client.sent_of(Submit)) == 1
        assert rank.memory.fd >= 0

    @pytest.mark.promise("attach-again")
    def test_every_attempt_has_its_own_fence_page(self, rank: Rank) -> None:
        assert rank.attempts is not None
        one, other = rank.attempts(), rank.attempts()
        assert one.fds[0] == other.fds[0] == rank.memory.fd
        assert one.fds[1] != other.fds[1]


class TestIdle:
    def test_a_step_that_only_waits_for_us_waits_a_little(self, rank: Rank) -> None:
        rank.role.submit(StepPlan([], [store(2)]))
        rank.role.collect(StepPlan(idle=True))
        assert rank.client.waited_ms == IDLE_WAIT_MS

    def test_one_that_loads_waits_longer(self, rank: Rank) -> None:
        rank.role.submit(StepPlan([load(2, "a")], [store(3)]))
        rank.role.collect(StepPlan(idle=True))
        assert rank.client.waited_ms == LOADS_WAIT_MS

    def test_so_does_one_that_waits_for_another_rank_or_for_a_lookup(self, rank: Rank) -> None:
        rank.role.collect(StepPlan(idle=True, waiting=True))
        assert rank.client.waited_ms == IDLE_WAIT_MS

    def test_no_other_does(self, rank: Rank) -> None:
        rank.role.submit(StepPlan([load(2, "a")], []))
        rank.role.collect()
        # Idle again, but with nothing of ours to wait for.
        rank.answer((2, Outcome.OK))
        rank.role.collect()
        rank.role.collect(StepPlan(idle=True))
        rank.role.collect(StepPlan(waiting=True))
        assert rank.client.waited_ms == 0


class TestAnswered:
    def test_outcomes(self, rank: Rank) -> None:
        rank.role.submit(StepPlan([load(2, "a"), load(3, "b")], [store(4), store(5), store(6)]))
        rank.answer((2, Outcome.OK), (3, Outcome.MISSING), (4, Outcome.OK), (5, Outcome.PARTIAL))
        results = rank.role.collect()
        assert results.loaded == {"a", "b"}
        assert results.failed == {"b"}
        assert results.report.ended == {4: 1, 5: 1}
        assert results.report.failed == 0
        rank.answer((6, Outcome.FULL))
        assert rank.role.collect().report.failed == 1

    def test_each_job_ends_once(self, rank: Rank) -> None:
        rank.role.submit(StepPlan([load(2, "a")], [store(3)]))
        rank.answer((2, Outcome.OK), (3, Outcome.OK))
        rank.answer((2, Outcome.FAILED), (3, Outcome.FAILED))
        results = rank.role.collect()
        assert not results.failed
        assert not results.report.failed
        rank.answer((2, Outcome.OK), (3, Outcome.OK), (99, Outcome.OK))
        results = rank.role.collect()
        assert not results.loaded
        assert not results.report.ended

    def test_a_refused_frame_ends_its_jobs_at_once(
        self, rank: Rank, caplog: pytest.LogCaptureFixture
    ) -> None:
        session = rank.client.session
        assert session is not None
        rank.role.submit(StepPlan([load(2, "a")], [store(3)]))
        rank.client.inbox.append(Error(session.epoch, "field", "block_ids=[]: must not be empty"))
        results = rank.role.collect()
        assert results.failed == {"a"}
        assert results.report.ended == {3: 1}
        # It may have been another frame that was refused: so they are void, not only forgotten.
        assert rank.void(3)
        assert "must not be empty" in caplog.text


class TestDeadline:
    @pytest.mark.promise("engine-deadlines")
    def test_a_late_job_is_revoked_before_its_blocks_are_given_back(self, rank: Rank) -> None:
        rank.role.submit(StepPlan([load(2, "a")], [store(3)]))
        rank.clock.now += LOAD_SECONDS - 0.1
        assert not rank.role.collect().loaded
        assert not rank.void(2)
        rank.clock.now += 0.2
        results = rank.role.collect()
        assert results.failed == results.loaded == {"a"}
        assert not results.report.ended
        assert rank.void(2)
        assert not rank.void(3)
        rank.clock.now += STORE_SECONDS
        results = rank.role.collect()
        assert results.report.ended == {3: 1}
        assert results.report.failed == 1
        assert rank.void(3)

    def test_revoking_one_ends_all_that_it_voids(self, rank: Rank) -> None:
        # Ids are voided by order: a store with a smaller id than the late load goes with it.
        rank.role.submit(StepPlan([load(3, "a")], [store(2)]))
        rank.clock.now += LOAD_SECONDS
        results = rank.role.collect()
        assert results.failed == {"a"}
        assert results.report.ended == {2: 1}
        assert rank.void(2)

    def test_a_job_is_not_ended_while_a_copy_runs(self, rank: Rank) -> None:
        rank.role.submit(StepPlan([load(2, "a")], []))
        with rank.fence.copying(2) as allowed:
            assert allowed
            rank.clock.now += LOAD_SECONDS
            for _ in range(3):
                assert not rank.role.collect().loaded
        results = rank.role.collect()
        assert results.failed == {"a"}
        assert results.report.loads_expired == 1
        assert not results.report.empty

    def test_nothing_is_sent_while_a_copy_keeps_a_late_job_from_ending(self, rank: Rank) -> None:
        """A sidecar that is frozen in a copy keeps what it was sent, and gets no more."""
        rank.role.submit(StepPlan([load(2, "a")], []))
        with rank.fence.copying(2):
            rank.clock.now += LOAD_SECONDS
            rank.role.collect()
            rank.role.submit(StepPlan([load(3, "b")], [store(4)]))
            results = rank.role.collect()
            assert results.failed == {"b"}
            assert results.report.ended == {4: 1}
        assert rank.role.collect().failed == {"a"}
        rank.role.submit(StepPlan([load(5, "c")], []))
        assert len(rank.client.sent_of(Submit)) == 2

    def test_a_worker_that_waits_to_revoke_is_not_starved(self, rank: Rank) -> None:
        rank.role.submit(StepPlan([load(2, "a")], [store(3)]))
        rank.clock.now += LOAD_SECONDS
        copying = contextlib.ExitStack()
        assert copying.enter_context(rank.fence.copying(2))
        for _ in range(100):
            # Copies that overlap: before one ends, the next begins, if it may.
            if rank.role.collect().failed:
                break
            following = contextlib.ExitStack()
            with contextlib.suppress(BlockingIOError):
                following.enter_context(rank.fence.copying(3))
            copying.close()
            copying = following
        else:
            pytest.fail("the blocks never came back")
        assert not rank.fence.revoking
        assert rank.void(2)
        assert not rank.void(3)

    def test_an_answer_in_time_lets_copies_start_again(self, rank: Rank) -> None:
        rank.role.submit(StepPlan([load(2, "a")], []))
        with rank.fence.copying(2):
            rank.clock.now += LOAD_SECONDS
            assert not rank.role.collect().loaded
            assert rank.fence.revoking
        rank.answer((2, Outcome.OK))
        assert rank.role.collect().loaded == {"a"}
        assert not rank.fence.revoking

    def test_an_answer_in_time_for_the_deadline_counts(self, rank: Rank) -> None:
        rank.role.submit(StepPlan([load(2, "a")], []))
        rank.answer((2, Outcome.OK))
        rank.clock.now += LOAD_SECONDS
        results = rank.role.collect()
        assert results.loaded == {"a"}
        assert not results.failed
        assert not rank.void(2)

    def test_later_jobs_are_not_void(self, rank: Rank) -> None:
        rank.role.submit(StepPlan([load(2, "a")], []))
        rank.clock.now += LOAD_SECONDS
        rank.role.collect()
        rank.role.submit(StepPlan([load(3, "b")], []))
        assert not rank.void(3)
        rank.answer((3, Outcome.OK))
        assert rank.role.collect().loaded == {"b"}


class TestSessions:
    def test_without_one_every_job_fails_at_once(self, rank: Rank) -> None:
        rank.client.attach(None)
        rank.role.submit(StepPlan([load(2, "a")], [store(3)]))
        results = rank.role.collect()
        assert results.failed == results.loaded == {"a"}
        assert results.report.ended == {3: 1}
        assert results.report.failed == 1

    def test_a_full_queue_fails_them_too(self, rank: Rank) -> None:
        rank.client.accepting = False
        rank.role.submit(StepPlan([load(2, "a")], [store(3)]))
        results = rank.role.collect()
        assert results.failed == {"a"}
        assert results.report.ended == {3: 1}

    def test_a_lost_one_ends_its_jobs(self, rank: Rank) -> None:
        rank.role.submit(StepPlan([load(2, "a")], [store(3)]))
        rank.client.attach(None)
        results = rank.role.collect()
        assert results.failed == {"a"}
        assert results.report.ended == {3: 1}
        # The sidecar may only be slow, and see the end of the connection later than the jobs.
        assert rank.void(3)

    def test_but_not_while_its_sidecar_still_copies(self, rank: Rank) -> None:
        rank.role.submit(StepPlan([], [store(2), store(3)]))
        old = rank.fence
        with old.copying(2):
            rank.attach()
            rank.role.submit(StepPlan([], [store(4)]))
            assert not rank.role.collect().report.ended
        # The jobs of the old session end on the old page; the new one is untouched.
        assert rank.role.collect().report.ended == {2: 1, 3: 1}
        assert rank.void(3, old)
        assert not rank.void(4)
        rank.answer((4, Outcome.OK))
        assert rank.role.collect().report.ended == {4: 1}

    def test_steps_count_on_in_a_new_one(self, rank: Rank) -> None:
        rank.role.submit(StepPlan([], [store(2)]))
        rank.attach()
        assert not rank.fence.reached(1)
        rank.role.submit(StepPlan([], [store(3)]))
        message = rank.client.sent_of(Submit)[-1]
        assert rank.fence.reached(message.fence)

    def test_one_that_changes_between_making_and_sending_is_not_used(
        self, rank: Rank, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # As after a pause of the engine's thread right there: the jobs would be the next
        # session's, and revoked on this one's page.
        send = rank.client.send

        def pause(session: object, message: object) -> bool:
            rank.attach()
            return send(session, message)  # type: ignore[arg-type]

        monkeypatch.setattr(rank.client, "send", pause)
        rank.role.submit(StepPlan([load(2, "a")], []))
        assert not rank.client.sent
        assert rank.role.collect().failed == {"a"}

    def test_pages_of_old_sessions_are_closed(self, rank: Rank) -> None:
        pages: list[WorkerFence] = []
        for job_id in range(2, 8):
            session = rank.client.session
            assert session is not None
            assert isinstance(session.context, WorkerFence)
            pages.append(session.context)
            rank.role.submit(StepPlan([], [store(job_id)]))
            rank.attach()
            rank.role.collect()
        assert all(page.fd == -1 for page in pages)

    def test_closing_gives_the_memory_back(self) -> None:
        rank = Rank()
        rank.close()
        assert rank.client.closed
        assert rank.memory.fd == -1
