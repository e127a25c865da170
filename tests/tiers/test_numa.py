"""NUMA nodes: which are chosen on which machine, and what becomes of a kernel that refuses."""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform
from pathlib import Path

import numpy as np
import pytest

from tests import places
from tiers.errors import PoolError
from tiers.pool.file import Backing
from tiers.pool.host_pool import HostPool
from tiers.pool.numa import PAGES_SAMPLED, Placement, gpu_nodes, libc, memory_nodes, sample

PAGE = 4096


def machine(root: Path, nodes: str, gpus: dict[str, str]) -> Path:
    """A machine's files under /sys and /proc, as far as they are read."""
    (root / "sys/devices/system/node").mkdir(parents=True)
    (root / "sys/devices/system/node/has_memory").write_text(f"{nodes}\n")
    for address, node in gpus.items():
        (root / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
        device = root / "sys/bus/pci/devices" / address.lower()
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return root


TWO_SOCKETS = {"0000:3B:00.0": "0", "0000:86:00.0": "1", "0000:AF:00.0": "1"}


def test_nodes_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    root = machine(tmp_path, "0-1,4,6-7", TWO_SOCKETS)
    assert memory_nodes(root) == (0, 1, 4, 6, 7)
    assert gpu_nodes(root) == (0, 1)
    assert memory_nodes(tmp_path / "nowhere") == (0,)
    assert gpu_nodes(tmp_path / "nowhere") == ()


@pytest.mark.parametrize(
    ("nodes", "gpus", "chosen", "reason"),
    [
        ("0-1", TWO_SOCKETS, (0, 1), ""),
        ("0-1", {"0000:86:00.0": "1"}, (1,), ""),
        ("0", TWO_SOCKETS, (), "one node"),
        ("0-1", {}, (), "no GPU"),
        ("0-1", {"0000:86:00.0": "-1"}, (), "no GPU whose node is known"),
    ],
)
def test_auto_is_next_to_the_gpus(
    tmp_path: Path, nodes: str, gpus: dict[str, str], chosen: tuple[int, ...], reason: str
) -> None:
    placement = Placement.of("auto", machine(tmp_path, nodes, gpus))
    assert placement.nodes == chosen
    assert reason in placement.reason
    assert not placement.strict


def test_off_and_named_nodes(tmp_path: Path) -> None:
    root = machine(tmp_path, "0-1", TWO_SOCKETS)
    assert Placement.of("off", root).nodes == ()
    assert Placement.of((1,), root).nodes == (1,)
    with pytest.raises(PoolError, match=r"host\.numa=\[1, 3\]: this machine .* \[0, 1\]"):
        Placement.of((1, 3), root)


def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose seccomp profile lets no policy be set."""

    def answer(*_: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(libc, "syscall", answer)


def test_without_the_right_auto_says_why_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(monkeypatch)
    placement = Placement((0,))
    placement.settle()
    assert placement.refused
    assert placement.nodes == ()
    assert "Operation not permitted" in placement.reason
    assert "SYS_NICE" in placement.reason
    placement.adopt()
    assert sample(np.zeros(PAGE, dtype=np.uint8)) == {}


def test_without_the_right_named_nodes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(monkeypatch)
    with pytest.raises(PoolError, match=r"host\.numa=\[0\]: .*Operation not permitted.*SYS_NICE"):
        HostPool.open(tmp_path / "pool", 4 * PAGE, placement=Placement((0,), strict=True))
    assert list(tmp_path.iterdir()) == []


def test_on_an_unknown_machine_it_is_not_known_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    placement = Placement((0,))
    placement.settle()
    assert "s390x" in placement.reason


def _settled(nodes: tuple[int, ...]) -> Placement:
    placement = Placement(nodes, strict=True)
    try:
        placement.settle()
    except PoolError as error:
        pytest.skip(str(error))
    return placement


@pytest.mark.parametrize("prefault", [False, True])
def test_pages_of_a_pool_lie_where_they_should(tmp_path: Path, prefault: bool) -> None:
    node = memory_nodes()[-1]
    placement = _settled((node,))
    path = tmp_path / "pool"
    pool = HostPool.open(path, 1 << 20, prefault=prefault, placement=placement)
    assert sample(pool.memory) == {node: PAGES_SAMPLED}
    told = placement.describe(pool.memory)
    assert told == {"nodes": [node], "reason": "", "pages_sampled": {str(node): 64}}
    pool.close()


def test_the_policy_is_that_of_the_threads_that_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    places.patch(monkeypatch, "prefer_nodes", asked.append)
    memory = np.frombuffer(mmap.mmap(-1, 4 * PAGE), dtype=np.uint8)
    assert Backing(prefault=True, threads=1, placement=Placement((0, 1))).populate(memory)
    assert asked == [(0, 1)]
