"""`KVLakeTier` below vLLM's own host tier, on a real sidecar: vLLM's manager of tiers moves chunks
through it as it does in an engine. Two managers are two engines."""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    ScheduleEndContext,
    TierFilter,
    TierMatcher,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from connector.offloading.keys import row_namespace_of
from connector.offloading.workarounds import guard_tiers
from tests.connector.offloading_node import (
    CHUNKS,
    CONFIG,
    ROW_BYTES,
    Node,
    config_of,
    content,
    node,
    sidecar,
    words,
)
from tests.e2e.settling import empty_host_tier
from tests.harness.sidecars import SidecarProcess

__all__ = ["sidecar"]

pytestmark = pytest.mark.usefixtures("warm_sidecars")


@pytest.mark.promise("offloading-tier")
def test_what_one_engine_stored_another_finds(sidecar: SidecarProcess) -> None:
    prompt = words(9)
    with node(sidecar) as first, node(sidecar) as second:
        first.store("a", prompt)
        first.settle()
        assert second.find("b", prompt) == 9
        # Another end: what both begin with.
        assert second.find("c", [*prompt[:4], "other", *prompt[5:]]) == 4
        assert second.find("d", words(3)) == 0


def test_longer_than_vllms_own_tier(sidecar: SidecarProcess) -> None:
    """A hit is limited by the room in vLLM's tier, and a store is not."""
    head, tail = words(CHUNKS - 4), words(CHUNKS - 4)
    with node(sidecar) as first:
        first.store("a", head)
        first.settle()
        first.store("b", tail)
        first.settle()
        # Evicted from vLLM's tier by the second one.
        assert first.find("c", head) == len(head)
        assert first.find("d", tail) == len(tail)


@pytest.mark.promise("offloading-long-prompt")
def test_a_prompt_that_vllms_own_tier_has_no_room_for(sidecar: SidecarProcess) -> None:
    """Its head is a hit: each further chunk would evict another one of them."""
    prompt = words(CHUNKS + 10)
    with node(sidecar) as first:
        for name, end in (("a", CHUNKS - 4), ("b", len(prompt))):
            context, keys = first.request(name, prompt)
            missing = keys[end - (CHUNKS - 4) : end]
            prepared = first.manager.prepare_store(missing, context)
            for key, row in zip(prepared.keys_to_store, prepared.store_spec.block_ids, strict=True):
                first.rows[row] = content(key)
            first.manager.complete_store(set(prepared.keys_to_store), context)
            first.manager.on_request_finished(context)
            first.settle()
        assert 0 < first.find("c", prompt) <= CHUNKS
        # Others are not concerned.
        assert first.find("d", prompt[:10]) == 10


def test_carried_chunks_evict_none_of_the_same_prompt(sidecar: SidecarProcess) -> None:
    """The oldest chunks of a full tier belong to a prompt of which a part is missing."""
    missing = 2
    prompt = words(CHUNKS - 4)
    with node(sidecar) as first:
        guard_tiers(first.manager, preempted_are_new=False)
        first.store("a", prompt)
        first.settle()
        first.store("b", words(4 + missing))
        first.settle()
        context, keys = first.request("c", prompt)
        looks: list[list[LookupResult]] = []

        def found() -> bool:
            looks.append([first.manager.lookup(key, context) for key in keys])
            return set(looks[-1]) == {LookupResult.HIT}

        first.until(found)
        assert looks[0].count(LookupResult.HIT) == len(prompt) - missing
        held = {number for number, one in enumerate(looks[0]) if one is LookupResult.HIT}
        for look in looks:
            assert all(look[number] is LookupResult.HIT for number in held)


@pytest.mark.promise("offloading-long-prompt")
def test_chunks_evicted_before_their_load_are_carried_again(
    sidecar: SidecarProcess,
) -> None:
    prompt = words(5)
    with node(sidecar) as first:
        first.store("a", prompt)
        first.settle()
        context, keys = first.request("b", prompt)

        def found() -> bool:
            return all(first.manager.lookup(key, context) is LookupResult.HIT for key in keys)

        for _ in range(2):
            empty_host_tier(first.manager.primary_tier)
            assert not found()
            first.until(found)
        first.manager.on_request_finished(context)


def test_other_engines_share_nothing(sidecar: SidecarProcess) -> None:
    prompt = words(3)
    with (
        node(sidecar) as first,
        node(sidecar, tier={"namespace": "other weights"}) as second,
        node(sidecar, parallel={"tp_size": 2}) as third,
    ):
        first.store("a", prompt)
        first.settle()
        assert second.find("b", prompt) == 0
        assert third.find("c", prompt) == 0
        assert first.find("d", prompt) == 3


@pytest.mark.promise("offloading-canonical")
def test_canonical_pages_are_shared_by_any_number_of_ranks() -> None:
    one = config_of("", canonical_layout=True, parallel={"tp_size": 1})
    two = config_of("", canonical_layout=True, parallel={"tp_size": 2})
    assert row_namespace_of(one, "n", ROW_BYTES) == row_namespace_of(two, "n", ROW_BYTES)
    direct = config_of("", parallel={"tp_size": 1})
    assert row_namespace_of(direct, "n", ROW_BYTES) != row_namespace_of(one, "n", ROW_BYTES)
    assert isinstance(json.loads(row_namespace_of(one, {"a": 1}, ROW_BYTES)), dict)


@pytest.mark.promise("streaming-input")
def test_a_request_that_continued_is_not_stored(sidecar: SidecarProcess) -> None:
    """vLLM mixes up its blocks then; only vLLM's own host tier has them."""
    prompt = words(3)
    with node(sidecar) as first, node(sidecar) as second:
        context, keys = first.request("a", prompt)
        for _ in range(2):
            first.manager.on_schedule_end(ScheduleEndContext(["a"], ()))
        prepared = first.manager.prepare_store(keys, context)
        first.manager.complete_store(set(prepared.keys_to_store), context)
        first.manager.on_request_finished(context)
        first.settle()
        assert second.find("b", prompt) == 0
        # One of that name that ran before says nothing of the next.
        other = words(3)
        first.store("a", other)
        first.settle()
        assert second.find("c", other) == 3


@pytest.mark.promise("offloading-params")
def test_a_request_may_turn_the_cache_off(sidecar: SidecarProcess) -> None:
    prompt, secret = words(3), words(3)
    with node(sidecar) as first, node(sidecar) as second:
        first.store("a", prompt)
        first.store("b", secret, kv_transfer_params={"kvlake": {"write": False}})
        first.settle()
        assert second.find("c", prompt, kv_transfer_params={"kvlake": {"read": False}}) == 0
        storage = TierFilter((TierMatcher(Medium.STORAGE, None),))
        assert second.find("d", prompt, load_tier_filter=storage) == 0
        assert second.find("e", prompt) == 3
        assert second.find("f", secret) == 0


@pytest.mark.promise("offloading-params")
def test_chunks_with_a_ttl_are_forgotten(sidecar: SidecarProcess) -> None:
    prompt, kept = words(3), words(3)
    expired = sidecar.status()["counters"]["chunks_expired"]
    with node(sidecar) as first:
        first.store("a", prompt, kv_transfer_params={"kvlake": {"ttl_seconds": 1}})
        first.store("b", kept, kv_transfer_params={"kvlake": {"ttl_seconds": 3600}})
        first.settle()
    sidecar.wait(
        "it is forgotten", lambda status: status["counters"]["chunks_expired"] == expired + 3
    )
    with node(sidecar) as second:
        assert second.find("c", prompt) == 0
        assert second.find("d", kept) == 3


@pytest.mark.promise("offloading-params")
def test_params_that_a_tier_does_not_support_are_logged(
    sidecar: SidecarProcess, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = words(3)
    with node(sidecar) as first, node(sidecar) as second:
        for name, told in (("a", prompt), ("b", words(3))):
            first.store(name, told, kv_transfer_params={"kvlake": {"hand_over": True}})
        first.settle()
        assert caplog.text.count("hand_over is ignored") == 1
        expecting = {"kvlake": {"expect_tokens": 48, "pin_seconds": 60}}
        assert second.find("c", prompt, kv_transfer_params=expecting) == 3
    assert "expect_tokens, pin_seconds is ignored" in caplog.text


def test_reset_forgets(sidecar: SidecarProcess) -> None:
    """This engine finds nothing from before, and running requests are not stored."""
    prompt = words(3)
    with node(sidecar) as first, node(sidecar) as second:
        first.store("a", prompt)
        context, keys = first.request("b", [*prompt, "more"])
        first.manager.on_schedule_end(ScheduleEndContext(["b"], ()))
        first.reset()
        assert first.find("c", prompt) == 0
        prepared = first.manager.prepare_store(keys, context)
        first.manager.complete_store(set(prepared.keys_to_store), context)
        first.manager.on_request_finished(context)
        first.settle()
        first.store("d", words(CHUNKS))
        first.settle()
        assert first.find("e", prompt) == 0
        first.store("f", prompt)
        first.settle()
        first.store("g", words(CHUNKS))
        first.settle()
        assert first.find("h", prompt) == 3
        assert second.find("i", [*prompt, "more"]) in (0, 3)


def test_events_of_our_tier(sidecar: SidecarProcess) -> None:
    prompt = words(3)
    with node(sidecar) as first:
        _, keys = first.request("names", prompt)
        first.store("a", prompt)
        first.settle()
        events: list[OffloadingEvent] = []

        def told() -> bool:
            events.extend(event for event in first.manager.take_events() if event.ownership)
            return len(events) >= 3

        first.until(told)
        assert {event.keys[0] for event in events} == set(keys)
        assert {(event.medium, event.removed) for event in events} == {(Medium.CPU, False)}
        assert all(str(event.ownership).startswith("kvlake/") for event in events)


@pytest.mark.slow
@pytest.mark.promise("offloading-tier")
def test_a_sidecar_that_hangs_dies_and_comes_back(tmp_path: Path) -> None:
    prompt, other = words(4), words(4)
    hasty = CONFIG | {
        # Sooner than a stopped sidecar goes on, later than a busy machine needs.
        "limits": {"load_deadline": "5s", "store_deadline": "5s", "lease_ttl": "10s"}
    }
    with SidecarProcess(tmp_path / "s", hasty) as sidecar, node(sidecar) as first:
        first.store("a", prompt)
        first.settle()
        first.store("b", words(CHUNKS))
        first.settle()
        assert sidecar.process is not None
        sidecar.process.send_signal(signal.SIGSTOP)
        # Said to be there, and not to be had: a miss when its time is over.
        assert first.find("c", prompt) == 0
        first.store("d", other)
        first.settle()
        sidecar.process.send_signal(signal.SIGCONT)
        first.until(lambda: first.find(secrets.token_hex(4), prompt) == 4)
        sidecar.kill()
        first.until(lambda: first.tier.client.session is None)
        first.store("e", words(CHUNKS))
        first.settle()
        assert first.find("f", prompt) == 0
        with SidecarProcess(tmp_path / "s", hasty):
            first.until(lambda: first.tier.client.session is not None)
            first.store("g", prompt)
            first.settle()
            assert first.find("h", prompt) == 4


def with_store(folder: Path) -> dict[str, Any]:
    """The configuration, with a new folder as the object store."""
    place = folder / "store"
    place.mkdir()
    store = {"url": f"file://{place}", "refresh_seconds": "200ms", "recompute": "never"}
    return CONFIG | {"store": store}


@contextmanager
def stored_elsewhere(folder: Path, prompt: list[str]) -> Generator[tuple[SidecarProcess, Node]]:
    """A node whose sidecar finds the chunks of a prompt in the object store alone."""
    config = with_store(folder)
    with SidecarProcess(folder / "s", config) as sidecar, node(sidecar) as first:
        first.store("a", prompt)
        first.settle()
        assert sidecar.drain() == 0
    with SidecarProcess(folder / "s", config) as sidecar, node(sidecar) as second:
        sidecar.wait("the store is listed", lambda status: status["tiers"]["store"]["chunks"] >= 5)
        yield sidecar, second


@pytest.mark.promise("offloading-tier")
def test_from_the_object_store(tmp_path: Path) -> None:
    prompt = words(5)
    with stored_elsewhere(tmp_path, prompt) as (sidecar, second):
        only_host = TierFilter((TierMatcher(Medium.CPU, None),))
        assert second.find("b", prompt, load_tier_filter=only_host) == 0
        assert second.find("c", prompt) == 5
        assert sidecar.status()["counters"]["chunks_read"] == 5
        sidecar.wait("nothing is pinned", lambda status: not status["leases"])


def test_lookups_of_a_request_that_runs_pin_nothing(tmp_path: Path) -> None:
    prompt = words(5)
    with stored_elsewhere(tmp_path, prompt) as (sidecar, second):
        context, keys = second.request("b", prompt)
        second.until(
            lambda: all(second.manager.lookup(key, context) is LookupResult.HIT for key in keys)
        )
        assert sidecar.status()["waiting"]["lookups"]["used"] > 0
        second.manager.on_schedule_end(ScheduleEndContext(["b"], ()))
        sidecar.wait("it ends", lambda status: not status["waiting"]["lookups"]["used"])
        assert sidecar.status()["counters"]["leases_expired"] == 0
        second.manager.on_request_finished(context)


@pytest.mark.promise("offloading-params")
def test_a_request_may_leave_out_the_object_store(tmp_path: Path) -> None:
    """For writing and for reading."""
    kept, written = words(3), words(4)
    config = with_store(tmp_path)
    only_host = {"kvlake": {"read": "host", "write": "host"}}
    with SidecarProcess(tmp_path / "s", config) as sidecar, node(sidecar) as first:
        first.store("a", kept, kv_transfer_params=only_host)
        first.store("b", written)
        first.settle()
        with node(sidecar) as second:
            assert second.find("c", kept, kv_transfer_params=only_host) == 3
        assert sidecar.drain() == 0
    with SidecarProcess(tmp_path / "s", config) as sidecar, node(sidecar) as third:
        sidecar.wait("the store is listed", lambda status: status["tiers"]["store"]["chunks"] >= 4)
        assert third.find("d", written, kv_transfer_params=only_host) == 0
        assert sidecar.status()["counters"]["chunks_read"] == 0
        assert third.find("e", kept) == 0
        assert third.find("f", written) == 4


def test_from_the_object_store_alone(tmp_path: Path) -> None:
    """A chunk is read once for a request, and is in host memory from then on."""
    prompt = words(5)
    config = with_store(tmp_path)
    storage = TierFilter((TierMatcher(Medium.STORAGE, None),))
    with SidecarProcess(tmp_path / "s", config) as sidecar, node(sidecar) as first:
        first.store("a", prompt)
        first.settle()
        sidecar.wait("all is written", lambda status: status["tiers"]["store"]["chunks"] >= 5)
        with node(sidecar) as second:
            # In both tiers.
            assert second.find("b", prompt, load_tier_filter=storage) == 5
        assert sidecar.drain() == 0
    with SidecarProcess(tmp_path / "s", config) as sidecar, node(sidecar) as third:
        sidecar.wait("the store is listed", lambda status: status["tiers"]["store"]["chunks"] >= 5)
        assert third.find("c", prompt, load_tier_filter=storage) == 5
        assert sidecar.status()["counters"]["chunks_read"] == 5
        sidecar.wait("nothing is pinned", lambda status: not status["leases"])


def test_a_tier_needs_a_namespace() -> None:
    spec = TieringOffloadingSpec(config_of("/nowhere", tier={"namespace": ""}))
    with pytest.raises(ValueError, match="namespace"):
        spec.get_manager()


def test_without_a_sidecar_the_engine_serves() -> None:
    prompt = words(3)
    spare = Node("/nowhere/attach.sock", tier={"attach_seconds": 0})
    try:
        spare.store("a", prompt)
        spare.settle()
        # From vLLM's own tier.
        assert spare.find("b", prompt) == 3
        assert spare.find("c", words(3)) == 0
    finally:
        spare.close()
