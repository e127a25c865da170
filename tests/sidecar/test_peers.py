"""Who can reach a sidecar: the runtime directory, and the user that the kernel names."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sidecar.config.model import ConfigError, loads
from sidecar.config.sections import RuntimeSettings
from sidecar.errors import StartError
from sidecar.protocol import Outcome
from sidecar.service.runtime_dir import RuntimeDirectory
from sidecar.service.watchdog import SelfChecks
from tests import places
from tests.mappings import open_fds
from tests.sidecar.client import RunningSidecar, Worker, config_in, key_of
from tests.sidecar.configurations import with_events
from tests.sidecar.test_job_socket import GREETING, frame, ready

OTHER, STRANGER = 61_001, 61_002

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: needs root")


# --- the directory -------------------------------------------------------------------------------


def opened(directory: Path, **settings: Any) -> RuntimeDirectory:
    return RuntimeDirectory(RuntimeSettings(directory=directory, name="a", **settings))


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_it_is_ours_alone(short_directory: Path) -> None:
    home = opened(short_directory / "made" / "here")
    assert mode_of(home.path) == 0o700
    assert mode_of(home.path / "lock") == 0o600
    assert home.socket_mode == 0o600
    home.close()


def test_one_that_was_too_open_is_closed(short_directory: Path) -> None:
    (short_directory / "a").mkdir(mode=0o755)
    opened(short_directory).close()
    assert mode_of(short_directory / "a") == 0o700


def test_sockets_of_another_that_has_it_are_left_alone(short_directory: Path) -> None:
    first = opened(short_directory)
    first.path.rename(short_directory / "moved")
    second = opened(short_directory)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(second.attach_path))
        first.remove_sockets()
        first.close()
        assert second.attach_path.exists()
        second.close()
        assert not second.attach_path.exists()


def test_a_full_disk_does_not_keep_it_from_being_taken_again(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    home = opened(short_directory)
    before = open_fds()
    shutil.rmtree(home.path)
    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", full)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                home.retake()
    assert open_fds() == before
    home.retake()
    assert home.held()
    home.close()


def test_a_sidecar_that_stops_leaves_the_sockets_of_another(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first might have its directory again before the other takes it.
    monkeypatch.setattr(SelfChecks, "repair", lambda _: None)
    first = RunningSidecar(config_in(short_directory))
    first.path.parent.rename(short_directory / "moved")
    config = with_events(short_directory, host={"directory": short_directory})
    with RunningSidecar(config) as other:
        there = sorted(os.listdir(other.path.parent))
        first.stop()
        assert sorted(os.listdir(other.path.parent)) == there
        with Worker(other.path) as worker:
            assert worker.store(1, key_of("other"), [0]) is Outcome.OK


def test_a_shared_one_can_be_passed_and_not_listed(short_directory: Path) -> None:
    short_directory.chmod(0o711)
    home = opened(short_directory / "run", allow_uids=(OTHER,))
    assert mode_of(home.path) == 0o711
    assert mode_of(home.path.parent) == 0o711
    assert home.socket_mode == 0o666
    home.close()


def test_a_shared_one_that_nobody_can_reach_is_refused(short_directory: Path) -> None:
    closed = short_directory / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(StartError, match=rf"cannot pass through {closed} \(mode 0700\)"):
        opened(closed / "run", allow_uids=(OTHER,))


@pytest.mark.promise("parent-directory")
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_parent_that_others_can_write_to_is_refused(short_directory: Path, mode: int) -> None:
    short_directory.chmod(mode)
    with pytest.raises(StartError, match=r"lets others replace.*chmod go-w") as caught:
        opened(short_directory / "run")
    assert f"mode {mode:04o}" in str(caught.value)
    opened(short_directory / "run", strict_parents=False).close()
    short_directory.chmod(mode | 0o1000)
    opened(short_directory / "run").close()


@pytest.mark.promise("symbolic-link")
@pytest.mark.parametrize("level", ["directory", "name"])
def test_a_symbolic_link_is_refused(short_directory: Path, level: str) -> None:
    target = short_directory / "target"
    target.mkdir()
    directory = short_directory / "run"
    if level == "directory":
        directory.symlink_to(target)
    else:
        directory.mkdir()
        (directory / "a").symlink_to(target)
    with pytest.raises(StartError, match=rf"symbolic link.*{target}"):
        opened(directory)
    assert list(target.iterdir()) in ([], [target / "a"])


@pytest.mark.parametrize("text", ["", "many", "-3", "9" * 40, "\ud800"])
def test_a_damaged_note_of_what_was_lost_counts_as_none(short_directory: Path, text: str) -> None:
    home = opened(short_directory)
    home.write_lost(3)
    (note,) = (path for path in home.path.iterdir() if path.read_text() == "3")
    note.write_bytes(text.encode(errors="surrogatepass"))
    assert home.read_lost() == 0
    home.close()


def test_a_file_in_its_place_is_refused(short_directory: Path) -> None:
    (short_directory / "a").touch()
    with pytest.raises(StartError, match=r"cannot be made|not a directory"):
        opened(short_directory)


@needs_root
@pytest.mark.parametrize("which", ["own", "parent", "link"])
def test_what_belongs_to_somebody_else_is_refused(short_directory: Path, which: str) -> None:
    directory = short_directory / "run"
    directory.mkdir()
    if which == "own":
        (directory / "a").mkdir()
        os.chown(directory / "a", OTHER, OTHER)
    elif which == "parent":
        os.chown(directory, OTHER, OTHER)
    else:
        link = short_directory / "link"
        link.symlink_to(directory)
        os.lchown(link, OTHER, OTHER)
        directory = link / "deeper"
    with pytest.raises(StartError, match=f"uid {OTHER}"):
        opened(directory)


def test_the_lock_is_no_way_to_write_elsewhere(short_directory: Path) -> None:
    victim = short_directory / "victim"
    victim.write_text("kept")
    home = short_directory / "a"
    home.mkdir(mode=0o700)
    (home / "lock").symlink_to(victim)
    with pytest.raises(StartError, match=r"symbolic links.*remove that file"):
        opened(short_directory)
    assert victim.read_text() == "kept"


# --- users ---------------------------------------------------------------------------------------

# Everything is imported as root, since the interpreter may lie where only root can read.
BECOME = """
import os, socket, sys
from pathlib import Path
import numpy.ma, numpy.random
from tests.sidecar.client import RefusedError, Worker, key_of
uid = int(sys.argv[1])
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
where = sys.argv[2]
"""
CLIENT = """
try:
    with Worker(Path(where)) as worker:
        content = worker.fill([0], seed=1)
        print(worker.store(1, key_of("other"), [0]).name, end=" ")
        print(worker.load(2, key_of("other"), [1]).name, worker.read(1) == content[0])
except (RefusedError, PermissionError) as error:
    print("refused", error)
"""
RAW = f"""
s = socket.socket(socket.AF_UNIX); s.settimeout(30); s.connect(where)
try:
    s.sendall({GREETING + ready(b"") + frame(b"hello")!r})
    while s.recv(4096): pass
except ConnectionError: pass
"""
FLOOD = """
s = socket.socket(socket.AF_UNIX); s.connect(where); s.settimeout(30)
try:
    for _ in range(1000): s.sendall(bytes(65536))
except OSError: print("cut")
"""


def run_as(uid: int, script: str, where: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BECOME + script, str(uid), str(where)],
        cwd=places.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.promise("listed-users")
@needs_root
def test_a_listed_user_is_served_and_another_is_told_why_not(short_directory: Path) -> None:
    short_directory.chmod(0o711)
    config = config_in(short_directory, runtime={"allow_uids": [OTHER]})
    with RunningSidecar(config) as sidecar:
        assert run_as(OTHER, CLIENT, sidecar.path) == "OK OK True"
        said = run_as(STRANGER, CLIENT, sidecar.path)
        assert said.startswith(f"refused user: uid={STRANGER}: this sidecar serves the uids")
        assert str(OTHER) in said
        assert "runtime.allow_uids" in said
        status = sidecar.status()
        assert status["sockets"]["attaches_refused"] == {"user": 1}
        metrics = sidecar.get("/metrics")
        assert b'kvlake_attaches_refused_total{code="user"} 1.0' in metrics
        with Worker(sidecar.path) as own:
            assert own.store(1, key_of("own"), [0]) is Outcome.OK


@needs_root
def test_without_a_list_others_do_not_even_reach_the_socket(short_directory: Path) -> None:
    short_directory.chmod(0o711)
    with RunningSidecar(config_in(short_directory)) as sidecar:
        assert "Permission denied" in run_as(OTHER, CLIENT, sidecar.path)
        assert sidecar.status()["sockets"]["attaches_refused"] == {}


@pytest.mark.promise("jobs-socket")
@needs_root
def test_a_stranger_gets_no_frame_in_on_the_jobs_socket(short_directory: Path) -> None:
    short_directory.chmod(0o711)
    config = config_in(short_directory, runtime={"allow_uids": [OTHER]})
    with RunningSidecar(config) as sidecar:
        # The stranger is not even asked for a token; the listed user has none. Neither is read.
        jobs = sidecar.endpoint.removeprefix("ipc://")
        run_as(STRANGER, RAW, jobs)
        assert sidecar.status()["sockets"]["frames_refused"] == {}
        metrics = sidecar.get("/metrics").decode()
        assert 'kvlake_handshakes_refused_total{why="user"} 0.0' not in metrics
        run_as(OTHER, RAW, jobs)
        sockets = sidecar.status()["sockets"]
        assert set(sockets["frames_refused"]) == {"unknown_peer"}
        assert sockets["frames_received"] == 0


@needs_root
def test_a_stranger_who_sends_without_reading_is_cut_off(short_directory: Path) -> None:
    short_directory.chmod(0o711)
    config = config_in(short_directory, runtime={"allow_uids": [OTHER]})
    with RunningSidecar(config) as sidecar:
        assert run_as(STRANGER, FLOOD, sidecar.path) == "cut"
        with Worker(sidecar.path) as own:
            assert own.store(1, key_of("own"), [0]) is Outcome.OK


HAMMER = """
import time
until = time.monotonic() + 60
held = []
print("begun", flush=True)
while time.monotonic() < until and not os.path.exists(where + ".stop"):
    s = socket.socket(socket.AF_UNIX)
    s.setblocking(False)
    try:
        s.connect(where)
        held.append(s)
    except OSError:
        s.close()
    for old in held[:-200]:
        old.close()
    del held[:-200]
"""


def patient_worker(path: Path) -> Worker:
    """As the connector does: the kernel's queue may be full, and then it tries again."""
    while True:
        try:
            return Worker(path)
        except BlockingIOError:
            time.sleep(0.01)


@pytest.mark.promise("stranger-flood")
@needs_root
def test_a_stranger_who_hammers_keeps_nobody_out_and_fills_no_log(
    short_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """11 of 62 attaches got through beside one, and 8,831 lines of the log told of it."""
    short_directory.chmod(0o711)
    config = config_in(short_directory, runtime={"allow_uids": [OTHER]})
    with RunningSidecar(config) as sidecar:
        stop = Path(f"{sidecar.path}.stop")
        command = [sys.executable, "-c", BECOME + HAMMER, str(STRANGER), str(sidecar.path)]
        with subprocess.Popen(command, cwd=places.ROOT, stdout=subprocess.PIPE) as hammer:
            assert hammer.stdout is not None
            assert hammer.stdout.readline() == b"begun\n"
            try:
                for number in range(20):
                    with patient_worker(sidecar.path) as worker:
                        assert worker.store(1, key_of(number), [0]) is Outcome.OK
                sidecar.wait_until(
                    lambda now: now["sockets"]["attaches_refused"].get("user", 0) > 1000
                )
            finally:
                stop.touch()
        refused = [one for one in caplog.records if "attach refused" in one.getMessage()]
        assert len(refused) == 1
        assert sidecar.status()["sockets"]["connections_cut"] == 0


# --- configuration -------------------------------------------------------------------------------


def test_uids_are_numbers_of_users() -> None:
    environment = {"ENGINE_UID": "1001"}
    config = loads("runtime: {allow_uids: ['${ENGINE_UID}', 7]}", environment=environment)
    assert config.runtime.allow_uids == (1001, 7)
    assert set(config.runtime.served_uids) == {os.geteuid(), 0, 7, 1001}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[-1]", "-1 is no user id"),
        ("[4294967295]", "is no user id"),
        ("[65534]", "every user that this user namespace does not map"),
        ("[vllm]", "integer"),
        ("1001", "tuple"),
    ],
)
def test_what_is_no_uid_is_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loads(f"runtime: {{allow_uids: {given}}}")


@pytest.mark.promise("session-limit")
def test_a_client_that_says_nothing_is_not_waited_for(short_directory: Path) -> None:
    config = config_in(short_directory, limits={"attach_deadline": 0.5})
    with RunningSidecar(config) as sidecar:
        silent = [socket.socket(socket.AF_UNIX) for _ in range(20)]
        for one in silent:
            one.connect(str(sidecar.path))
        late = 0
        while True:
            # On a machine that pauses it may not be in time itself, and attaches again.
            try:
                worker = Worker(sidecar.path)
                break
            except (EOFError, ConnectionError):
                late += 1
        with worker:
            assert worker.store(1, key_of("x"), [0]) is Outcome.OK
        deadline = time.monotonic() + 30
        for one in silent:
            one.settimeout(deadline - time.monotonic())
            assert one.recv(1) == b"", "a client that did not attach in time is cut off"
            one.close()
        sidecar.wait_until(lambda now: now["sockets"]["attaches_expired"] == 20 + late)
