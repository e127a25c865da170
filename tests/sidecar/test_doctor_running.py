"""`kvlake doctor` beside a sidecar that runs: it finds no fault, and disturbs nobody."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli.doctor import startup_findings
from sidecar.config.model import load
from sidecar.exits import Exit
from tests import places
from tests.sidecar.client import RunningSidecar, config_in
from tests.sidecar.commands import Commands, commands, tree
from tests.sidecar.doctor_world import World, events_over_tcp, world
from tiers.pool import lock as pool_lock
from tiers.pool.lock import require_creatable, take_lock

__all__ = ["commands", "world"]


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.mark.promise("doctor")
def test_a_sidecar_that_runs_is_no_fault(commands: Commands, world: World) -> None:
    with RunningSidecar(load(world.config({}))) as sidecar:
        file = world.config({"http": {"port": port_of(sidecar.info.http_url)}})
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
    with RunningSidecar(load(world.config({}))), RunningSidecar(another) as other:
        port = port_of(other.info.http_url)
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


@pytest.mark.promise("doctor")
@pytest.mark.parametrize("cause", ["new token", "unreadable token", "port 0"])
def test_the_ports_of_a_sidecar_that_cannot_be_asked_are_no_faults(
    commands: Commands, world: World, cause: str
) -> None:
    """They were taken for those of another, and the remedy was another port."""
    token = Path(world.key("first"))
    sections: dict[str, Any] = {"http": {"token_file": str(token)}}
    if cause == "port 0":
        sections = events_over_tcp(world, world.key())
    with RunningSidecar(load(world.config(sections))) as sidecar:
        if cause == "port 0":
            sections["events"]["endpoint"] = sidecar.events
            about = f"events.endpoint {sidecar.events}"
        else:
            port = sections["http"]["port"] = port_of(sidecar.info.http_url)
            about = f"http.port {port}"
        file = world.config(sections)
        if cause == "new token":
            token.write_text("second")
        elif cause == "unreadable token":
            token.chmod(0o644)
        ended = commands.run("doctor", "--config", str(file))
    [line] = [line for line in ended.lines("warn") if line.startswith(about)]
    assert "nothing to do if it is that of the sidecar that runs, which could not be asked" in line
    # A token that others can read is a fault of its own.
    failed = [f"http.token_file {token}"] if cause == "unreadable token" else []
    assert [line.partition(":")[0] for line in ended.lines("fail")] == failed, ended
    assert ended.code == (Exit.NO if failed else Exit.OK)


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
