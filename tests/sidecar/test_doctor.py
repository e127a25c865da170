"""`kvlake doctor` says what `kvlake serve` says, in real processes, and leaves no trace."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import fcntl
import importlib.metadata
import importlib.util
import os
import re
import resource
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
import zmq

from sidecar.cli import doctor
from sidecar.cli.doctor import Check, startup_findings
from sidecar.config.model import Config, load, loads
from sidecar.exits import Exit
from sidecar.service.start_checks import allow_open_files, cgroup_room, machine_room, shortages
from tests import places
from tests.sidecar.client import RunningSidecar, config_in
from tests.sidecar.commands import Commands, commands, tree
from tiers.pool import lock as pool_lock
from tiers.pool.host_pool import HostPool
from tiers.pool.lock import require_creatable, take_lock

__all__ = ["commands"]

OTHER = 4242
"""Another user."""


@dataclasses.dataclass
class World:
    """A directory in which something is wrong, and what has to be held open for that."""

    directory: Path
    held: contextlib.ExitStack

    @property
    def run(self) -> Path:
        return self.directory / "run"

    @property
    def pool(self) -> Path:
        return self.directory / "pool" / f"kvlake-{os.getuid()}-default.pool"

    @property
    def lock(self) -> Path:
        return self.pool.with_name(f"{self.pool.name}.lock")

    def home(self) -> Path:
        """The sidecar's own directory, as it is left by one that ended."""
        home = self.run / "default"
        home.mkdir(parents=True, mode=0o700)
        return home

    def taken_port(self) -> int:
        sock = self.held.enter_context(socket.socket())
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        return int(sock.getsockname()[1])

    def key(self, content: str | None = None, mode: int = 0o600) -> str:
        file = self.directory / f"key{len(list(self.directory.glob('key*')))}"
        file.write_text(zmq.curve_keypair()[1].decode() if content is None else content)
        file.chmod(mode)
        return str(file)

    def config(self, sections: dict[str, Any]) -> Path:
        (self.directory / "pool").mkdir(exist_ok=True)
        values: dict[str, Any] = {
            "runtime": {"directory": str(self.run)},
            "host": {"size": "8MiB", "directory": str(self.pool.parent)},
            "http": {"port": 0},
            "log": {"level": "error"},
        }
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section}
        file = self.directory / "c.yaml"
        file.write_text(yaml.safe_dump(values))
        return file

    def held_pool(self) -> dict[str, Any]:
        self.pool.parent.mkdir()
        pool = HostPool.open(self.pool, 8 << 20, prefault=False)
        self.held.callback(pool.close)
        return {}

    def left_pool(self) -> None:
        """A pool of an earlier sidecar, with something in it."""
        self.pool.parent.mkdir()
        pool = HostPool.open(self.pool, 8 << 20)
        offset = pool.allocate(pool.register_class(8192))
        assert offset is not None
        pool.seal(offset)
        pool.close(keep=True)


@pytest.fixture
def world(short_directory: Path) -> Iterator[World]:
    with contextlib.ExitStack() as held:
        yield World(short_directory, held)


REFUSALS: dict[str, tuple[str, Callable[[World], dict[str, Any]]]] = {}
"""What keeps `serve` from starting: by name, who words it, and what brings it about."""


def refusal(
    words: str,
) -> Callable[[Callable[[World], dict[str, Any]]], Callable[[World], dict[str, Any]]]:
    """Put a way to break a configuration's surroundings into the table."""

    def put(make: Callable[[World], dict[str, Any]]) -> Callable[[World], dict[str, Any]]:
        REFUSALS[make.__name__] = (words, make)
        return make

    return put


# --- the runtime directory -----------------------------------------------------------------------


@refusal("_unmakeable")
def runtime_directory_that_no_file_system_takes(world: World) -> dict[str, Any]:
    return {"runtime": {"directory": "/proc/kvlake"}}


@refusal("_unmakeable")
def runtime_directory_below_a_file(world: World) -> dict[str, Any]:
    (world.directory / "file").touch()
    return {"runtime": {"directory": str(world.directory / "file" / "a" / "b")}}


@refusal("_check_kind")
def runtime_directory_that_is_a_link(world: World) -> dict[str, Any]:
    (world.directory / "target").mkdir()
    world.run.symlink_to(world.directory / "target")
    return {}


@refusal("_check_kind")
def runtime_directory_that_is_a_file(world: World) -> dict[str, Any]:
    world.run.touch()
    return {}


@refusal("_check_kind")
def runtime_directory_of_another(world: World) -> dict[str, Any]:
    os.chown(world.home(), OTHER, OTHER)
    return {}


@refusal("_check_parents")
def runtime_directory_behind_a_link_of_another(world: World) -> dict[str, Any]:
    (world.directory / "target").mkdir()
    link = world.directory / "link"
    link.symlink_to(world.directory / "target")
    os.lchown(link, OTHER, OTHER)
    return {"runtime": {"directory": str(link / "run")}}


@refusal("_check_parents")
def runtime_directory_below_one_of_another(world: World) -> dict[str, Any]:
    (world.directory / "other").mkdir()
    os.chown(world.directory / "other", OTHER, OTHER)
    return {"runtime": {"directory": str(world.directory / "other" / "run")}}


@refusal("_check_parents")
def runtime_directory_below_one_that_others_can_write_to(world: World) -> dict[str, Any]:
    (world.directory / "open").mkdir()
    (world.directory / "open").chmod(0o777)
    return {"runtime": {"directory": str(world.directory / "open" / "run")}}


@refusal("_check_parents")
def runtime_directory_that_users_of_the_list_cannot_reach(world: World) -> dict[str, Any]:
    world.directory.chmod(0o700)
    return {"runtime": {"allow_uids": [OTHER]}}


@refusal("_check_entries")
def directory_in_a_sockets_place(world: World) -> dict[str, Any]:
    (world.home() / "jobs.sock").mkdir()
    return {}


@refusal("_unlockable")
def link_in_the_locks_place(world: World) -> dict[str, Any]:
    (world.home() / "lock").symlink_to(world.directory)
    return {}


@refusal("_unlockable")
def directory_in_the_locks_place(world: World) -> dict[str, Any]:
    (world.home() / "lock").mkdir()
    return {}


@refusal("_unlockable")
def pipe_in_the_locks_place(world: World) -> dict[str, Any]:
    os.mkfifo(world.home() / "lock")
    return {}


# --- secrets ---------------------------------------------------------------------------------


@refusal("read_secret")
def token_file_that_is_missing(world: World) -> dict[str, Any]:
    return {"http": {"token_file": str(world.directory / "none")}}


@refusal("read_secret")
def token_file_that_is_none(world: World) -> dict[str, Any]:
    return {"http": {"token_file": str(world.directory)}}


@refusal("read_secret")
def token_file_that_others_can_read(world: World) -> dict[str, Any]:
    return {"http": {"token_file": world.key(mode=0o644)}}


@refusal("read_secret")
def token_file_that_is_too_large(world: World) -> dict[str, Any]:
    return {"http": {"token_file": world.key("x" * 5000)}}


@refusal("read_secret")
def token_file_that_is_not_text(world: World) -> dict[str, Any]:
    return {"http": {"token_file": world.key("schlüssel")}}


@refusal("read_secret")
def token_file_that_is_empty(world: World) -> dict[str, Any]:
    return {"http": {"token_file": world.key("")}}


def events_over_tcp(world: World, key: str, **endpoints: str) -> dict[str, Any]:
    places = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}
    subscribers = [zmq.curve_keypair()[0].decode().replace("$", "$$")]
    more = {"curve_secret_key_file": key, "subscribers": subscribers}
    return {"events": {"enabled": True, **places, **endpoints, **more}}


@refusal("EventsSettings.secret_key")
def key_of_events_that_is_none(world: World) -> dict[str, Any]:
    return events_over_tcp(world, world.key("not a key"))


@refusal("read_secret")
def key_of_events_that_is_missing(world: World) -> dict[str, Any]:
    return events_over_tcp(world, str(world.directory / "none"))


# --- ports -----------------------------------------------------------------------------------


@refusal("listen_on")
def port_that_is_taken(world: World) -> dict[str, Any]:
    return {"http": {"port": world.taken_port()}}


@refusal("listen_on")
def address_of_another_machine(world: World) -> dict[str, Any]:
    return {"http": {"host": "192.0.2.1", "token_file": world.key()}}


@refusal("listen_on")
def address_that_is_none(world: World) -> dict[str, Any]:
    return {"http": {"host": "999.999.0.1", "token_file": world.key()}}


@refusal("_bind")
def port_of_events_that_is_taken(world: World) -> dict[str, Any]:
    endpoint = f"tcp://127.0.0.1:{world.taken_port()}"
    return events_over_tcp(world, world.key(), endpoint=endpoint)


@refusal("_bind")
def port_of_replays_that_is_taken(world: World) -> dict[str, Any]:
    endpoint = f"tcp://127.0.0.1:{world.taken_port()}"
    return events_over_tcp(world, world.key(), replay_endpoint=endpoint)


@refusal("_bind")
def interface_that_is_none(world: World) -> dict[str, Any]:
    return events_over_tcp(world, world.key(), endpoint="tcp://none0:9322")


@refusal("_bind")
def port_that_is_given_twice(world: World) -> dict[str, Any]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    events = events_over_tcp(world, world.key(), endpoint=f"tcp://127.0.0.1:{port}")
    return {"http": {"port": port}, **events}


# --- host memory and the store -------------------------------------------------------------------


@refusal("open_store")
def store_of_no_known_kind(world: World) -> dict[str, Any]:
    return {"store": {"url": "nosuch://bucket"}}


@refusal("Placement.of")
def node_that_this_machine_lacks(world: World) -> dict[str, Any]:
    return {"host": {"numa": [1000]}}


@refusal("_as_pool_errors")
def host_directory_that_is_missing(world: World) -> dict[str, Any]:
    return {"host": {"directory": str(world.directory / "none")}}


@refusal("_as_pool_errors")
def host_directory_that_no_file_system_takes(world: World) -> dict[str, Any]:
    return {"host": {"directory": "/sys"}}


@refusal("_as_pool_errors")
def lock_of_another(world: World) -> dict[str, Any]:
    world.lock.parent.mkdir()
    world.lock.touch()
    os.chown(world.lock, OTHER, OTHER)
    return {}


@refusal("_as_pool_errors")
def pipe_in_the_place_of_the_pools_lock(world: World) -> dict[str, Any]:
    world.lock.parent.mkdir()
    os.mkfifo(world.lock)
    return {}


@refusal("_as_pool_errors")
def lock_that_is_no_record(world: World) -> dict[str, Any]:
    world.lock.parent.mkdir()
    world.lock.write_text("precious")
    return {}


@refusal("_require_free")
def pool_of_a_sidecar_that_runs(world: World) -> dict[str, Any]:
    return world.held_pool()


@refusal("require_ours")
def pool_without_a_record(world: World) -> dict[str, Any]:
    world.pool.parent.mkdir()
    world.pool.write_text("precious")
    return {}


@refusal("require_ours")
def pool_of_another(world: World) -> dict[str, Any]:
    world.left_pool()
    os.chown(world.pool, OTHER, OTHER)
    return {}


@refusal("_require_room")
def no_room(world: World) -> dict[str, Any]:
    return {"host": {"size": "900TiB"}}


@refusal("_require_room")
def no_room_beside_what_would_be_given_back(world: World) -> dict[str, Any]:
    world.left_pool()
    return {"host": {"size": "900TiB"}}


UNREACHED = {
    "UnixListener._bind": "a socket cannot be made in a directory that was checked",
    "RuntimeDirectory._take_lock": "a sidecar that runs: its own test",
    "Placement.settle": "the kernel refuses to place memory: its own test in tests/gpu",
    "take_lock": "a lock that changes owners all the time",
    "_pool_errors": "passes on what the pool says",
    "as_pool_errors": "an error of the disk",
    "write_secret": "`kvlake keygen`",
}
"""Who else words an error, and why it is not in the table."""
LATER = ("HostPool.",)
"""Errors of a pool that is open."""
ERRORS = {"StartError", "AlreadyServed", "PoolError"}


def test_every_error_that_a_start_words_is_in_the_table() -> None:
    """A new one in `serve` needs a row here, which asks `doctor` for the same words."""
    worded = Counter(
        name
        for package in ("sidecar", "tiers")
        for path in (places.ROOT / package).rglob("*.py")
        for name in _wording(ast.parse(path.read_text()).body)
        if name not in UNREACHED and not name.startswith(LATER)
    )
    assert set(UNREACHED) <= {
        name
        for package in ("sidecar", "tiers")
        for path in (places.ROOT / package).rglob("*.py")
        for name in _wording(ast.parse(path.read_text()).body)
    }
    # `_check_entries` also says who runs already, which has a test of its own.
    worded["_check_entries"] -= 1
    assert worded - Counter(words for words, _ in REFUSALS.values()) == Counter()


def _wording(body: list[ast.stmt], within: str = "") -> Iterator[str]:
    """The functions that make an error of a start, each as often as it does."""
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from _wording(statement.body, f"{statement.name}.")
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(statement):
                match node:
                    case ast.Call(func=ast.Name(id=name)) if name in ERRORS:
                        yield within + statement.name


COUNTED = re.compile(r"has \S+ \w+ left")


@pytest.mark.promise("doctor")
@pytest.mark.parametrize("name", REFUSALS)
def test_doctor_says_what_serve_says(commands: Commands, world: World, name: str) -> None:
    if os.geteuid() and "another" in name:
        pytest.skip("gives files to another user: needs root")
    file = world.config(REFUSALS[name][1](world))
    before = tree(world.directory)
    doctor = commands.run("doctor", "--config", str(file))
    assert tree(world.directory) == before
    serve = commands.run("serve", "--config", str(file))
    assert (serve.code, serve.out) == (Exit.START, ""), serve
    sentence = serve.err.removeprefix("kvlake: ").rstrip()
    assert "\n" not in sentence
    told = [COUNTED.sub("", line) for line in doctor.lines("fail")]
    assert any(line.endswith(f": {COUNTED.sub('', sentence)}") for line in told), (sentence, told)
    assert (doctor.code, doctor.err) == (Exit.NO, "")


@pytest.mark.parametrize(
    "sections",
    [
        {"host": {"sise": 1}},
        {"runtime": {"directory": f"/{'x' * 120}"}},
        {"store": {"url": "s3://b", "tls": {"ca_file": "/none.pem"}}},
        {"store": {"url": "s3://b", "credentials": {"kind": "profile"}}},
        {"events": {"enabled": True, "endpoint": "tcp://127.0.0.1:1"}},
    ],
)
def test_what_is_wrong_in_the_file_ends_both_alike(
    commands: Commands, world: World, sections: dict[str, Any]
) -> None:
    file = str(world.config(sections))
    serve, doctor = (
        commands.run("serve", "--config", file),
        commands.run("doctor", "--config", file),
    )
    assert serve.code == Exit.USAGE
    assert doctor == serve


def left_behind(world: World) -> dict[str, Any]:
    """What a killed sidecar leaves: a lock that nobody has, sockets, a pool."""
    world.left_pool()
    home = world.home()
    (home / "lock").write_text("1")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(home / "attach.sock"))
    return {}


def too_open(world: World) -> dict[str, Any]:
    """A directory of our own whose mode `serve` sets right."""
    world.home().chmod(0o755)
    world.run.chmod(0o700)
    return {"runtime": {"allow_uids": [OTHER]}}


def missing_parents(world: World) -> dict[str, Any]:
    return {"runtime": {"directory": str(world.directory / "a" / "b" / "c"), "allow_uids": [OTHER]}}


def over_tcp_with_keys(world: World) -> dict[str, Any]:
    events = events_over_tcp(world, world.key())
    return {**events, "http": {"token_file": world.key()}}


def with_a_store(world: World) -> dict[str, Any]:
    (world.directory / "store").mkdir()
    return {"store": {"url": f"file://{world.directory}/store"}}


@pytest.mark.promise("doctor")
@pytest.mark.parametrize(
    "make",
    [left_behind, too_open, missing_parents, over_tcp_with_keys, with_a_store, lambda _: {}],
)
def test_doctor_passes_where_serve_starts(
    commands: Commands, world: World, make: Callable[[World], dict[str, Any]]
) -> None:
    world.directory.chmod(0o755)
    file = world.config(make(world))
    before = tree(world.directory)
    doctor = commands.run("doctor", "--config", str(file))
    assert (doctor.code, doctor.lines("fail")) == (Exit.OK, []), doctor
    if make is not with_a_store:
        assert tree(world.directory) == before
    assert tree(world.directory).keys() == before.keys()
    old = os.umask(0o077)
    try:
        with RunningSidecar(load(file)):
            pass
    finally:
        os.umask(old)


# --- beside a sidecar that runs ------------------------------------------------------------------


@pytest.mark.promise("doctor")
def test_a_sidecar_that_runs_is_no_fault(commands: Commands, world: World) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    file = world.config({"http": {"port": port}})
    with RunningSidecar(load(file)) as sidecar:
        before = tree(world.directory)
        ended = commands.run("doctor", "--config", str(file))
        assert (ended.code, ended.lines("fail")) == (Exit.OK, []), ended
        assert f"sidecar default: it runs (pid {os.getpid()}): ok, 0 engines" in ended.out
        assert "the sidecar that runs has its pool there" in ended.out
        assert tree(world.directory) == before
        assert sidecar.status()["ready"] is True

    # Its name and directory, and the port of another.
    (world.directory / "other").mkdir()
    another = config_in(world.directory / "other", runtime={"name": "another"})
    with RunningSidecar(load(file)), RunningSidecar(another) as other:
        port = int(other.info.http_url.rpartition(":")[2])
        file = world.config({"http": {"port": port}})
        ended = commands.run("doctor", "--config", str(file))
        assert f"{other.info.http_url} is that of another, 'another'" in ended.out
        assert ended.code == Exit.NO
        assert [line.partition(":")[0] for line in ended.lines("fail")] == [f"http.port {port}"]
        serve = commands.run("serve", "--config", str(file))
        assert serve.code == Exit.START
        assert f"a sidecar (pid {os.getpid()}) already serves {world.run / 'default'}" in serve.err


@pytest.mark.promise("doctor")
def test_a_sidecar_that_hangs_is_no_fault_of_the_port(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """Its port was taken for that of another."""
    home = world.home()
    with (home / "lock").open("w") as lock, socket.socket() as listening:
        lock.write("77")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        config = load(world.config({"http": {"port": listening.getsockname()[1]}}))
        places.patch(monkeypatch, "STATUS_SECONDS_MAX", 0.01)
        lines = {one.about: one for one in startup_findings(config)}
    assert "fail" not in {one.verdict for one in lines.values()}, lines
    asked = lines["sidecar default"]
    assert (asked.verdict, "it runs (pid 77): no answer from" in asked.found) == (
        "warn",
        True,
    )


def test_a_look_keeps_nobody_from_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pool.lock"
    with path.open("w") as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        places.patch(monkeypatch, "LOCK_RETRY_SECONDS", 0.0)
        looks = iter([None, lambda: fcntl.flock(looked_at, fcntl.LOCK_UN)])
        is_locked = pool_lock.is_locked

        def look(fd: int) -> bool:
            if (end := next(looks)) is not None:
                end()
            return is_locked(fd)

        monkeypatch.setattr(pool_lock, "is_locked", look)
        os.close(take_lock(path))
        assert next(looks, None) is None


def test_a_trial_makes_nothing_and_says_what_making_would(tmp_path: Path) -> None:
    before = tree(tmp_path)
    require_creatable(tmp_path / "a")
    assert tree(tmp_path) == before
    for parent in (tmp_path / "none", Path("/proc"), Path("/dev/null"), Path("/sys")):
        path = parent / "kvlake"
        for directory, make in ((True, path.mkdir), (False, path.touch)):
            with pytest.raises(OSError, match=r"Errno \d+") as tried:
                require_creatable(path, directory=directory)
            with pytest.raises(OSError, match=r"Errno \d+") as made:
                make()
            assert str(tried.value) == str(made.value)


# --- what is short -------------------------------------------------------------------------------


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
    told = "it is on a disk, not in a memory file system (tmpfs or hugetlbfs"
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


# --- the engine's side ---------------------------------------------------------------------------


def found(config: Config, *command: str) -> dict[str, Check]:
    return {one.about: one for one in doctor.engine_findings(config, command)}


def test_what_an_engine_would_find_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    lines = found(loads("{}"))
    assert {one.verdict for one in lines.values()} == {"pass"}, lines
    assert re.match(r"vllm\S* 0\.\d+", lines["vLLM"].found)
    assert "/run/kvlake/default/attach.sock (" in lines["engines"].found

    elsewhere = found(loads(f"runtime: {{directory: {tmp_path}}}"))["engines"]
    assert elsewhere.verdict == "warn"
    assert f"not in {tmp_path}/default/attach.sock" in elsewhere.found
    assert "`kvlake run` gives them the socket" in elsewhere.remedy


def test_a_sidecar_that_engines_find_first_is_told(
    monkeypatch: pytest.MonkeyPatch, short_directory: Path
) -> None:
    (short_directory / "own").mkdir()
    own = config_in(short_directory / "own")
    with RunningSidecar(config_in(short_directory)) as other:
        sockets = (str(other.path), str(own.runtime.attach_path))
        places.patch(monkeypatch, "sockets_of", lambda _: sockets)
        line = found(own)["engines"]
    assert line.verdict == "warn"
    assert f"{other.path} (a sidecar, pid {os.getpid()})" in line.found
    assert f": {other.path} comes before {own.runtime.attach_path}" in line.found
    line = found(own)["engines"]
    assert (line.verdict, "(none)" in line.found) == ("pass", True)


@pytest.mark.parametrize(
    ("given", "verdict", "remedy"),
    [
        ("kvlake", "pass", ""),
        ("lora_hf_hub_resolver,kvlake", "pass", ""),
        ("lora_hf_hub_resolver", "fail", "set it to lora_hf_hub_resolver,kvlake"),
        ("", "fail", "set it to kvlake, or unset it"),
    ],
)
def test_plugins_that_leave_kvlake_out_are_told(
    commands: Commands, given: str, verdict: str, remedy: str
) -> None:
    ended = commands.run("doctor", VLLM_PLUGINS=given)
    (line,) = [line for line in ended.lines(str(verdict)) if line.startswith("VLLM_PLUGINS")]
    assert remedy in line


def distribution(folder: Path, name: str, version: str, package: str) -> None:
    """Metadata of an installed distribution, and nothing of it."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{package}/__init__.py,,\n")


def test_another_package_of_the_name_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    distribution(tmp_path, "sidecar", "0.7", "sidecar")
    monkeypatch.syspath_prepend(str(tmp_path))
    line = found(loads("{}"))["packages"]
    assert line.verdict == "fail"
    assert "`sidecar` is also a package of sidecar" in line.found
    assert "pip uninstall sidecar" in line.remedy


def test_another_release_of_vllm_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.99.1")
    line = found(loads("{}"))["vLLM"]
    assert (line.verdict, "0.99.1" in line.found) == ("warn", True)
    assert "0.31, 0.32, 0.33" in line.remedy
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    lines = found(loads("{}"))
    assert "not installed in" in lines["vLLM"].found
    assert "VLLM_PLUGINS" not in lines


def test_kvlake_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    (line,) = [one for about, one in found(loads("{}")).items() if about.startswith("vLLM plugin")]
    assert line.verdict == "fail"
    assert "connector.vllm" in line.remedy


def test_the_releases_are_those_of_the_support_page() -> None:
    page = places.page("support.md").read_text()
    releases = re.findall(r"^\| (0\.\d+)\.\d+ \| works", page, re.MULTILINE)
    assert sorted(releases) == sorted(doctor.SUPPORTED)


@pytest.mark.parametrize(
    ("tokens", "command", "said"),
    [
        ("256", "vllm serve m --block-size 32", ""),
        ("100", "vllm serve m --block-size 32", "chunk.tokens=100 is not a multiple of --block-si"),
        ("100", "vllm serve m --block_size=32", "chunk.tokens=100 is not a multiple of --block-si"),
        ("100", "vllm serve m --block-size 50", ""),
        ("100", "vllm serve m --block-size some", ""),
        (None, "vllm serve m --block-size 48", ""),
        ("100", "vllm serve m", "chunk.tokens=100 is not a multiple of 16, as vLLM"),
        ("256", "python server.py", "does not name vllm"),
        ("256", "no-such-program vllm", "no such command; is vLLM installed"),
    ],
)
def test_an_engines_command_is_checked_as_run_does(
    commands: Commands, world: World, tokens: str | None, command: str, said: str
) -> None:
    binaries = world.directory / "bin"
    binaries.mkdir()
    for name in ("vllm", "python"):
        (binaries / name).write_text("#!/bin/sh\n")
        (binaries / name).chmod(0o755)
    file = str(world.config({"chunk": {"tokens": int(tokens)}} if tokens else {}))
    words = ["--config", file, "--", *command.split()]
    path = f"{binaries}:{os.environ['PATH']}"
    doctor = commands.run("doctor", *words, PATH=path)
    assert (doctor.code, doctor.err) == (Exit.NO if said else Exit.OK, ""), doctor
    if said:
        (line,) = doctor.lines("fail")
        run = commands.run("run", *words, PATH=path)
        assert said in line
        assert (run.code, run.err) == (Exit.USAGE, f"kvlake: {line.partition(': ')[2]}\n")
    else:
        assert f"engine command: {command}" in doctor.lines("pass")


def test_chunks_that_fit_no_block_are_told_without_a_command() -> None:
    assert found(loads("chunk: {tokens: 256}"))["chunk.tokens"].verdict == "pass"
    assert found(loads("chunk: {tokens: 100}"))["chunk.tokens"].verdict == "warn"


def test_neither_vllm_nor_torch_is_imported() -> None:
    script = (
        "import sys; from sidecar.cli import main; main(['doctor'])\n"
        "sys.exit(str({'vllm', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=places.ROOT
    )
    assert done.stderr == "set()\n"


def test_remedies_name_the_configuration_that_was_used(tmp_path: Path) -> None:
    file = tmp_path / "my sidecar.yaml"
    file.write_text("{}")
    assert load(file).option == f" --config '{file}'"
    assert (load(None).option, loads("{}").option) == ("", "")
