"""Tenants: limits in host memory hold, and only at the cost of the tenant that has them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sidecar.cli import main
from sidecar.config.model import ConfigError, loads, show
from sidecar.core.commands import Gather, Read, StoreOutcome, Write
from sidecar.core.outbox import WritePolicy
from sidecar.core.tenants import Quota, TenantRules, Tenants
from sidecar.protocol import Lookup, Outcome, Release, Role, StoreJob, tenant_id
from tests.sidecar.client import RunningSidecar, Scheduler, Worker, config_in, key_of
from tests.sidecar.engine_answers import messages, only
from tests.sidecar.engine_names import RANK_0, key, layout
from tests.sidecar.engine_world import World
from tests.sidecar.worlds import make_world

SALT = "s3cret-of-team-a"
A, B = tenant_id(SALT), tenant_id("another")
SLOT = layout(0).payload_bytes(2)
TENANTS = 10_000
TENANTS_TOGETHER = 50


def world_of(**quotas: int | None) -> World:
    """Eight slots; tenant A is named, `a` is its limit in slots, `default` everybody's."""
    default = None if quotas.get("default") is None else SLOT * (quotas["default"] or 0)
    own = None if quotas.get("a") is None else SLOT * (quotas["a"] or 0)
    rules = TenantRules(Quota(default), {A: ("team-a", Quota(own if own is not None else default))})
    return make_world(tenants=Tenants(rules), write=WritePolicy.OFF)


def held(world: World, name: str) -> int:
    (one,) = [one for one in world.engine.tenants.snapshot() if one.name == name]
    return one.host_bytes // SLOT


class TestHostQuota:
    @pytest.mark.promise("tenant-limit")
    def test_a_tenant_at_its_limit_evicts_its_own_oldest(self) -> None:
        world = world_of(a=2)
        worker = world.open(Role.WORKER)
        world.stored(worker, 1, [50])
        for number in (1, 3, 5):
            world.stored(worker, 10 + number, [number], tenant=A)
        names = {number for number in (1, 3, 5, 50) if (0, key(number)) in world.in_host()}
        assert names == {50, 3, 5}
        assert held(world, "team-a") == 2
        assert held(world, "unsalted") == 1
        assert world.engine.counters.chunks_evicted == 1

    def test_of_a_prompt_with_a_gap_the_end_goes_first(self) -> None:
        """It cannot be loaded without what the gap lacks."""
        world = world_of(a=4)
        worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
        for number in (1, 2, 4, 5):
            world.stored(worker, number, [number], tenant=A)
        world.use(scheduler, range(1, 6))
        world.use(scheduler, [20])
        world.stored(worker, 20, [20], tenant=A)
        assert {number for number in range(1, 21) if (0, key(number)) in world.in_host()} == {
            *(1, 2, 4, 20)
        }

    @pytest.mark.promise("full-store")
    def test_what_still_does_not_fit_is_dropped_and_counted(self) -> None:
        world = world_of(a=1)
        worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
        world.stored(worker, 1, [1], tenant=A)
        world.lease(scheduler, 9, [1])
        commands = world.store(worker, 2, [3], tenant=A)
        assert not only(commands, Gather)
        (done,) = messages(commands, worker)
        assert [job.outcome for job in done.jobs] == [Outcome.FULL]  # type: ignore[union-attr]
        assert world.engine.counters.stores_dropped_quota == 1
        assert world.engine.counters.stores_dropped_full == 0
        assert (0, key(1)) in world.in_host(), "a pinned chunk went"

    def test_a_limit_below_one_slot_stores_nothing(self) -> None:
        world = make_world(tenants=Tenants(TenantRules(Quota(SLOT - 1))), write=WritePolicy.OFF)
        worker = world.open(Role.WORKER)
        assert not only(world.store(worker, 1, [1], tenant=A), Gather)
        assert not list(world.engine.tenants), "an account was left for nothing"

    def test_every_tenant_has_the_default_to_itself(self) -> None:
        world = world_of(default=2)
        worker = world.open(Role.WORKER)
        for number in range(1, 4):
            world.stored(worker, number, [number], tenant=B)
            world.stored(worker, 10 + number, [10 + number], tenant=A)
        assert held(world, "other") == 2
        assert held(world, "team-a") == 2

    def test_a_limit_is_no_reservation(self) -> None:
        world = world_of(a=4)
        worker = world.open(Role.WORKER)
        world.stored(worker, 1, [1, 2], tenant=A)
        for number in range(10, 18):
            world.stored(worker, number, [number])
        assert held(world, "team-a") == 0
        assert held(world, "unsalted") == 8

    def test_a_read_counts_like_a_store(self) -> None:
        world = world_of(a=1)
        world.open(Role.WORKER)
        scheduler = world.open(Role.SCHEDULER)
        world.listed({1: RANK_0, 2: RANK_0})
        reads = only(world.look_up(scheduler, 1, [1, 2], tenant=A), Read)
        assert [read.tenant for read in reads] == [A]
        assert world.engine.counters.reads_dropped_quota == 1
        (told,) = messages(world.read_done(reads[0].read_id), scheduler)
        assert (told.ready, told.outcome) == (1, Outcome.FULL)  # type: ignore[union-attr]

    def test_two_ranks_count_twice(self) -> None:
        world = world_of(a=2)
        workers = [world.open(Role.WORKER, rank=rank, world_size=2) for rank in (0, 1)]
        for job, number in enumerate((1, 3), 1):
            for worker in workers:
                world.stored(worker, job, [number], tenant=A)
        assert held(world, "team-a") == 2
        assert world.in_host() == {(0, key(3))}

    def test_unnamed_tenants_leave_nothing_behind(self) -> None:
        world = world_of()
        worker = world.open(Role.WORKER)
        for number in range(1, 200):
            world.stored(worker, number, [number], tenant=tenant_id(str(number)))
        assert len(list(world.engine.tenants)) == 8
        names = [one.name for one in world.engine.tenants.snapshot()]
        assert names == ["unsalted", "team-a", "other"]


class TestStoreQuota:
    def test_writes_are_asked_for_and_counted(self) -> None:
        asked: list[tuple[bytes, int, int]] = []

        def admit(realm_id: int, tenant: bytes, num_bytes: int, objects: int) -> bool:
            assert realm_id in world.engine.directory.realms
            asked.append((tenant, num_bytes, objects))
            return tenant != A

        world = make_world(admit_write=admit)
        worker = world.open(Role.WORKER)
        world.stored(worker, 1, [1], tenant=A)
        world.stored(worker, 2, [2], tenant=B)
        (write,) = world.writes.values()
        assert isinstance(write, Write)
        assert write.tenant == B
        assert asked == [(A, SLOT, 1), (B, SLOT, 1)]
        world.written(write.write_id, StoreOutcome.OK)
        assert world.engine.counters.writes_refused_quota == 1
        assert world.engine.tenants.counters(B).bytes_written == 100

    def test_what_waits_and_what_is_being_written_counts_already(self) -> None:
        asked: list[tuple[int, int]] = []

        def admit(realm_id: int, tenant: bytes, num_bytes: int, objects: int) -> bool:
            asked.append((num_bytes, objects))
            return objects <= 2

        world = make_world(admit_write=admit)
        worker = world.open(Role.WORKER)
        for number in (1, 2, 3):
            world.stored(worker, number, [number], tenant=A)
        assert asked == [(SLOT, 1), (2 * SLOT, 2), (3 * SLOT, 3)]
        assert world.engine.counters.writes_refused_quota == 1
        for write_id in list(world.writes):
            world.written(write_id, StoreOutcome.OK)
        for write_id in list(world.writes):
            world.written(write_id, StoreOutcome.OK)
        world.stored(worker, 4, [4], tenant=A)
        assert asked[-1] == (SLOT, 1)


class TestConfig:
    def test_names_limits_and_salts(self) -> None:
        text = f"""
tenants:
  default: {{host_max: 1GiB, store_ttl: 30d, store_objects_max: 1000}}
  named:
    team-a: {{salt: "${{SALT}}", host_max: 2GiB, store_ttl: 1d, store_max: 3GiB}}
    team-b: {{id: {B.hex()}}}
"""
        config = loads(text, environment={"SALT": SALT})
        rules = config.tenants.rules()
        day = 86_400.0
        assert rules.default == Quota(1 << 30, None, 1000, 30 * day)
        assert rules.named == {
            A: ("team-a", Quota(2 << 30, 3 << 30, 1000, day)),
            B: ("team-b", rules.default),
        }
        for told in (show(config), repr(config), str(config.tenants)):
            assert SALT not in told
        assert "***" in show(config)

    @pytest.mark.parametrize(
        ("named", "said"),
        [
            ("a: {}", "either salt or id"),
            (f"a: {{salt: {SALT}, id: 0123456789abcdef}}", "either salt or id"),
            (f"a: {{salt: {SALT}}}, b: {{salt: {SALT}}}", "the same tenant"),
            (f"other: {{salt: {SALT}}}", "cannot name a tenant"),
            (f"a: {{salt: [{SALT}]}}", "valid string"),
            (
                f"a: {{salt: {SALT}, host: 1}}",
                "takes host_max, id, salt, store_max, store_objects_max, store_ttl",
            ),
            ("a: {id: 123}", "id"),
            (f"a: {{salt: {SALT}, store_ttl: 10ms}}", "store_ttl"),
            (f"a: {{salt: {SALT}, store_ttl: 3 weeks}}", "is not a duration"),
            (f"a: {{salt: {SALT}, store_objects_max: 0}}", "store_objects_max"),
            (f"a: {{salt: {SALT}, store_max: much}}", "is not a size"),
        ],
    )
    def test_what_is_wrong_is_told_without_the_salt(self, named: str, said: str) -> None:
        with pytest.raises(ConfigError) as caught:
            loads(f"tenants: {{named: {{{named}}}}}")
        assert said in str(caught.value)
        assert SALT not in str(caught.value)

    def test_the_command_prints_the_id(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TEAM_SALT", SALT)
        assert main(["tenant", "id", "--env", "TEAM_SALT"]) == 0
        assert capsys.readouterr().out == f"{A.hex()}\n"
        assert main(["tenant", "id", "--env", "NOT_SET_AT_ALL"]) == 2
        assert "NOT_SET_AT_ALL is empty" in capsys.readouterr().err
        # As Python reads bytes that are not UTF-8.
        monkeypatch.setenv("TEAM_SALT", "\udcff")
        assert main(["tenant", "id", "--env", "TEAM_SALT"]) == 2
        assert "it must be UTF-8" in capsys.readouterr().err


def test_a_salt_makes_eight_bytes_and_none_makes_none() -> None:
    assert tenant_id("") == b""
    assert len(A) == 8
    assert A != B


def test_named_tenants_in_status_and_metrics(short_directory: Path) -> None:
    config = config_in(
        short_directory,
        tenants={"named": {"team-a": {"salt": SALT, "host_max": 4096 * 1024}}},
    )
    with (
        RunningSidecar(config) as sidecar,
        Worker(sidecar.path) as worker,
        Scheduler(sidecar.path) as scheduler,
    ):
        for job, (name, tenant) in enumerate((("a", A), ("b", B), ("c", b"")), 1):
            chunk = worker.chunk(key_of(name), [0], tenant=tenant)
            worker.submit(stores=[StoreJob(job, [chunk])])
            assert worker.outcome(job) is Outcome.OK
        scheduler.lease(7, [key_of("a")], tenant=A)
        told = sidecar.wait_until(lambda now: now["leases"] == 1)["tenants"]
        assert [(one["name"], one["chunks_stored"], one["leases"]) for one in told] == [
            ("unsalted", 1, 0),
            ("team-a", 1, 1),
            ("other", 1, 0),
        ]
        page = sidecar.get("/metrics").decode()
        assert 'kvlake_tenant_chunks_stored_total{tenant="team-a"} 1.0' in page
        everything = page + json.dumps(sidecar.status())
        assert SALT not in everything
        assert B.hex() not in everything, "an unnamed tenant got a label"


def series(sidecar: RunningSidecar) -> set[tuple[str, ...]]:
    """Names and labels of everything that /metrics exports."""
    text = sidecar.get("/metrics").decode()
    return {
        (sample.name, *itertools.chain(*sorted(sample.labels.items())))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_ten_thousand_tenants_add_no_series(short_directory: Path) -> None:
    named = {"named": {"team-a": {"salt": SALT}}}
    store = {"url": f"file://{short_directory}/bucket"}
    with (
        RunningSidecar(config_in(short_directory, tenants=named, store=store)) as sidecar,
        Worker(sidecar.path) as worker,
        Scheduler(sidecar.path) as scheduler,
    ):
        numbers = itertools.count(1)

        def use(tenants: Sequence[bytes]) -> None:
            """Each stores a chunk, looks it up, and pins it to load it."""
            chunks = [worker.chunk(key_of(one), [0], tenant=one) for one in tenants]
            worker.submit(stores=[StoreJob(job := next(numbers), chunks)])
            assert worker.outcome(job) is Outcome.OK
            for chunk in chunks:
                # Only the last answer is waited for: they come in order.
                last = next(numbers)
                scheduler.send(Lookup(scheduler.epoch, last, [chunk.key], 60_000, chunk.tenant))
                scheduler.lease(last, [chunk.key], tenant=chunk.tenant)
                scheduler.send(Release(scheduler.epoch, [last], [last]))
            scheduler.lookup(next(numbers), [])

        for tenant in (b"", A, B):
            use([tenant])
        # Some series begin with the first write.
        sidecar.wait_until(lambda now: now["counters"]["chunks_written"] >= 3)
        before = series(sidecar)
        tenants = [tenant_id(f"salt of {number}") for number in range(TENANTS)]
        for first in range(0, TENANTS, TENANTS_TOGETHER):
            use(tenants[first : first + TENANTS_TOGETHER])
        other = next(one for one in sidecar.status()["tenants"] if one["name"] == "other")
        assert other["chunks_stored"] == other["lookups"] == TENANTS + 1
        after = series(sidecar)
    assert after == before
    labels = {labels[labels.index("tenant") + 1] for _, *labels in after if "tenant" in labels}
    assert labels == {"unsalted", "team-a", "other"}
