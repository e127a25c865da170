"""Memory and open files that are short: `kvlake doctor` and `kvlake serve` say so alike."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from sidecar.config.model import load, loads
from sidecar.service.start_checks import allow_open_files, cgroup_room, machine_room, shortages
from tests import places
from tests.sidecar.commands import Commands, commands
from tests.sidecar.doctor_world import World, world
from tiers.pool.host_pool import HostPool

__all__ = ["commands", "world"]


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_room_is_what_the_tightest_cgroup_leaves(tmp_path: Path) -> None:
    stat = "anon 5\ninactive_file 30\n"
    root = machine(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 7 kB\n",
            "proc/self/cgroup": "1:cpu:/\n0::/pod/one\n",
            "sys/fs/cgroup/pod/memory.max": "1000\n",
            "sys/fs/cgroup/pod/memory.current": "900\n",
            "sys/fs/cgroup/pod/memory.stat": stat,
            "sys/fs/cgroup/pod/one/memory.max": "max\n",
            "sys/fs/cgroup/pod/one/memory.current": "900\n",
            "sys/fs/cgroup/pod/one/memory.stat": stat,
        },
    )
    assert machine_room(root) == (7 * 1024, "the machine")
    room, where = cgroup_room(root)
    assert (room, f"{root}/sys/fs/cgroup/pod " in where) == (130, True)


def test_cgroups_of_the_first_version_are_read(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/1f\n",
        # In a container its own is the root of what it is shown.
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "500",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "450",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 25",
    }
    assert cgroup_room(machine(tmp_path, files))[0] == 75
    assert cgroup_room(tmp_path / "none") == (None, "")
    assert machine_room(tmp_path / "none") == (None, "")


def test_memory_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = loads(f"host: {{size: 8MiB, directory: {tmp_path}}}")
    places.patch(monkeypatch, "memory_kind", lambda _: "tmpfs")
    places.patch(monkeypatch, "cgroup_room", lambda: (9 << 20, "the cgroup"))
    assert shortages(config) == []
    places.patch(monkeypatch, "cgroup_room", lambda: (7 << 20, "the cgroup"))
    (short,) = shortages(config)
    assert str(short).startswith(
        "host.size 8 MiB: it needs 8 MiB more memory, and the cgroup has 7 MiB left; lower"
    )
    # What an earlier sidecar left is there already.
    pool = HostPool.open(config.pool_path, config.host.size)
    assert shortages(config) == []
    pool.close()


@pytest.mark.promise("doctor")
def test_both_warn_of_a_pool_on_a_disk(commands: Commands, world: World) -> None:
    host = {"directory": "/dev/shm"}
    runtime = {"name": world.directory.name}
    in_memory = world.config({"host": host, "runtime": runtime})
    assert "host.directory is in memory" in commands.run("doctor", "--config", str(in_memory)).out
    # A port that is taken ends `serve` once it has warned.
    file = world.config({"http": {"port": world.taken_port()}, "log": {"level": "warning"}})
    if not any("on a disk" in str(one) for one in shortages(load(file))):
        # Where the tests' own directory is in memory.
        file = world.config(
            {"host": {"directory": "/var/tmp"}, "http": {"port": world.taken_port()}}
        )
    told = "it is on a disk, not in a memory file system (tmpfs or ramfs"
    doctor = commands.run("doctor", "--config", str(file))
    assert any(told in line for line in doctor.lines("warn")), doctor.out
    assert told in commands.run("serve", "--config", str(file)).err


def test_open_files_are_allowed_as_far_as_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (64, 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, one: given.append(one))
    allow_open_files()
    assert given == [(1000, 1000)]
    host = "host: {directory: /dev/shm, size: 1MiB}"
    assert shortages(loads(f"{host}\nlimits: {{sessions_max: 200}}")) == []
    (short,) = shortages(loads(f"{host}\nlimits: {{sessions_max: 300}}"))
    assert "open files: the limit is 1000, and limits.sessions_max=300 may need 1156" in str(short)
