"""`kvlake run`: a sidecar and an engine as one command.

Owns two child processes, each in a session of its own: the sidecar, started first and waited for,
started again when it dies, drained at the end; and the engine, whose life is the command's life.
Also owns how the connector's options get into the engine's command line. Does not own what either
does.

Invariants:

* The exit code is the engine's (128 + n where signal n killed it), whatever the sidecar did.
* A signal for this process goes to the engine, once: a terminal's Ctrl-C reaches only this
  process, because the children have no terminal.
* The sidecar outlives this process only for others that joined it (`joined.py`). Else it is given
  `drain_seconds_max` and some grace to end by itself before it is killed.
* A sidecar that serves already is joined; when it ends, one of those beside it starts the next.
* Of the two children neither speaks to the service manager: this process is the service's main one,
  says READY once the engine is started, and feeds the manager's watchdog as long as it turns.
* Restarts of a sidecar back off to at most `RESTART_SECONDS_MAX`; the engine serves on meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from sidecar.cli.blocksize import OPTION, misfit
from sidecar.cli.joined import LOOK_SECONDS, Joined, locked, needed
from sidecar.exits import Exit
from sidecar.service.systemd import Notifier, without_notify

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from types import FrameType

    from sidecar.config.model import Config

CONNECTOR: Final = "KVLakeConnector"
CHUNK_SETTING: Final = "chunk.tokens"
EVENTS_OPTION: Final = "--kv-events-config"
FORWARDED: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
RESTART_SECONDS_FIRST: Final = 0.5
RESTART_SECONDS_MAX: Final = 30.0
HEALTHY_SECONDS: Final = 60.0
"""A sidecar that lived this long is restarted at once when it dies."""
DRAIN_GRACE_SECONDS: Final = 20.0
"""Beyond all that the sidecar's own end may take after its drain, also where a thread of it hangs:
killed before that, it would leave a pool behind that is to be removed."""
JOIN_SECONDS: Final = 0.2
_READY_SECONDS_BASE: Final = 60.0
# Touching memory for the first time runs at 1 to 2 GB/s on one core; a quarter of that is allowed.
_PREFAULT_BYTES_PER_SECOND_MIN: Final = 256 << 20


class LaunchError(Exception):
    """The command cannot be started; the message says what to change."""

    def __init__(self, message: str, code: Exit = Exit.USAGE) -> None:
        super().__init__(message)
        self.code = code


def say(text: str) -> None:
    """One line to standard error, marked as this command's own."""
    sys.stderr.write(f"kvlake run: {text}\n")
    sys.stderr.flush()


# --- the engine's command line -------------------------------------------------------------------


def transfer_config(config: Config) -> dict[str, object]:
    """What vLLM takes as `--kv-transfer-config` to use this configuration's sidecar."""
    extra: dict[str, object] = {"socket": str(config.runtime.attach_path)}
    if (tokens := own_chunk_tokens(config)) is not None:
        extra["chunk_tokens"] = tokens
        extra["chunk_tokens_from"] = CHUNK_SETTING
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        # vLLM's own default ends a request whose load failed; a cache fault must only cost time.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def own_chunk_tokens(config: Config) -> int | None:
    """`chunk.tokens` where the file gives it; else the connector chooses what fits its blocks."""
    return config.chunk.tokens if "tokens" in config.chunk.model_fields_set else None


def check_command(command: Sequence[str], config: Config) -> list[str]:
    """The engine's command with the connector's options. Starts nothing.

    Raises:
        LaunchError: it cannot be started, or its engine would not be cached.
    """
    if not command:
        example = f"kvlake run{config.option} -- vllm serve MODEL"
        raise LaunchError(f"no command; write it after --, as in: {example}")
    if shutil.which(command[0]) is None:
        raise LaunchError(f"{command[0]}: no such command; is vLLM installed in this environment?")
    result = with_connector(command, config)
    if reason := misfit(result):
        raise LaunchError(reason)
    return result


def with_connector(command: Sequence[str], config: Config) -> list[str]:
    """The engine's command with the connector's options put in, or merged into the user's own.

    Raises:
        LaunchError: the command does not start vLLM, or asks for something else already.
    """
    wanted = transfer_config(config)
    shown = f"{OPTION} '{json.dumps(wanted)}'"
    if not any(Path(word).name == "vllm" or word.startswith("vllm.") for word in command):
        raise LaunchError(
            f"{shlex.join(command)!r} does not name vllm, so its options cannot be set. For "
            f"another program run `kvlake serve{config.option}` beside it and give it {shown}"
        )
    result = list(command)
    for index, word in enumerate(command):
        name, equals, given = word.partition("=")
        name = name.replace("_", "-")
        if not name.startswith("--kv-transfer"):
            continue
        if "." in name:
            raise LaunchError(f"{word}: give the whole of it as JSON instead: {shown}")
        if not equals:
            if index + 1 == len(command):
                raise LaunchError(f"{word} has no value; leave it out, or give {shown}")
            given = command[index + 1]
            result[index + 1] = json.dumps(_merged(given, wanted, shown, config.option))
        else:
            result[index] = f"{OPTION}={json.dumps(_merged(given, wanted, shown, config.option))}"
        return result
    return [*result, OPTION, json.dumps(wanted)]


def with_events(command: Sequence[str], config: Config) -> list[str]:
    """The engine's command with its own KV events on, for the sidecar to follow (`events`).

    As it is where the user says something about them, and where data parallelism would start
    several engines, whose publishers vLLM cannot tell apart over `ipc`.
    """
    given = [word.partition("=")[0].replace("_", "-") for word in command]
    if not config.events.enabled or any(word.startswith(EVENTS_OPTION) for word in given):
        return list(command)
    if any(word.startswith("--data-parallel") or word == "-dp" for word in given):
        say(f"data parallelism: give {EVENTS_OPTION} with tcp endpoints to have its events joined")
        return list(command)
    endpoint, replay_endpoint = config.runtime.engine_events
    wanted = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint,
        "replay_endpoint": replay_endpoint,
    }
    return [*command, EVENTS_OPTION, json.dumps(wanted)]


def _merged(given: str, wanted: dict[str, object], shown: str, option: str) -> dict[str, object]:
    try:
        own: object = json.loads(given)
    except json.JSONDecodeError as error:
        raise LaunchError(
            f"{OPTION} is not JSON ({error}); leave it out, or give {shown}"
        ) from None
    if not isinstance(own, dict):
        raise LaunchError(f"{OPTION} is not a JSON object; leave it out, or give {shown}")
    options = cast("dict[str, object]", own)
    connector = options.get("kv_connector", CONNECTOR)
    if connector != CONNECTOR:
        raise LaunchError(
            f"{OPTION} asks for kv_connector={connector!r}. Leave the option out to use kvlake "
            "alone; to use both, list it in a MultiConnector yourself and start the sidecar with "
            f"`kvlake serve{option}`. kvlake's own options are {shown}"
        )
    extra = options.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise LaunchError(f"{OPTION}: kv_connector_extra_config must be an object, as in {shown}")
    own_extra = cast("dict[str, object]", extra)
    wanted_extra = cast("dict[str, object]", wanted["kv_connector_extra_config"])
    socket_path = own_extra.get("socket", wanted_extra["socket"])
    if socket_path != wanted_extra["socket"]:
        raise LaunchError(
            f"{OPTION} names socket={socket_path!r}, but this sidecar listens on "
            f"{wanted_extra['socket']!r}; leave the socket out, or set runtime.directory and "
            "runtime.name in the sidecar's configuration"
        )
    if "chunk_tokens" in own_extra:
        wanted_extra.pop("chunk_tokens_from", None)
    return wanted | options | {"kv_connector_extra_config": wanted_extra | own_extra}


# --- the two processes ---------------------------------------------------------------------------


def serve_command(config_path: Path | None) -> list[str]:
    """How the sidecar is started from here."""
    # -P: whatever folder this is started in, a `sidecar` lying there is not imported.
    command = [sys.executable, "-P", "-m", "sidecar.cli", "serve", "--parent-pid", str(os.getpid())]
    return command if config_path is None else [*command, "--config", str(config_path)]


class Sidecar:
    """The sidecar's process: start, wait for, restart, drain."""

    def __init__(self, config: Config, command: Sequence[str]) -> None:
        self._config = config
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._joined: Joined | None = None
        self._delay_seconds = RESTART_SECONDS_FIRST
        self._restart_at: float | None = None

    @property
    def _home(self) -> Path:
        return self._config.runtime.attach_path.parent

    @property
    def ready_seconds_max(self) -> float:
        """How long a start may take: the more memory is touched first, the longer."""
        prefault = self._config.host.size if self._config.host.prefault else 0
        return _READY_SECONDS_BASE + prefault / _PREFAULT_BYTES_PER_SECOND_MIN

    def start(self, wakeup: socket.socket) -> None:
        """Start it, and wait until it serves; or join the one that does.

        Raises:
            LaunchError: it ended, or was not ready in time.
            Interrupted: a signal came first.
        """
        deadline = time.monotonic() + self.ready_seconds_max
        while not self._join():
            if self._start_own(wakeup, deadline):
                return
            # Another one has the lock: it is not ready yet, or drains.
            readable, _, _ = select.select([wakeup], [], [], JOIN_SECONDS)
            for number in _forwarded(wakeup) if readable else ():
                raise Interrupted(number)

    def _join(self) -> bool:
        """Use the sidecar that serves already, if there is one."""
        try:
            self._joined = Joined(self._config.runtime.attach_path)
        except OSError:
            return False
        say(
            f"a sidecar (pid {self._joined.pid}) serves {self._config.runtime.attach_path}: joined "
            "it, and it goes by the configuration that it was started with"
        )
        return True

    def _start_own(self, wakeup: socket.socket, deadline: float) -> bool:
        """Whether it serves. False where another one is starting in its place."""
        reader, writer = os.pipe()
        try:
            self._spawn(writer)
        except OSError as error:
            raise LaunchError(f"the sidecar cannot be started: {error}", Exit.START) from error
        finally:
            os.close(writer)
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LaunchError(
                        f"the sidecar was not ready after {self.ready_seconds_max:.0f} s; see its "
                        "lines above. A large host.size starts faster with host.prefault: false",
                        Exit.START,
                    )
                readable, _, _ = select.select([pipe.fileno(), wakeup.fileno()], [], [], left)
                if wakeup.fileno() in readable:
                    for number in _forwarded(wakeup):
                        raise Interrupted(number)
                if pipe.fileno() in readable:
                    if pipe.read(1):
                        return True
                    assert self._process is not None
                    code = self._process.wait()
                    if code == Exit.START and locked(self._home) and left > JOIN_SECONDS:
                        return False
                    raise LaunchError(
                        f"the sidecar ended with code {code}; see its lines above",
                        Exit.START if code == Exit.START else Exit.USAGE,
                    )

    def _spawn(self, ready_fd: int | None) -> None:
        command = list(self._command)
        if ready_fd is not None:
            command += ["--ready-fd", str(ready_fd)]
        self._started = time.monotonic()
        self._restart_at = None
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            # The engine's standard output stays the engine's own.
            stdout=sys.stderr.fileno(),
            pass_fds=() if ready_fd is None else (ready_fd,),
            start_new_session=True,
            env=without_notify(os.environ),
        )

    def watch(self) -> float | None:
        """Restart it where it died and its time has come. Seconds until the next look, if any."""
        now = time.monotonic()
        if self._joined is not None:
            if self._joined.there():
                return self._joined.look_seconds
            self._joined.leave()
            self._joined = None
            say("the sidecar that was joined ended; the engine goes on without a cache")
            self.start_later()
        elif self._restart_at is None:
            assert self._process is not None
            code = self._process.poll()
            if code is None:
                return None
            if now - self._started >= HEALTHY_SECONDS:
                self._delay_seconds = RESTART_SECONDS_FIRST
            say(
                f"the sidecar ended ({_ending(code)}); the engine goes on without a cache, "
                f"next start in {self._delay_seconds:g} s"
            )
            self.start_later()
        assert self._restart_at is not None
        if now < self._restart_at:
            return self._restart_at - now
        if self._join():
            self._restart_at = None
            return LOOK_SECONDS
        try:
            self._spawn(None)
        except OSError as error:
            # For want of memory, say, that the dead one has not given back yet.
            say(
                f"the sidecar cannot be started ({error}); the engine goes on without a cache, "
                f"next try in {self._delay_seconds:g} s"
            )
            return self.start_later()
        return None

    def try_again(self) -> None:
        """Have `watch` start one, unless one is starting still."""
        if self._process is None or self._process.poll() is not None:
            self.start_later()

    def start_later(self) -> float:
        """Have `watch` start one after a pause, which doubles each time; seconds until then."""
        seconds = self._delay_seconds
        self._restart_at = time.monotonic() + seconds
        self._delay_seconds = min(2 * seconds, RESTART_SECONDS_MAX)
        return seconds

    def stop(self, wakeup: socket.socket) -> None:
        """Ask it to drain and wait; a further signal, or the time being up, kills it.

        One that others joined goes on for them, and drains when the last of them is gone.
        """
        if self._joined is not None:
            self._joined.leave()
            return
        process = self._process
        if process is None or process.poll() is not None:
            return
        if needed(self._home):
            say(f"the sidecar (pid {process.pid}) goes on for others that joined it")
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self._config.limits.drain_seconds_max + DRAIN_GRACE_SECONDS
        while process.poll() is None and (left := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([wakeup], [], [], left)
            if readable and _forwarded(wakeup):
                break
        if process.poll() is None:
            say("the sidecar did not drain in time; it is killed, unwritten chunks are lost")
            process.kill()
            process.wait()


class Interrupted(Exception):
    """A signal asked for the end before the engine was started."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def _ending(code: int) -> str:
    return f"code {code}" if code >= 0 else signal.Signals(-code).name


def _forwarded(wakeup: socket.socket) -> list[int]:
    """The signals for the engine among those that came, each once; SIGCHLD only wakes."""
    return [number for number in dict.fromkeys(wakeup.recv(4096)) if number in FORWARDED]


@contextlib.contextmanager
def _signals() -> Generator[socket.socket]:
    """Signals as bytes on a socket, so that one `select` waits for them and for the children."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)

    def nothing(number: int, frame: FrameType | None) -> None:
        del number, frame  # the number is in the socket already

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


def run(
    config: Config, serve: Sequence[str], command: Sequence[str], *, optional: bool = False
) -> int:
    """Start the sidecar with `serve`, then the engine with `command`; the engine's exit code.

    With `optional`, an engine is started also where the sidecar cannot be, and it is tried again.

    Raises:
        LaunchError: one of the two cannot be started; the other is stopped again.
    """
    engine_command = with_events(check_command(command, config), config)
    sidecar = Sidecar(config, serve)
    notifier = Notifier()
    with _signals() as wakeup:
        try:
            notifier.status("starting the sidecar")
            notifier.extend(sidecar.ready_seconds_max)
            try:
                sidecar.start(wakeup)
            except LaunchError as error:
                if not optional or error.code is not Exit.START:
                    raise
                say(f"{error}; the engine starts without it, as --optional says")
                sidecar.try_again()
            say(f"starting {shlex.join(engine_command)}")
            return _run_engine(engine_command, sidecar, wakeup, notifier)
        except Interrupted as interrupted:
            return 128 + interrupted.number
        finally:
            notifier.stopping("the sidecar drains")
            notifier.extend(config.limits.drain_seconds_max + DRAIN_GRACE_SECONDS)
            sidecar.stop(wakeup)


def _run_engine(
    command: Sequence[str], sidecar: Sidecar, wakeup: socket.socket, notifier: Notifier
) -> int:
    try:
        engine = subprocess.Popen(command, start_new_session=True, env=without_notify(os.environ))
    except OSError as error:
        raise LaunchError(f"{command[0]}: cannot be started: {error}") from error
    try:
        notifier.ready("the engine runs, with a sidecar beside it")
        beat = None if notifier.watchdog_seconds is None else notifier.watchdog_seconds / 3
        while (code := engine.poll()) is None:
            notifier.alive()
            times = [seconds for seconds in (sidecar.watch(), beat) if seconds is not None]
            readable, _, _ = select.select([wakeup], [], [], min(times, default=None))
            if readable:
                for number in _forwarded(wakeup):
                    engine.send_signal(number)
    finally:
        # Reached with a living engine only through a fault of this file; then it must not stay.
        if engine.poll() is None:
            engine.kill()
            engine.wait()
    return code if code >= 0 else 128 - code
