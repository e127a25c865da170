"""What a request's use of its chunks changes, and how a policy refuses new ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sidecar.core.commands import Gather, Write
from sidecar.core.outbox import WritePolicy
from sidecar.core.retention import USES_MAX, read_tag
from sidecar.core.tenants import Quota, TenantRules, Tenants
from sidecar.protocol import Outcome, Role
from tests.sidecar.engine_answers import done, messages, only
from tests.sidecar.engine_names import (
    GROUP_NUMBERS,
    key,
    layout,
    slot_bytes_of,
)
from tests.sidecar.strict_pool import StrictLRU
from tests.sidecar.worlds import looking, make_world, no_writes
from tiers.policy.density import DensityPolicy
from tiers.policy.lru import LruPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.sidecar.engine_world import World
    from tiers.policy import Policy
    from tiers.policy.key import CacheKey

TENANT = b"a tenant"


class RecordingLRU(StrictLRU):
    """Remembers the uses that it hears of."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[list[CacheKey], int]] = []

    def use(self, keys: Sequence[CacheKey], num_tokens: int) -> None:
        self.heard.append((list(keys), num_tokens))
        super().use(keys, num_tokens)


def made(**options: Any) -> tuple[World, int, int]:
    given: dict[str, Any] = {"write": WritePolicy.OFF, **options}
    world = make_world(policy=RecordingLRU(), **given)
    return world, world.open(Role.WORKER), world.open(Role.SCHEDULER)


def heard(world: World) -> list[tuple[list[CacheKey], int]]:
    assert isinstance(world.policy, RecordingLRU)
    return world.policy.heard


def refuse(world: World, *numbers: int) -> None:
    assert isinstance(world.policy, StrictLRU)
    world.policy.refused.update((0, key(number)) for number in numbers)


def tag_of(world: World, number: int) -> bytes:
    chunk = world.engine.directory.realms[0].chunks[key(number)]
    return world.slots.tags.get(chunk.segments[0].slot, bytes(16))


# --- uses --------------------------------------------------------------------------------------


def test_a_policy_hears_of_a_request_once_with_all_of_its_chunks() -> None:
    world, worker, scheduler = made()
    world.use(scheduler, [1, 2, 3], 24)
    world.stored(worker, 1, [1, 2])
    world.look_up(scheduler, 1, [1, 2])
    world.lease(scheduler, 2, [1, 2])
    world.load(worker, 2, [1, 2])
    world.store(worker, 3, [1])
    assert heard(world) == [([(0, key(number)) for number in (1, 2, 3)], 24)]


def test_a_policy_hears_of_each_group_under_its_own_realm() -> None:
    world = make_world(policy=RecordingLRU(), write=WritePolicy.OFF)
    scheduler = world.open(Role.SCHEDULER, other_realms=(1,))
    window = GROUP_NUMBERS + 1
    world.use(scheduler, [1, window], 8)
    assert heard(world) == [([(0, key(1)), (1, key(window))], 8)]


def test_uses_are_counted_from_when_a_chunk_comes() -> None:
    world, worker, scheduler = made()
    world.use(scheduler, [1])
    world.stored(worker, 1, [1])
    assert read_tag(tag_of(world, 1))[2] == 0
    for count in range(1, USES_MAX + 3):
        world.use(scheduler, [1])
        assert read_tag(tag_of(world, 1))[2] == min(count, USES_MAX)


def test_uses_and_retention_survive_a_restart() -> None:
    world, worker, scheduler = made()
    world.stored(worker, 1, [1, 2], tenant=TENANT, ttl_seconds=100.0)
    world.use(scheduler, [1])
    world.use(scheduler, [1, 2])
    expires_at = world.engine.directory.realms[0].chunks[key(1)].retention.expires_at
    world.restart(RecordingLRU())
    world.open(Role.WORKER)
    chunks = world.engine.directory.realms[0].chunks
    assert [chunks[key(number)].uses for number in (1, 2)] == [2, 1]
    assert chunks[key(1)].tenant == TENANT
    assert abs(chunks[key(1)].retention.expires_at - expires_at) < 0.01


def test_a_tenant_with_a_limit_evicts_what_its_requests_used_longest_ago() -> None:
    limit = Quota(host_bytes_max=2 * slot_bytes_of(layout(0)))
    tenants = Tenants(TenantRules(named={TENANT: ("named", limit)}))
    world, worker, scheduler = made(tenants=tenants)
    world.stored(worker, 1, [10, 20], tenant=TENANT)
    world.use(scheduler, [10])
    world.stored(worker, 2, [30], tenant=TENANT)
    assert world.in_host() == {(0, key(10)), (0, key(30))}


def test_a_use_of_a_chunk_that_a_session_keeps_changes_no_order() -> None:
    world, worker, scheduler = made()
    world.stored(worker, 1, [1])
    world.pin(scheduler, [1], 60.0)
    world.use(scheduler, [1])
    assert world.engine.directory.realms[0].chunks[key(1)].uses == 1


# --- refusal -----------------------------------------------------------------------------------


def full(write: WritePolicy, **options: Any) -> tuple[World, int, int]:
    """Two slots that hold chunks 1 and 2, and 5 is refused."""
    world, worker, scheduler = looking(slabs=2, slab_slots=1, write=write, **options)
    world.stored(worker, 1, [1])
    world.stored(worker, 2, [2])
    for write_id in list(world.writes):
        world.written(write_id)
    refuse(world, 5)
    return world, worker, scheduler


@pytest.mark.parametrize("write", [WritePolicy.OFF, WritePolicy.ON_REUSE])
def test_a_refused_chunk_is_not_copied(write: WritePolicy) -> None:
    world, worker, _ = full(write)
    commands = world.store(worker, 3, [5])
    assert only(commands, Gather) == []
    assert messages(commands, worker) == done(3, Outcome.OK)
    assert world.engine.counters.stores_refused == 1
    assert world.engine.counters.stores_dropped_full == 0
    assert world.in_host() == {(0, key(1)), (0, key(2))}


def test_a_refused_chunk_is_written_and_goes_first() -> None:
    world, worker, _ = full(WritePolicy.THROUGH)
    [gather] = only(world.store(worker, 3, [5]), Gather)
    [write] = only(world.copied(gather.copy_id), Write)
    assert write.key == key(5)
    world.written(write.write_id)
    assert world.in_host() == {(0, key(2)), (0, key(5))}
    world.stored(worker, 4, [7])
    assert world.in_host() == {(0, key(2)), (0, key(7))}
    assert world.engine.counters.stores_refused == 0


def filled(write: WritePolicy, slabs: int, **options: Any) -> tuple[World, int, int]:
    """All slots hold odd numbers from 1 on, which are written."""
    world, worker, scheduler = looking(slabs=slabs, write=write, writes_inflight_max=1, **options)
    for number in range(1, 2 * slabs, 2):
        world.stored(worker, number, [number])
        for write_id in list(world.writes):
            world.written(write_id)
    return world, worker, scheduler


def test_refused_chunks_stay_until_they_are_written() -> None:
    world, worker, _ = filled(WritePolicy.THROUGH, 24)
    refuse(world, 101, 103, 105)
    # One is being written, the others are queued.
    for number in (101, 103, 105, 111, 113):
        world.stored(worker, number, [number])
    assert {(0, key(number)) for number in (101, 103, 105, 111, 113)} <= world.in_host()
    for _ in range(5):
        [write_id] = world.writes
        world.written(write_id)
    assert world.engine.counters.chunks_written == 24 + 5
    assert world.engine.counters.writes_dropped == 0
    # Now they go first.
    for number in (121, 123, 125):
        world.stored(worker, number, [number])
    assert not {(0, key(number)) for number in (101, 103, 105)} & world.in_host()
    assert (0, key(13)) in world.in_host()


def test_refused_chunks_take_an_eighth_of_memory_at_most() -> None:
    world, worker, _ = filled(WritePolicy.THROUGH, 16)
    refused = range(101, 121, 2)
    refuse(world, *refused)
    for number in refused:
        world.stored(worker, number, [number])
    kept = {number for number in refused if (0, key(number)) in world.in_host()}
    assert kept == {101, 103, 119}, "one is being written, one is queued, and one goes next"
    assert world.engine.counters.writes_dropped == len(refused) - len(kept)
    assert len(world.in_host()) == 16


def test_a_refused_chunk_is_written_at_once_on_evict() -> None:
    world, worker, _ = filled(WritePolicy.ON_EVICT, 512)
    world.settle()
    refuse(world, *range(2001, 2021, 2))
    for number in range(2001, 2021, 2):
        world.stored(worker, number, [number])
        world.settle()
        assert (0, key(number)) in {name for name, (_, stored) in world.index.items() if stored}


def test_a_refused_chunk_without_its_other_rank_makes_room_after_a_minute() -> None:
    world = make_world(slabs=16, write=WritePolicy.THROUGH, writes_inflight_max=1)
    worker = world.open(Role.WORKER, rank=0, world_size=2)
    world.open(Role.WORKER, rank=1, world_size=2)
    for number in range(1, 32, 2):
        world.stored(worker, number, [number])
    refuse(world, 101, 103)
    world.stored(worker, 101, [101])
    unwritten = world.engine.host.orders.unwritten
    assert [one.key for one in unwritten] == [key(101)]
    world.now += 61
    world.stored(worker, 103, [103])
    assert [one.key for one in unwritten] == [key(103)]
    assert {(0, key(101)), (0, key(103))} <= world.host_ranks().keys()
    world.stored(worker, 111, [111])
    assert (0, key(101)) not in world.host_ranks()
    assert (0, key(103)) in world.host_ranks()


@pytest.mark.parametrize("limited", [False, True], ids=["the whole memory", "a tenant's part"])
@pytest.mark.parametrize("step", [4, 8])
def test_what_two_ranks_store_of_a_long_prompt_reaches_the_store(
    *, step: int, limited: bool
) -> None:
    """Much more than an eighth of the memory is refused at a time."""
    rules = TenantRules(Quota(32 * layout(0).payload_bytes(2))) if limited else TenantRules()
    world = make_world(slabs=64 if limited else 32, policy=LruPolicy(), tenants=Tenants(rules))
    ranks = [world.open(Role.WORKER, rank=rank, world_size=2) for rank in (0, 1)]
    for first in range(1, 33, step):
        for worker in ranks:
            world.stored(worker, first, range(first, first + step), tenant=TENANT)
        world.settle()
    assert len([name for name, (_, stored) in world.index.items() if stored]) == 32
    assert not world.engine.host.orders.unwritten


@pytest.mark.parametrize("step", [1, 2], ids=["a chain", "several prompts"])
@pytest.mark.parametrize("policy", [DensityPolicy, LruPolicy, StrictLRU])
def test_ranks_that_store_one_after_another_store_refused_chunks_whole(
    policy: type[Policy], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(slabs=128, policy=policy(), write=WritePolicy.THROUGH)
    ranks = [world.open(Role.WORKER, rank=rank, world_size=2) for rank in (0, 1)]
    for number in range(1, 128, 2):
        for worker in ranks:
            world.stored(worker, number, [number])
    world.settle()
    orders = world.engine.host.orders
    monkeypatch.setattr(world.policy, "admits", lambda *_: False)
    refused = range(1001, 1001 + 8 * step, step)
    for worker in ranks:
        world.stored(worker, 1001, refused)
    assert all(chunk.refused for chunk in orders.unwritten)
    world.settle()
    assert {(0, key(number)) for number in refused} <= {
        name for name, (_, stored) in world.index.items() if stored
    }
    assert not orders.unwritten


def test_refused_chunks_take_an_eighth_of_a_tenants_limit_at_most() -> None:
    """A store that is paused leaves it the rest."""
    rules = TenantRules(Quota(16 * layout(0).payload_bytes(2)))
    world = make_world(slabs=256, policy=LruPolicy(), tenants=Tenants(rules), writes_inflight_max=1)
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    world.use(scheduler, range(1, 41))
    for first in range(1, 41, 2):
        world.stored(worker, first, [first, first + 1], tenant=TENANT)
    held = {number for number in range(1, 41) if (0, key(number)) in world.in_host()}
    assert held >= set(range(1, 13))
    assert len(held) == 16
    world.use(scheduler, range(101, 201, 2))
    for number in range(101, 201, 2):
        world.stored(worker, number, [number], tenant=TENANT)
    assert {(0, key(number)) for number in range(181, 201, 2)} <= world.in_host()


def test_a_refusal_of_a_tenants_own_order_is_no_fault() -> None:
    rules = TenantRules(Quota(2 * layout(0).payload_bytes(2)))
    world = make_world(policy=LruPolicy(), tenants=Tenants(rules), write=WritePolicy.OFF)
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    world.use(scheduler, [1, 2, 3])
    world.stored(worker, 1, [1, 2], tenant=TENANT)
    commands = world.store(worker, 2, [3], tenant=TENANT)
    assert messages(commands, worker) == done(2, Outcome.OK)
    assert world.engine.counters.stores_refused == 1
    assert world.engine.counters.stores_dropped_quota == 0


@pytest.mark.parametrize(
    ("write", "steps"),
    [
        *((WritePolicy.OFF, steps) for steps in (1, 4, 8)),
        *((WritePolicy.THROUGH, steps) for steps in (4, 8)),
    ],
)
@pytest.mark.parametrize("limited", [False, True], ids=["the whole memory", "a tenant's part"])
def test_a_prompt_longer_than_memory_keeps_its_head(
    *, steps: int, write: WritePolicy, limited: bool
) -> None:
    rules = TenantRules(Quota(4 * layout(0).payload_bytes(2))) if limited else TenantRules()
    world = make_world(
        slabs=8 if limited else 4, policy=LruPolicy(), tenants=Tenants(rules), write=write
    )
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    prompt = range(1, 9)
    hits: list[int] = []
    for again in range(4):
        held = [number for number in prompt if (0, key(number)) in world.in_host()]
        hits.append(next((one - 1 for one in prompt if one not in held), len(prompt)))
        world.use(scheduler, prompt)
        for first in range(1, 9, 8 // steps):
            numbers = [one for one in range(first, first + 8 // steps) if one not in held]
            world.stored(worker, 10 * again + first, numbers, tenant=TENANT)
            world.settle()
    # What passes through to the store takes the places of as many chunks as a step has.
    through = 0 if write is WritePolicy.OFF else 8 // steps
    assert min(hits[1:]) >= 4 - through, hits
    world.check()


@pytest.mark.parametrize("at_once", [1, 2, 3])
@pytest.mark.parametrize("limited", [False, True], ids=["the whole memory", "a tenant's part"])
def test_requests_at_once_keep_the_head_of_their_long_prompt(
    *, at_once: int, limited: bool
) -> None:
    """The use of the second came while the first stored; its chunks took the places of the head."""
    rules = TenantRules(Quota(16 * layout(0).payload_bytes(2))) if limited else TenantRules()
    slabs = 32 if limited else 16
    world = no_writes(slabs=slabs, policy=LruPolicy(), tenants=Tenants(rules))
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    prompt = range(1, 33)
    for again in range(5):
        for begin in range(1, 33 + 20 * (at_once - 1), 2):
            # Each begins when the one before it has stored more than there is room for.
            for other in range(at_once):
                step = [n for n in (begin - 20 * other, begin - 20 * other + 1) if n in prompt]
                if 1 in step:
                    world.use(scheduler, prompt)
                step = [n for n in step if (0, key(n)) not in world.in_host()]
                world.stored(worker, 1000 * again + 10 * begin + other, step, tenant=TENANT)
        assert world.in_host() == {(0, key(number)) for number in range(1, 17)}


@pytest.mark.parametrize("write", [WritePolicy.OFF, WritePolicy.THROUGH, WritePolicy.ON_EVICT])
@pytest.mark.parametrize("limited", [False, True], ids=["the whole memory", "a tenant's part"])
def test_answers_keep_the_head_of_their_conversation(*, limited: bool, write: WritePolicy) -> None:
    """They are in no prompt before the next turn, and evicted each other."""
    rules = TenantRules(Quota(32 * layout(0).payload_bytes(2))) if limited else TenantRules()
    slabs = 64 if limited else 32
    world = make_world(slabs=slabs, policy=LruPolicy(), tenants=Tenants(rules), write=write)
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    hits: list[int] = []
    for turn in range(4):
        prompt = range(1, 10 + 20 * turn)
        held = world.in_host()
        hits.append(next((n - 1 for n in prompt if (0, key(n)) not in held), len(prompt)))
        world.use(scheduler, prompt)
        # Another request comes while this one answers.
        world.use(scheduler, [1001 + turn])
        for number in range(hits[-1] + 1, prompt.stop + 15):
            world.stored(worker, 100 * turn + number, [number], tenant=TENANT)
            world.settle()
    through = 0 if write is WritePolicy.OFF else 4
    assert min(hits[2:]) >= 32 - through, hits


@pytest.mark.parametrize("windows_first", [True, False])
@pytest.mark.parametrize(("make", "slots"), [(LruPolicy, 40), (LruPolicy, 50), (DensityPolicy, 50)])
@pytest.mark.parametrize("limited", [False, True], ids=["the whole memory", "a tenant's part"])
def test_a_prompt_that_fits_without_the_middle_of_its_windows_hits(
    make: type[Policy], slots: int, *, windows_first: bool, limited: bool
) -> None:
    """No request names that middle, and nothing needs it."""
    rules = TenantRules(Quota(slots * layout(0).payload_bytes(2))) if limited else TenantRules()
    slabs = 2 * slots if limited else slots
    world = no_writes(slabs=slabs, policy=make(), tenants=Tenants(rules))
    worker = world.open(Role.WORKER, other_realms=(1,))
    scheduler = world.open(Role.SCHEDULER, other_realms=(1,))
    prompt = range(1, 33)
    hits: list[int] = []
    for again in range(5):
        held = world.in_host()
        there = [(0, key(number)) in held for number in prompt]
        prefix = there.index(False) if False in there else len(prompt)
        ends = (n for n in range(prefix, 0, -1) if (1, key(GROUP_NUMBERS + n)) in held)
        hits.append(next(ends, 0))
        world.use(scheduler, [*prompt, GROUP_NUMBERS + prompt[-1]])
        for first in range(hits[-1] + 1, prompt.stop, 4):
            numbers = range(first, min(first + 4, prompt.stop))
            windows = [GROUP_NUMBERS + number for number in numbers]
            step = [*windows, *numbers] if windows_first else [*numbers, *windows]
            step = [n for n in step if (int(n >= GROUP_NUMBERS), key(n)) not in held]
            world.stored(worker, 100 * again + first, step, tenant=TENANT)
    assert hits[-2:] == [len(prompt)] * 2, hits


def test_a_refusal_gives_a_window_no_request() -> None:
    """With one, the windows of a shared beginning would keep their beginning from their end."""
    world = no_writes(slabs=2, policy=LruPolicy())
    worker = world.open(Role.WORKER, other_realms=(1,))
    scheduler = world.open(Role.SCHEDULER, other_realms=(1,))
    window = GROUP_NUMBERS + 1
    world.use(scheduler, [1, 2])
    world.stored(worker, 1, [1, 2])
    world.stored(worker, 2, [window])
    assert world.engine.counters.stores_refused == 1
    world.use(scheduler, [50])
    world.stored(worker, 3, [window])
    assert world.engine.directory.realms[1].chunks[key(window)].request == 0
    world.stored(worker, 4, [50])
    assert world.in_host() == {(1, key(window)), (0, key(50))}


def test_a_refused_chunk_that_may_not_be_written_is_not_copied() -> None:
    world, worker, _ = full(WritePolicy.THROUGH)
    assert only(world.store(worker, 3, [5], stays=True), Gather) == []


def test_while_there_is_room_nothing_is_refused() -> None:
    world, worker, _ = looking(slabs=2, slab_slots=1, write=WritePolicy.OFF)
    refuse(world, 5)
    world.stored(worker, 1, [5])
    assert world.in_host() == {(0, key(5))}


def test_a_chunk_that_a_request_reads_is_not_refused() -> None:
    world, _, scheduler = full(WritePolicy.OFF, store_reads=True)
    world.listed({5: frozenset({0})})
    world.look_up(scheduler, 1, [5], deadline_ms=60_000)
    assert world.reads, "a read is not asked about"


# --- the curve ---------------------------------------------------------------------------------


def test_hits_of_other_sizes_are_expected_once_there_were_as_many_uses_as_fit() -> None:
    world, worker, scheduler = made(slabs=4, slab_slots=1)
    assert world.engine.host.expected_hit_ratios() == {}
    world.use(scheduler, [10, 20])
    world.stored(worker, 1, [10, 20])
    assert world.engine.host.expected_hit_ratios() == {}
    for _ in range(40):
        world.use(scheduler, [10, 20])
    ratios = world.engine.host.expected_hit_ratios()
    assert list(ratios) == [0.5, 1.0, 2.0, 4.0]
    assert ratios[4.0] > 0.9
