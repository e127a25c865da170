"""An engine that sleeps and wakes beside a sidecar, in processes of their own, on the double.

Its memory is of the virtual memory API, as vLLM's sleep mode makes it: what comes back after sleep
is other memory at the same addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.child import Child
from tests.gpu.double.control import Double, wait_until
from tests.gpu.sidecars import SidecarProcess
from tests.gpu.test_sidecar import rank_of

pytestmark = pytest.mark.promise("sleep-mode")

pytest.importorskip("cuda.bindings.driver")

OF_A_WORKER = {"import", "mapping", "reservation", "handle"}


@pytest.fixture
def sidecar(double: Double, short_directory: Path) -> Iterator[SidecarProcess]:
    with SidecarProcess(double, short_directory) as running:
        yield running


@pytest.fixture
def rank(double: Double, sidecar: SidecarProcess) -> Iterator[Child]:
    """A rank that has stored block 1 as `key`, whose content is `wanted`."""
    with rank_of(double, sidecar, vmm=True) as rank:
        rank.run(
            "key = b'k' * 32\n"
            "rank.randomize(1); assert rank.store(1, key, [1]); wanted = rank.block(1)"
        )
        yield rank


def test_the_sidecar_lets_go_before_the_memory_goes_and_shares_what_comes_back(
    double: Double, sidecar: SidecarProcess, rank: Child
) -> None:
    rank.run("rank.role.unregister(); rank.role.unregister()")
    assert not OF_A_WORKER & set(sidecar.left), "unregister_kv_caches returned too early"
    # Nothing of the old attachment is left in the engine's process either.
    assert "registration" not in double.process(rank.pid).left
    rank.run("rank.go_to_sleep()")
    assert not {"mapping", "handle"} & set(double.process(rank.pid).left)
    assert not rank.run("result = rank.load(2, key, [5])"), "asleep, every job fails at once"
    rank.run(
        "rank.wake_up(); rank.role.restore(); rank.attached()\n"
        "assert rank.load(3, key, [7]); assert rank.block(7) == wanted\n"
        "rank.randomize(2); assert rank.store(4, b'l' * 32, [3, 4]); stored = rank.block(4)\n"
        "rank.randomize(3); assert rank.load(5, b'l' * 32, [9, 8])\n"
        "assert rank.block(8) == stored\n"
        "rank.go_to_sleep(); rank.wake_up(); rank.attached()\n"
        "assert rank.load(6, key, [2]) and rank.block(2) == wanted; rank.close()"
    )
    wait_until(lambda: not OF_A_WORKER & set(sidecar.left))
    sidecar.stop()
    assert sidecar.left == {}


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_job_of_before_never_touches_the_memory_of_after(
    double: Double, sidecar: SidecarProcess, rank: Child, direction: str
) -> None:
    double.page.hold = 1
    rank.run(f"rank.begin_{direction}(5, key if 'load' == '{direction}' else b'n' * 32, [3])")
    to_host = int(direction == "store")
    wait_until(lambda: double.process(sidecar.pid).inflight_bytes[to_host] > 0)
    rank.run(
        "from tests.places import replace\n"
        "replace('RELEASE_SECONDS_MAX', 0.2, package='connector')\n"
        "rank.go_to_sleep(); rank.wake_up(); rank.attached()\n"
        "rank.gpu.fill(rank.base, 7, rank.layout.size_bytes)"
    )
    assert sidecar.left["mapping"] == 2, "the copy that runs keeps what it reads and writes"
    double.page.hold = 0
    assert rank.run("result = rank.outcome(5)") is False
    wait_until(lambda: sidecar.left["mapping"] == 1)
    assert rank.run("result = set(rank.image())") == {7}
    assert rank.run("result = rank.load(6, key, [4]) and rank.block(4) == wanted")


def test_a_sidecar_that_died_meanwhile_is_no_loss_to_who_sleeps(
    double: Double, short_directory: Path, sidecar: SidecarProcess, rank: Child
) -> None:
    rank.run("epoch = rank.attached(); rank.go_to_sleep()")
    sidecar.kill()
    rank.run("rank.wake_up(); rank.role.unregister(); rank.role.restore()")
    with SidecarProcess(double, short_directory):
        rank.run(
            "rank.attached(other_than=epoch); rank.randomize(4)\n"
            "assert rank.store(8, b'm' * 32, [3]) and rank.load(9, b'm' * 32, [5])\n"
            "assert rank.block(3) == rank.block(5); rank.close()"
        )
