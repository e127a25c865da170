"""The scheduler role in vLLM's own scheduler: preemption, reset and events."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sidecar.protocol import (
    Events,
    RemovedEvent,
    StoredEvent,
)
from tests.connector.configurations import (
    request_of,
)
from tests.connector.engine import Engine
from tests.connector.prompts import (
    CACHED,
    PROMPT,
    seen,
)


class TestPreemption:
    def test_a_preempted_request_finds_its_own_chunks(self, make: Callable[..., Engine]) -> None:
        # Two requests that do not fit together once they generate.
        engine = make(num_blocks=42)
        prompts = [PROMPT, [number + 1 for number in PROMPT]]
        requests = [
            engine.add(request_of(f"r{i}", prompt, max_tokens=60))
            for i, prompt in enumerate(prompts)
        ]
        engine.finish(*requests)
        engine.settle()
        assert sum(request.num_preemptions for request in requests) > 0
        assert [len(request.output_token_ids) for request in requests] == [60, 60]
        engine.check_idle()

    def test_held_blocks_outlive_it(self, engine: Engine) -> None:
        request = engine.add(request_of("a", PROMPT, max_tokens=20))
        engine.step()
        assert engine.role.stores.jobs
        engine.scheduler.running.remove(request)
        engine.scheduler._preempt_request(request, 0.0)  # noqa: SLF001 (of vLLM)
        # Its stores were computed before; their blocks stay until they are copied.
        chunk_blocks = sum(len(ids) for copy in engine.sidecar.copies for _, ids in copy.store)
        assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1 - chunk_blocks
        engine.finish(request)
        engine.settle()
        engine.check_idle()


class TestReset:
    def test_nothing_from_before_is_found(self, engine: Engine) -> None:
        seen(engine)
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.weights += 1
        engine.run(request_of("a", PROMPT, max_tokens=1))
        assert engine.computed["a"] == len(PROMPT)
        engine.forget()
        # What is computed from now on, is.
        engine.run(request_of("b", PROMPT, max_tokens=1))
        assert engine.computed["b"] == len(PROMPT) - CACHED

    @pytest.mark.promise("reset")
    def test_with_stores_under_way(self, engine: Engine) -> None:
        """As the page on weights says: vLLM raises before it comes to the connector."""
        request = engine.add(request_of("a", PROMPT, max_tokens=60))
        engine.step()
        generation = engine.role.requests.generation
        with pytest.raises(RuntimeError, match="Failed to reset"):
            engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        assert engine.role.requests.generation == generation
        assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
        assert engine.role.requests.generation != generation
        engine.sidecar.run_all()
        before = set(engine.sidecar.parts)
        engine.step()
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.weights += 1
        engine.finish(request)
        engine.settle()
        assert set(engine.sidecar.parts) == before
        engine.check_idle()

    def test_requests_between_two_resets_may_begin_with_stale_blocks(self, engine: Engine) -> None:
        engine.garbled = True
        first = engine.add(request_of("a", PROMPT, max_tokens=60))
        engine.step()
        engine.weights += 1
        assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
        engine.sidecar.run_all()
        between = engine.add(request_of("b", PROMPT, max_tokens=1))
        fresh = engine.add(request_of("c", [7] * 200, max_tokens=1))
        engine.finish(between, fresh)
        assert engine.computed["b"] < len(PROMPT), "vLLM's own cache has what is of before"
        engine.sidecar.run_all()
        engine.step()
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.finish(first)
        engine.settle()
        engine.forget()
        engine.run(request_of("d", PROMPT, max_tokens=1))
        engine.run(request_of("e", [7] * 200, max_tokens=1))
        assert engine.computed["d"] == len(PROMPT)
        assert engine.computed["e"] < 200
        engine.forget()
        # What is computed from then on is cached, hits of vLLM's own cache included.
        engine.run(request_of("f", PROMPT, max_tokens=1))
        assert engine.computed["f"] == len(PROMPT) - CACHED
        longer = [*PROMPT, *[5] * 100]
        engine.run(request_of("g", longer, max_tokens=1))
        engine.forget()
        engine.run(request_of("h", longer, max_tokens=1))
        assert engine.computed["h"] < 50
        engine.check_idle()

    def test_a_request_from_before_a_reset_is_no_sign_of_another_connector(
        self, engine: Engine
    ) -> None:
        """It goes on from vLLM's own cache, which is no sign of somebody else's load."""
        request = engine.add(request_of("a", PROMPT, max_tokens=60))
        engine.step()
        assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
        engine.scheduler.running.remove(request)
        engine.scheduler._preempt_request(request, 0.0)  # noqa: SLF001 (of vLLM)
        engine.finish(request)
        assert engine.computed["a"] < 2 * len(PROMPT)
        assert not engine.role.planner.others_load

    def test_a_request_from_before_a_reset_stores_nothing_more(self, engine: Engine) -> None:
        request = engine.add(request_of("a", PROMPT, max_tokens=60))
        engine.step()
        engine.sidecar.run_all()
        engine.step()
        before = set(engine.sidecar.parts)
        assert engine.scheduler.reset_prefix_cache(
            reset_running_requests=True, reset_connector=True
        )
        engine.weights += 1
        engine.finish(request)
        engine.settle()
        assert set(engine.sidecar.parts) == before
        engine.check_idle()


class TestEvents:
    def test_they_are_taken_once(self, engine: Engine) -> None:
        session = engine.client.session
        assert session is not None
        stored = StoredEvent(b"k" * 32, bytes(32), 64, "host")
        engine.client.inbox.append(Events(session.epoch, [stored], []))
        engine.step()
        assert engine.role.take_events() == [stored]
        assert engine.role.take_events() == []

    @pytest.mark.promise("events-vllm-stream")
    def test_vllms_events(self, engine: Engine) -> None:
        engine.connector._wants_events = True  # noqa: SLF001 (its public names are vLLM's)
        session = engine.client.session
        assert session is not None
        events = [
            StoredEvent(b"a" * 32, bytes(32), 64, "host"),
            StoredEvent(b"b" * 32, b"a" * 32, 16, "store"),
        ]
        engine.client.inbox.append(Events(session.epoch, events, []))
        engine.role.build_plan({}, lambda _: [])
        first, second = list(engine.connector.take_events())
        assert (first.parent_block_hash, first.block_size) == (None, 64)
        assert (second.parent_block_hash, second.medium) == (b"a" * 16, "STORAGE")
        assert (second.locality, first.locality) == ("REMOTE", "LOCAL")
        removed = [RemovedEvent(b"a" * 32, "host")]
        engine.client.inbox.append(Events(session.epoch, [], removed))
        engine.role.build_plan({}, lambda _: [])
        (gone,) = engine.connector.take_events()
        assert gone.block_hashes == [b"a" * 16]
        assert {one.ownership for one in (first, second, gone)} == {
            engine.connector._engine.owner(0)  # noqa: SLF001 (its public names are vLLM's)
        }

    @pytest.mark.promise("events-hits")
    def test_hits_are_announced_once_a_request_asks_for_them(self, engine: Engine) -> None:
        engine.connector._wants_events = True  # noqa: SLF001 (its public names are vLLM's)
        for number, mode in enumerate(("incremental", "full", "incremental", "full")):
            request = request_of(f"r{number}", PROMPT, max_tokens=1)
            request.kv_cache_report_mode = mode
            engine.add(request)
            told = list(engine.connector.take_events())
            assert [event.ownership for event in told] == ["kvlake/hits"] * (mode == "full")
            assert not list(engine.connector.take_events())
            engine.finish(request)

    @pytest.mark.parametrize("reset_connector", [False, True])
    def test_blocks_are_published_again_after_a_reset_of_vllms_cache(
        self, engine: Engine, *, reset_connector: bool
    ) -> None:
        engine.connector._wants_events = True  # noqa: SLF001 (its public names are vLLM's)
        session = engine.client.session
        assert session is not None
        names = [name * 32 for name in (b"a", b"b", b"c")]
        stored = [StoredEvent(name, bytes(32), 64, "host") for name in names]
        engine.client.inbox.append(Events(session.epoch, stored, []))
        engine.role.build_plan({}, lambda _: [])
        assert len(list(engine.connector.take_events())) == 3
        # One goes and one comes in the step that tells of the reset.
        new = StoredEvent(b"d" * 32, bytes(32), 64, "host")
        gone = RemovedEvent(names[0], "host")
        engine.client.inbox.append(Events(session.epoch, [new], [gone]))
        engine.role.build_plan({}, lambda _: [])
        assert engine.scheduler.reset_prefix_cache(reset_connector=reset_connector)
        assert engine.role.take_events() == [*stored[1:], new]
        assert engine.role.take_events() == []
        # And all of them can still go.
        engine.client.inbox.append(Events(session.epoch, [], [RemovedEvent(names[1], "host")]))
        engine.role.build_plan({}, lambda _: [])
        assert engine.role.take_events() == [RemovedEvent(names[1], "host")]

    def test_a_chunk_that_was_evicted_and_stored_again_is_there(self, engine: Engine) -> None:
        engine.connector._wants_events = True  # noqa: SLF001 (its public names are vLLM's)
        session = engine.client.session
        assert session is not None
        stored = StoredEvent(b"a" * 32, bytes(32), 64, "host")
        engine.client.inbox.append(Events(session.epoch, [stored], []))
        engine.role.build_plan({}, lambda _: [])
        held = {name for event in engine.connector.take_events() for name in event.block_hashes}
        # Evicted and stored again before the engine's next step.
        engine.client.inbox += [
            Events(session.epoch, [], [RemovedEvent(b"a" * 32, "host")]),
            Events(session.epoch, [stored], []),
        ]
        engine.role.build_plan({}, lambda _: [])
        for event in engine.connector.take_events():
            names = set(event.block_hashes)
            held = held - names if "Removed" in type(event).__name__ else held | names
        assert held == {b"a" * 16}

    def test_the_end_of_a_session_removes_its_blocks(self, engine: Engine) -> None:
        session = engine.client.session
        assert session is not None
        stored = StoredEvent(b"a" * 32, bytes(32), 64, "host")
        engine.client.inbox.append(Events(session.epoch, [stored], []))
        engine.role.build_plan({}, lambda _: [])
        assert engine.role.take_events() == [stored]
        engine.client.attach(None)
        engine.role.build_plan({}, lambda _: [])
        assert engine.role.take_events() == [RemovedEvent(b"a" * 32, "host")]
        assert engine.role.take_events() == []
