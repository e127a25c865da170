"""`kvlake doctor` on the double and without a GPU."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli.doctor import numa_finding
from sidecar.config.model import loads
from tests import places
from tests.gpu.double.control import Double
from tests.tiers.test_numa import machine
from tiers.pool.host_pool import HostPool

pytest.importorskip("cuda.bindings.driver")


def doctor(
    directory: Path, env: dict[str, str], **sections: dict[str, Any]
) -> tuple[int, list[str]]:
    path = directory / "kvlake.yaml"
    host = {"size": "1MiB", "directory": str(directory)}
    # Any port: another sidecar of this machine may have the default one.
    path.write_text(json.dumps({"host": host, "http": {"port": 0}, **sections}))
    done = subprocess.run(
        [sys.executable, *places.program(), "doctor", "--config", str(path)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def test_a_gpu_that_can_everything_passes_and_nothing_is_left(
    double: Double, tmp_path: Path
) -> None:
    double.page.num_devices = 2
    store = tmp_path / "store"
    store.mkdir()
    code, lines = doctor(tmp_path, double.env(), store={"url": f"file://{store}"})
    assert code == 0
    for said in (
        "batch copies: yes",
        "batch/2D: to_device 8KiB",
        "IPC handles: yes",
        "(VMM): yes",
        "streams: yes",
    ):
        assert sum(said in line and line.startswith("pass") for line in lines) == 2, lines
    assert any("peer access" in line for line in lines)
    assert any(line.startswith("pass  store file://") for line in lines)
    assert [process.left for process in double.processes()] == [{}]


def test_missing_parts_are_reported_with_the_remedy(double: Double, tmp_path: Path) -> None:
    double.page.num_devices = 2
    double.page.driver_version = 12040
    double.page.no_stream_writes = 1
    double.page.device_names[1].value = b"NVIDIA A100 MIG 1g.5gb"
    code, lines = doctor(tmp_path, double.env(), store={"url": "file:///proc/nowhere"})
    told = "\n".join(lines)
    assert code == 1
    assert "batch copies: no; use a driver of CUDA 12.8" in told
    assert "fences written by streams: no" in told
    assert "a slice (MIG) cannot be shared; use a whole GPU" in told
    assert "fail  store file:///proc/nowhere" in told


def test_a_pool_that_finds_no_room_fails(double: Double, tmp_path: Path) -> None:
    host = {"size": "900TiB", "directory": str(tmp_path)}
    code, lines = doctor(tmp_path, double.env(), host=host)
    assert code == 1
    assert "lower host.size" in next(line for line in lines if line.startswith("fail"))


def test_the_placement_of_the_pool_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path / "machine", "0-1", {"0000:3B:00.0": "1"})
    config = loads(f"host: {{size: 1MiB, directory: {tmp_path}}}")
    places.patch(monkeypatch, "prefer_nodes", lambda _: None)
    told = numa_finding(config, root)
    assert str(told) == "pass  NUMA: new pages of the pool go to node 1"
    pool = HostPool.open(config.pool_path, config.host.size)
    told = numa_finding(config, root)
    assert "of 64 pages of the pool that is there, 64 are on node 0; stop the sidecar" in str(told)
    pool.close()
    off = loads(f"host: {{directory: {tmp_path}, numa: off}}")
    assert "not placed: host.numa is off" in str(numa_finding(off, root))
    named = loads(f"host: {{directory: {tmp_path}, numa: [5]}}")
    assert str(numa_finding(named, root)).startswith("fail  NUMA: host: host.numa=[5]")
    monkeypatch.undo()
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    refused = str(numa_finding(config, root))
    assert refused.startswith("warn  NUMA: how to place memory")
    assert "numactl" in refused


def test_without_a_gpu_it_says_so_and_passes(double: Double, tmp_path: Path) -> None:
    double.page.num_devices = 0
    code, lines = doctor(tmp_path, double.env())
    assert code == 0
    assert any(line.startswith("warn  GPUs: CUDA cannot be used here") for line in lines)
