"""`kvlake run`: a sidecar and an engine as one command.

Owns both processes, each in a session of its own: start, wait, restart, drain, or joining a sidecar
that runs already; and the signals, because every wait here ends with one.

The first `run` starts the sidecar. Each further one joins it: it holds a shared lock on a file
beside the socket while it runs. The sidecar ends when the process that started it has ended and
nobody holds that lock. It holds a lock itself, on its runtime directory. The kernel releases a lock
however its holder ends.

Invariants:

* The exit code is the engine's (128 + n if signal n killed it), whatever the sidecar did.
* A signal for this process goes to the engine, once: a terminal's Ctrl-C reaches only this
  process, because the children have no terminal.
* Neither child speaks to the service manager: this process is the service's main one, says READY
  once the engine is started, and feeds the manager's watchdog while it runs.
* Restarts back off to at most `RESTART_SECONDS_MAX`. A sidecar that is stopped has its configured
  time to drain, and some more, before it is killed, unless others have joined it.
"""

import contextlib
import fcntl
import functools
import io
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Final

from sidecar.cli.console import CommandError, NotStarted, Options, complain, load_config
from sidecar.cli.run.engine_command import check_command, event_sockets, shown, with_events
from sidecar.config.model import Config
from sidecar.exits import STOP_SIGNALS, Exit
from sidecar.protocol.peer import Peer, is_trusted, peer_of
from sidecar.service.systemd import Notifier, without_notify

FORWARDED: Final = (*STOP_SIGNALS, signal.SIGHUP)
LOCK: Final = "runs.lock"
POLL_SECONDS: Final = 0.5
"""How often a sidecar checks whether a `run` still needs it, and a `run` whether it still runs."""
CONNECT_SECONDS_MAX: Final = 5.0
log: Final = functools.partial(complain, command="kvlake run")
RESTART_SECONDS_FIRST: Final = 0.5
RESTART_SECONDS_MAX: Final = 30.0
HEALTHY_SECONDS: Final = 60.0
"""A sidecar that lived this long is restarted at once when it dies."""
DRAIN_GRACE_SECONDS: Final = 20.0
"""More than the sidecar's end may take after its drain, even with a thread that hangs. Killed
earlier, it would leave a pool behind that is to be removed."""
JOIN_SECONDS: Final = 0.2
_READY_SECONDS_BASE: Final = 60.0
# Touching memory for the first time runs at 1 to 2 GB/s on one core; a quarter of that is allowed.
_PREFAULT_BYTES_PER_SECOND_MIN: Final = 256 << 20


def main(options: Options) -> int:
    """Start both, and end with the engine's exit code."""
    config = load_config(options.config)
    return run(config, serve_command(options.config), options.command, optional=options.optional)


def serve_command(config_path: Path | None) -> list[str]:
    """The command that starts the sidecar as a child of this process."""
    # -P: a `sidecar` in the current folder is not imported.
    command = [sys.executable, "-P", "-m", "sidecar.cli", "serve", "--parent-pid", str(os.getpid())]
    return command if config_path is None else [*command, "--config", str(config_path)]


def run(
    config: Config, serve: Sequence[str], command: Sequence[str], *, optional: bool = False
) -> int:
    """Start the sidecar with `serve`, then the engine with `command`; the engine's exit code.

    With `optional`, the engine is also started if the sidecar cannot be, which is then retried.
    Raises `CommandError` if one of the two cannot be started; the other is stopped again.
    """
    home = config.runtime.home
    for folder in (home.parent, home):
        # What cannot be examined, the sidecar refuses, with a remedy.
        with contextlib.suppress(OSError):
            _require_trusted(folder, folder.lstat().st_uid)
    sockets = event_sockets(home)
    engine_command = with_events(check_command(command, config), config, sockets)
    sidecar = SupervisedSidecar(config, serve)
    notifier = Notifier()
    with signals() as wakeup:
        try:
            notifier.status("starting the sidecar")
            notifier.extend(sidecar.ready_seconds_max)
            try:
                sidecar.start(wakeup)
            except NotStarted as error:
                if not optional:
                    raise
                log(f"{error}; the engine starts without it, because of --optional")
                sidecar.retry()
            log(f"starting {shown(engine_command)}")
            return _run_engine(engine_command, sidecar, wakeup, notifier)
        except Interrupted as interrupted:
            return 128 + interrupted.number
        finally:
            for path in sockets:
                # An engine that was killed leaves them.
                with contextlib.suppress(OSError):
                    path.unlink()
            notifier.stopping("the sidecar drains")
            notifier.extend(config.limits.drain_seconds_max + DRAIN_GRACE_SECONDS)
            sidecar.stop(wakeup)


def _run_engine(
    command: Sequence[str], sidecar: "SupervisedSidecar", wakeup: socket.socket, notifier: Notifier
) -> int:
    try:
        engine = subprocess.Popen(command, start_new_session=True, env=without_notify(os.environ))
    except OSError as error:
        raise CommandError(f"{command[0]}: cannot be started: {error}") from error
    try:
        notifier.ready("the engine runs, with a sidecar beside it")
        beat = None if notifier.watchdog_seconds is None else notifier.watchdog_seconds / 3
        while (code := engine.poll()) is None:
            notifier.alive()
            times = [seconds for seconds in (sidecar.watch(), beat) if seconds is not None]
            if select.select([wakeup], [], [], min(times, default=None))[0]:
                for number in forwarded(wakeup):
                    engine.send_signal(number)
    finally:
        # Only a bug of this file gets here with a living engine; it must not stay.
        if engine.poll() is None:
            engine.kill()
            engine.wait()
    return code if code >= 0 else 128 - code


# --- the sidecar ---------------------------------------------------------------------------------


class Interrupted(Exception):
    """A signal arrived before the engine was started."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def has_joined(directory: Path) -> bool:
    """Whether a `run` has joined the sidecar of this runtime directory."""
    return _is_held(directory / LOCK, fcntl.LOCK_EX)


def is_locked(directory: Path) -> bool:
    """Whether a sidecar, ready or not, has this runtime directory."""
    return _is_held(directory / "lock", fcntl.LOCK_SH)


def _is_held(path: Path, operation: int) -> bool:
    """Whether locks of others exclude this one; false if there is no file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def listener(attach_path: Path) -> Peer:
    """The process that listens on a socket. Raises `OSError` if none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_SECONDS_MAX)
        connection.connect(str(attach_path))
        return peer_of(connection)


def _require_trusted(path: Path, uid: int) -> None:
    """Raise `CommandError` for what another user has in /tmp, where anybody may make a directory.

    An engine with the socket in it would send its KV memory to that user.
    """
    if path.is_relative_to("/tmp") and not is_trusted(uid):  # noqa: S108
        raise CommandError(
            f"{path} belongs to uid {uid}, not to uid {os.geteuid()}: another user made it; set "
            "runtime.directory to a folder of yours, outside /tmp"
        )


class SupervisedSidecar:
    """The sidecar of one `kvlake run`: its own process, or one that another `run` started."""

    def __init__(self, config: Config, command: Sequence[str]) -> None:
        self._config = config
        self._home = config.runtime.home
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: io.FileIO | None = None
        """From the process: a line when it serves, and the end when it stops."""
        self._started = 0.0
        self._joined_fd: int | None = None
        self._delay_seconds = RESTART_SECONDS_FIRST
        self._restart_at: float | None = None

    @property
    def ready_seconds_max(self) -> float:
        """How long a start may take: the more memory is touched first, the longer."""
        prefault = self._config.host.size if self._config.host.prefault else 0
        return _READY_SECONDS_BASE + prefault / _PREFAULT_BYTES_PER_SECOND_MIN

    def start(self, wakeup: socket.socket) -> None:
        """Start it and wait until it serves, or join the one that serves.

        Raises:
            CommandError: it ended.
            NotStarted: it was not ready in time, or a later attempt may succeed.
            Interrupted: a signal came first.
        """
        deadline = time.monotonic() + self.ready_seconds_max
        while not (self._join() or self._start_own(wakeup, deadline)):
            # Another one has the lock: it is not ready yet, or drains.
            if select.select([wakeup], [], [], JOIN_SECONDS)[0]:
                _interrupt(wakeup)

    def _join(self) -> bool:
        """Join the sidecar that serves; False if none does, or it cannot be joined."""
        path = self._config.runtime.attach_path
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            peer = listener(path)
            _require_trusted(path, peer.uid)
            fd = os.open(path.with_name(LOCK), flags, 0o600)
            fcntl.flock(fd, fcntl.LOCK_SH)
        except OSError:
            return False
        self._joined_fd = fd
        log(
            f"a sidecar (pid {peer.pid}) serves {path}: joined it, with the configuration that it "
            "was started with"
        )
        return True

    def _leave(self) -> None:
        if self._joined_fd is not None:
            os.close(self._joined_fd)
            self._joined_fd = None

    def _start_own(self, wakeup: socket.socket, deadline: float) -> bool:
        """Whether it serves. False if another one starts instead."""
        try:
            process, pipe = self._spawn()
        except OSError as error:
            raise NotStarted(f"the sidecar cannot be started: {error}") from error
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise NotStarted(
                    f"the sidecar was not ready after {self.ready_seconds_max:.0f} s; see its "
                    "lines above. A large host.size starts faster with host.prefault: false"
                )
            readable, _, _ = select.select([pipe.fileno(), wakeup.fileno()], [], [], left)
            if wakeup.fileno() in readable:
                _interrupt(wakeup)
            if pipe.fileno() in readable:
                if pipe.read(1):
                    return True
                code = process.wait()
                if select.select([wakeup], [], [], 0)[0]:
                    _interrupt(wakeup)
                if code == Exit.START and is_locked(self._home) and left > JOIN_SECONDS:
                    return False
                # Another code, such as that of a signal, may be another one next time.
                kind = CommandError if code == Exit.USAGE else NotStarted
                raise kind(f"the sidecar ended with code {code}; see its lines above")

    def _spawn(self) -> tuple[subprocess.Popen[bytes], io.FileIO]:
        """The process and its pipe. Raises `OSError`."""
        self._started = time.monotonic()
        self._restart_at = None
        self._close_pipe()
        reader, writer = os.pipe()
        pipe = self._pipe = io.FileIO(reader)
        os.set_blocking(reader, False)
        try:
            process = self._process = subprocess.Popen(
                [*self._command, "--ready-fd", str(writer)],
                stdin=subprocess.DEVNULL,
                # The engine's standard output stays the engine's own.
                stdout=sys.stderr.fileno(),
                pass_fds=(writer,),
                start_new_session=True,
                env=without_notify(os.environ),
            )
        finally:
            os.close(writer)
        return process, pipe

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def watch(self) -> float | None:
        """Restart it if it died and its delay is over. Seconds until the next call, if any."""
        now = time.monotonic()
        if self._joined_fd is not None:
            if is_locked(self._home):
                return POLL_SECONDS
            self._leave()
            log("the sidecar that was joined ended; the engine continues without a cache")
            self._start_later()
        elif self._restart_at is None:
            assert self._process is not None
            code = self._process.poll()
            if code is None:
                return None
            if now - self._started >= HEALTHY_SECONDS:
                self._delay_seconds = RESTART_SECONDS_FIRST
            ending = f"code {code}" if code >= 0 else signal.Signals(-code).name
            log(
                f"the sidecar ended ({ending}); the engine continues without a cache, next start "
                f"in {self._delay_seconds:g} s"
            )
            self._start_later()
        assert self._restart_at is not None
        if now < self._restart_at:
            return self._restart_at - now
        if self._join():
            self._restart_at = None
            return POLL_SECONDS
        try:
            self._spawn()
        except OSError as error:
            # Out of memory, for example, that the dead one has not freed yet.
            log(
                f"the sidecar cannot be started ({error}); the engine continues without a cache, "
                f"next attempt in {self._delay_seconds:g} s"
            )
            return self._start_later()
        return None

    def retry(self) -> None:
        """Have `watch` start it, unless one is starting."""
        if self._process is None or self._process.poll() is not None:
            self._start_later()

    def _start_later(self) -> float:
        """Have `watch` start it after a delay, which doubles each time; seconds until then."""
        seconds = self._delay_seconds
        self._restart_at = time.monotonic() + seconds
        self._delay_seconds = min(2 * seconds, RESTART_SECONDS_MAX)
        return seconds

    def stop(self, wakeup: socket.socket) -> None:
        """Drain it, and kill it at the deadline or at another signal.

        One that others have joined continues for them, and drains when the last of them has ended.
        """
        try:
            self._stop(wakeup)
        finally:
            self._leave()
            self._close_pipe()

    def _stop(self, wakeup: socket.socket) -> None:
        process = self._process
        if self._joined_fd is not None or process is None or process.poll() is not None:
            return
        if has_joined(self._home):
            log(f"the sidecar (pid {process.pid}) continues for others that joined it")
            return
        if not self._drains():
            process.terminate()
        deadline = time.monotonic() + self._config.limits.drain_seconds_max + DRAIN_GRACE_SECONDS
        while process.poll() is None and (left := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([wakeup], [], [], left)
            if readable and forwarded(wakeup):
                break
        if process.poll() is None:
            log("the sidecar did not drain in time; it is killed, unwritten chunks are lost")
            process.kill()
            process.wait()

    def _drains(self) -> bool:
        """Whether it stops already, because a service manager signals every process of a service.

        A second signal would end the drain. A missing socket says nothing: others remove files.
        """
        assert self._pipe is not None
        while read := self._pipe.read(select.PIPE_BUF):
            pass
        return read is not None


def forwarded(wakeup: socket.socket) -> list[int]:
    """The signals for the engine that arrived, each once; SIGCHLD only wakes."""
    return [number for number in dict.fromkeys(wakeup.recv(4096)) if number in FORWARDED]


def _interrupt(wakeup: socket.socket) -> None:
    """Raise `Interrupted` if a signal arrived."""
    for number in forwarded(wakeup):
        raise Interrupted(number)


@contextlib.contextmanager
def signals() -> Generator[socket.socket]:
    """Signals as bytes on a socket, so that one `select` waits for them and for the children."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)

    def nothing(_number: int, _frame: object) -> None:
        """The number is in the socket already."""

    # What is ignored stays ignored, here and in the engine: that is how nohup works.
    taken = [n for n in FORWARDED if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, nothing) for number in (*taken, signal.SIGCHLD)}
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()
