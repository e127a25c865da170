"""`kvlake doctor` says what `kvlake serve` says, in real processes, and leaves no trace."""

from __future__ import annotations

import ast
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from sidecar.cli.doctor import store_finding
from sidecar.config.model import load, loads
from sidecar.exits import Exit
from sidecar.service.store_stack import open_store
from tests import places
from tests.sidecar.client import RunningSidecar
from tests.sidecar.commands import Commands, commands, tree
from tests.sidecar.doctor_world import OTHER, World, events_over_tcp, world
from tests.sidecar.replacing import Replacing

__all__ = ["commands", "world"]


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
    "Server.start": "a limit of threads: its own test",
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


def with_a_store_to_read(world: World) -> dict[str, Any]:
    return {"store": {**with_a_store(world)["store"], "write": "off"}}


@pytest.mark.promise("doctor")
@pytest.mark.parametrize(
    "make",
    [
        *(left_behind, too_open, missing_parents, over_tcp_with_keys),
        *(with_a_store, with_a_store_to_read, lambda _: {}),
    ],
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


def test_a_store_that_is_only_read_must_list(commands: Commands, world: World) -> None:
    (world.directory / "store").write_text("a file")
    store = {"url": f"file://{world.directory}/store", "write": "off"}
    doctor = commands.run("doctor", "--config", str(world.config({"store": store})))
    [told] = doctor.lines("fail")
    assert "a file stands where a folder is needed" in told
    assert f"list file://{world.directory}/store/probe" in told
    assert doctor.code == Exit.NO


def test_a_store_without_exclusive_create_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """It passed, although `kvlake gc` refuses such a store."""
    config = load(world.config(with_a_store(world)))
    places.patch(monkeypatch, "open_store", lambda settings: open_store(settings, Replacing))
    told = anyio.run(store_finding, config)
    assert told.verdict == "warn"
    assert "is not compacted, `kvlake gc` refuses it, and no bound on it holds" in told.found
    assert "lifecycle rule" in told.remedy


def test_remedies_name_the_configuration_that_was_used(tmp_path: Path) -> None:
    file = tmp_path / "my sidecar.yaml"
    file.write_text("{}")
    assert load(file).option == f" --config '{file}'"
    assert (load(None).option, loads("{}").option) == ("", "")
