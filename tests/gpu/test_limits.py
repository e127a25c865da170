"""Everything that waits has a limit, also while processes are killed: rule 4, on the double.

The engine's worker and schedulers ask for far more than there is, with copies held up so that it
piles up. The control gives the same to a sidecar without these limits, and sees each exceeded.
"""

from __future__ import annotations

import contextlib
import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sidecar.protocol import Lookup
from tests.gpu.bounds import WAYS, Watch, left_over
from tests.gpu.child import Child
from tests.gpu.double.control import Double, wait_until
from tests.gpu.sidecars import SidecarProcess
from tests.gpu.test_sidecar import rank_of
from tests.sidecar.client import RefusedError, Scheduler

pytest.importorskip("cuda.bindings.driver")

MIB = 1 << 20
BOUNDED: dict[str, dict[str, Any]] = {
    "gpu": {"loads_inflight_max": MIB, "stores_inflight_max": MIB},
    "host": {"size": 16 * MIB},
    "limits": {
        "load_deadline": "60s", "store_deadline": "60s", "lease_ttl": "90s",
        "jobs_inflight_max": 64, "memory_max": MIB, "copies_queued_max": 16,
        "storing_max": 6 * MIB, "pinned_max": 8 * MIB, "lookups_max": 4, "leases_max": 4,
        "sessions_max": 3,
    },
}  # fmt: skip
LIMITS = {
    **dict.fromkeys(WAYS, MIB), "host_bytes": 16 * MIB, "memory_bytes": MIB, "copies": 16,
    "storing_bytes": 6 * MIB, "pinned_bytes": 8 * MIB, "kept_bytes": 4 * MIB, "lookups": 4,
    "leases": 4, "sessions": 3,
}  # fmt: skip
UNBOUNDED: dict[str, dict[str, Any]] = {
    "gpu": {"loads_inflight_max": 64 * MIB, "stores_inflight_max": 64 * MIB},
    "host": {"size": 64 * MIB},
    "limits": {"load_deadline": "60s", "store_deadline": "60s", "lease_ttl": "90s"},
}
LAYOUT = {"content_bytes": 4096}
"""Four blocks, which make a chunk, are 1.5 MiB: more than may be in flight."""
KEYS = [number.to_bytes(32, "big") for number in range(16)]
SCHEDULERS = 3
FLOODS = ((40, 0), (40, 40), (0, 40), (40, 40))
"""Stores and loads of one step."""
VICTIMS = ("sidecar", "worker", "nobody")
ANSWER_SECONDS_MAX = 40.0
"""Less than the deadline, after which a worker gives up jobs that nobody answers."""
FLOOD = """
def flood(seed, first, stores, loads):
    chance = np.random.default_rng(seed)
    jobs = list(range(first, first + stores + loads))
    chosen = [(keys[job % len(keys)], chance.choice(24, 4, replace=False).tolist()) for job in jobs]
    made = list(zip(jobs, chosen))
    rank.role.submit(StepPlan(
        stores=[rank.store_job(job, [chunk]) for job, chunk in made[:stores]],
        loads=[rank.load_job(job, [chunk]) for job, chunk in made[stores:]],
    ))
    return jobs
"""


def flooding_rank(double: Double, sidecar: SidecarProcess, engine_id: str = "gpu") -> Child:
    """A rank that can ask for many copies at once."""
    rank = rank_of(double, sidecar, layout=LAYOUT, engine_id=engine_id)
    rank.run(f"import numpy as np; from connector.plan import StepPlan\n{FLOOD}", keys=KEYS)
    return rank


def schedulers_of(sidecar: SidecarProcess, stack: ExitStack) -> list[Scheduler]:
    """As many as are let in of some that ask for leases, lookups and pins of every chunk."""
    let_in: list[Scheduler] = []
    for number in range(SCHEDULERS):
        with contextlib.suppress(RefusedError):
            one = Scheduler(sidecar.socket, topology="tp1", engine_id=f"asking-{number}")
            let_in.append(stack.enter_context(one))
    for scheduler in let_in:
        for number in range(1, 9):
            scheduler.lease(number, KEYS)
            scheduler.lease(100 + number, KEYS[:1])
            scheduler.send(Lookup(scheduler.epoch, number, KEYS[:2], 60_000))
        scheduler.pin(KEYS, 60.0)
    return let_in


@pytest.mark.promise("gpu-limits")
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_under_random_kills_and_delays_nothing_is_more_than_its_limit(
    double: Double, short_directory: Path, seed: int
) -> None:
    chance = random.Random(seed)
    double.page.delay_us_max, double.page.piece_bytes = 400, 1 << 16
    watch = Watch(double, LIMITS)
    with ExitStack() as stack:
        running = SidecarProcess(double, short_directory, **BOUNDED)
        stack.callback(lambda: running.stop())
        rank = flooding_rank(double, running)
        stack.callback(lambda: rank.close())
        # Each of them, and one of them twice.
        victims = chance.sample((*VICTIMS, chance.choice(VICTIMS)), k=len(FLOODS))
        for life, ((stores, loads), victim) in enumerate(zip(FLOODS, victims, strict=True)):
            double.page.seed = chance.getrandbits(31)
            rank.run(
                "for number in range(8): rank.store(first + number, keys[number], [number] * 4)",
                first=1000 * life + 1,
            )
            double.page.hold = chance.choice((0, 1, 2))
            rank.run(
                "jobs = flood(seed, first + 10, stores, loads)",
                seed=seed * 100 + life, stores=stores, loads=loads,
            )  # fmt: skip
            with ExitStack() as asking:
                schedulers_of(running, asking)
                until = time.monotonic() + chance.random() / 2
                while time.monotonic() < until:
                    watch.look(running)
                if victim == "sidecar":
                    running.kill()
                elif victim == "worker":
                    rank.kill()
                    rank.close()
                double.page.hold, released = 0, time.monotonic()
                if victim != "worker":
                    rank.start("result = [rank.outcome(job) for job in jobs]")
                if victim != "sidecar":
                    watch.look(running)
            if victim == "sidecar":
                running = SidecarProcess(double, short_directory, **BOUNDED)
            if victim == "worker":
                rank = flooding_rank(double, running, f"life-{life}")
            else:
                done = rank.finish()
                seconds = time.monotonic() - released
                assert victim == "sidecar" or (any(done) and seconds < ANSWER_SECONDS_MAX)
            rank.run("rank.attached()")
        wait_until(lambda: left_over(watch.look(running)).keys() == {"sessions"})
        rank.run(
            "assert rank.store(9001, b'k' * 32, [1, 2]) and rank.load(9002, b'k' * 32, [3, 4])"
        )
        rank.run("rank.leave()")
        wait_until(lambda: not left_over(watch.look(running)))
        wait_until(lambda: not {"import", "mapping"} & set(running.left))
        rank.close()
    assert running.left == {}
    assert not watch.exceeded, watch.most
    # It was not for want of asking.
    assert min(watch.most[way] for way in WAYS) > MIB // 2
    assert {"store/storing", "load/copies", "lease/pinned", "lookup/lookups"} <= watch.refused


@pytest.mark.promise("gpu-limits")
@pytest.mark.slow
def test_a_sidecar_without_these_limits_is_seen_to_exceed_each(
    double: Double, short_directory: Path
) -> None:
    watch = Watch(double, LIMITS)
    with ExitStack() as stack:
        running = SidecarProcess(double, short_directory, **UNBOUNDED)
        stack.callback(running.stop)
        rank = stack.enter_context(flooding_rank(double, running))
        double.page.hold = 1
        rank.run("jobs = flood(1, 1, 16, 0)")
        wait_until(lambda: watch.look(running)["waiting"]["copies"]["used"] == 16)
        wait_until(lambda: double.process(running.pid).inflight_bytes[1] > MIB)
        double.page.hold = 0
        rank.run("assert all(rank.outcome(job) for job in jobs)")
        double.page.hold = 1
        rank.run("flood(2, 101, 0, 600)")
        schedulers_of(running, stack)
        wait_until(lambda: double.process(running.pid).inflight_bytes[0] > MIB)
        wait_until(lambda: watch.look(running) and watch.exceeded == LIMITS.keys())
        running.kill()
        double.page.hold = 0
