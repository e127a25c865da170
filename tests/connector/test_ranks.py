"""A rank without a session beside an attached scheduler: its engine misses, and loads nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from connector.client import SidecarSession
from connector.plan import StepPlan, StepReport
from connector.worker import OTHER_SECONDS_MIN, UNATTACHED_SECONDS_MIN
from sidecar.protocol import Lease, Lookup, Submit
from tests.connector.configurations import request_of
from tests.connector.double import DoubleClient
from tests.connector.engine import Engine
from tests.connector.prompts import CACHED, PROMPT, chain_of, counted, seen, total
from tests.connector.test_worker import Rank, load

OTHER = [number % 89 for number in range(40)]
"""A prompt that is no hit."""
SHAPES = pytest.mark.parametrize(
    "shape", [{"ranks": 1}, {"ranks": 2}, {"stages": 2}, {"ranks": 2, "stages": 2}], ids=str
)


def computed(engine: Engine, name: str, tokens: list[int]) -> int:
    """Tokens of a prompt that a request of this name computes."""
    engine.run(request_of(name, tokens, max_tokens=1))
    engine.check_idle()
    engine.forget()
    return engine.computed[name]


def lack(engine: Engine, seconds: float = UNATTACHED_SECONDS_MIN) -> None:
    """Have ranks report that they have no session, as they do after a while."""
    assert computed(engine, f"begins {engine.steps}", OTHER[::-1]) == len(OTHER)
    engine.clock.now += seconds
    assert computed(engine, f"tells {engine.steps}", OTHER) == len(OTHER)


@SHAPES
def test_nothing_is_loaded_or_stored_until_every_rank_is_back(
    make: Callable[..., Engine], shape: dict[str, int]
) -> None:
    engine = make(**shape)
    seen(engine)
    first, last = engine.ranks[0].client, len(engine.ranks) - 1
    engine.sidecar.detach_rank(last)
    lack(engine)
    sent, taken = len(first.sent_of(Submit)), counted(engine)
    asked = len(engine.client.sent_of(Lease)), len(engine.client.sent_of(Lookup))
    assert computed(engine, "miss", PROMPT) == len(PROMPT)
    assert computed(engine, "new", PROMPT[::-1]) == len(PROMPT)
    assert len(first.sent_of(Submit)) == sent
    assert (len(engine.client.sent_of(Lease)), len(engine.client.sent_of(Lookup))) == asked
    assert total(taken, "loads_failed") == total(taken, "stores_failed") == 0
    assert total(taken, "requests_uncached") == 2
    engine.sidecar.attach_rank(last)
    assert computed(engine, "tells again", OTHER) == len(OTHER)
    assert computed(engine, "hit", PROMPT) == len(PROMPT) - CACHED
    assert total(taken, "tokens_loaded_host") == CACHED


def test_what_only_the_store_has_is_not_read(make: Callable[..., Engine]) -> None:
    engine = make(ranks=2)
    seen(engine)
    for key in chain_of(engine, PROMPT).keys:
        engine.sidecar.demote(key)
    engine.sidecar.detach_rank(1)
    lack(engine)
    request = request_of("miss", PROMPT, max_tokens=1)
    engine.role.new_request(request)
    engine.run(request)
    assert not engine.client.sent_of(Lookup)
    assert engine.computed["miss"] == len(PROMPT)


def test_ranks_that_attached_before_the_first_step_miss_nothing(
    make: Callable[..., Engine],
) -> None:
    engine = make(ranks=2)
    seen(engine)
    for rank in (0, 1):
        # Between two steps, so nobody needs to know.
        engine.sidecar.detach_rank(rank)
        engine.sidecar.attach_rank(rank)
    assert computed(engine, "hit", PROMPT) == len(PROMPT) - CACHED


@SHAPES
def test_ranks_that_attach_in_turn_are_all_waited_for(
    make: Callable[..., Engine], shape: dict[str, int]
) -> None:
    engine = make(**shape)
    seen(engine)
    everyone = range(len(engine.ranks))
    for rank in everyone:
        engine.sidecar.detach_rank(rank)
    for number in everyone:
        lack(engine)
        assert computed(engine, f"miss {number}", PROMPT) == len(PROMPT)
        engine.sidecar.attach_rank(number)
    assert computed(engine, "tells", OTHER) == len(OTHER)
    assert computed(engine, "hit", PROMPT) == len(PROMPT) - CACHED


@SHAPES
def test_a_new_session_of_the_scheduler_begins_with_ranks_that_are_attached(
    make: Callable[..., Engine], shape: dict[str, int]
) -> None:
    engine = make(**shape)
    seen(engine)
    engine.sidecar.detach_rank(0)
    lack(engine)
    assert computed(engine, "miss", PROMPT) == len(PROMPT)
    engine.sidecar.detach()
    assert computed(engine, "without", OTHER) == len(OTHER)
    engine.sidecar.attach()
    assert computed(engine, "hit", PROMPT) == len(PROMPT) - CACHED


def test_a_rank_that_never_comes_back_is_known_beside_each_session(
    make: Callable[..., Engine],
) -> None:
    engine = make(ranks=2)
    seen(engine)
    for _ in range(2):
        engine.sidecar.attach()
        engine.sidecar.detach_rank(1)
        lack(engine)
        leases = len(engine.client.sent_of(Lease))
        assert computed(engine, "miss", PROMPT)
        assert len(engine.client.sent_of(Lease)) == leases


def test_a_session_that_ends_in_the_middle_of_a_load(make: Callable[..., Engine]) -> None:
    engine = make(ranks=2)
    seen(engine)
    request = engine.add(request_of("a", PROMPT, max_tokens=1))
    engine.step()
    engine.sidecar.detach_rank(1)
    engine.finish(request)
    engine.settle()
    assert engine.computed["a"] == len(PROMPT)
    engine.check_idle()


def test_a_rank_reports_a_lack_in_every_step_and_its_end_once() -> None:
    rank = Rank()

    def unattached(*, attached: bool = True, seconds: float = 0.0) -> int | None:
        rank.clock.now += seconds
        epoch = 1 if rank.client.live is None else rank.client.live.epoch
        return rank.role.collect(StepPlan(epoch=epoch * attached)).report.unattached

    assert unattached() is None
    rank.client.attach(None)
    # One that attaches to a new sidecar is late by less.
    assert [unattached(), unattached(seconds=0.9)] == [None, None]
    assert [unattached(seconds=0.1), unattached()] == [1, 1]
    rank.attach()
    assert [unattached(), unattached()] == [0, None]
    # Without a sidecar nobody has a session: a step without work reports nothing.
    rank.client.attach(None)
    assert [unattached(attached=False), unattached(), unattached(seconds=1.0)] == [None, None, 1]
    assert [unattached(attached=False), unattached(attached=False)] == [0, None]
    rank.role.submit(StepPlan([load(2)]))
    assert rank.role.collect().report.empty
    rank.close()


def test_a_rank_with_another_sidecar_than_the_scheduler_has_none(
    make: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """Two sidecars serve one user, and the first place that answers is used."""
    engine = make(ranks=2)
    seen(engine)
    engine.sidecar.fences[1] = engine.ranks[1].attach()
    lack(engine, OTHER_SECONDS_MIN)
    assert computed(engine, "miss", PROMPT) == len(PROMPT)
    assert caplog.text.count('set "socket" in kv_connector_extra_config') == 1
    engine.sidecar.attach_rank(1)
    assert computed(engine, "tells", OTHER) == len(OTHER)
    assert computed(engine, "hit", PROMPT) == len(PROMPT) - CACHED


def test_a_late_plan_of_the_sidecar_before_is_no_other_sidecar(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The rank had no session before the restart, and has one with the new sidecar first."""
    rank = Rank()
    before = StepPlan(epoch=1)
    rank.client.attach(None)
    rank.role.collect(before)
    rank.clock.now += UNATTACHED_SECONDS_MIN
    assert rank.role.collect(before).report.unattached == 1
    rank.attach()
    assert rank.client.live is not None
    assert rank.client.live.epoch != before.epoch
    assert rank.role.collect(before).report.unattached == 1
    assert not caplog.text
    rank.close()


def test_reports_of_ranks_are_summed() -> None:
    lacks, came, silent = StepReport(unattached=1), StepReport(unattached=0), StepReport()
    assert lacks.add(silent).add(lacks).unattached == 2
    assert silent.add(came) == came
    assert came.add(lacks).unattached == 1
    assert silent.add(silent).empty


def test_a_session_may_end_between_any_two_looks_at_it(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so on the client's thread."""
    role, looks = make().role, [0, 0]

    def session(client: DoubleClient) -> SidecarSession | None:
        looks[0] += 1
        return client.live if looks[0] < looks[1] else None

    monkeypatch.setattr(DoubleClient, "session", property(session))
    for ends in range(1, 10):
        looks[:] = 0, ends
        role.build_plan({}, lambda _: [])
        assert looks[0]
