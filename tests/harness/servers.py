"""Real object-store servers for tests, as processes of their own on loopback.

Owns starting, waiting for and stopping them: SeaweedFS, which checks signatures and buckets as S3
does, and moto, a lighter second opinion which accepts any secret. A server lives as long as its
`with` block and is ended by its process id.

Invariants: only loopback addresses; every wait has a limit; a server that does not come up shows
its log; credentials are made for one run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sidecar.demo.processes import (
    HOST,
    REGION,
    SEAWEED_READY,
    ProcessFailed,
    free_ports,
    seaweed_command,
)
from tiers.store.access import Access, Credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from tiers.store.access import BackendChoice

START_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 10.0
START_ATTEMPTS_MAX: Final = 3
LOG_CHARACTERS_MAX: Final = 4000


class ServerProcess:
    """One server's process: it may be killed, and started again on the same port and data."""

    def __init__(
        self, command: Sequence[str], log: Path, ready: str, environment: Mapping[str, str]
    ) -> None:
        self._command = command
        self._log = log
        self._ready = ready
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process that runs now, or ran last."""
        assert self._process is not None, "started first"
        return self._process.pid

    @property
    def log(self) -> str:
        """The end of what it printed."""
        return self._log.read_text(errors="replace")[-LOG_CHARACTERS_MAX:]

    def start(self) -> bool:
        """Start it and wait until it serves; False if it does not."""
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._log.parent,
                env={**os.environ, "AWS_EC2_METADATA_DISABLED": "true", **self._environment},
            )
        return _wait_until_ready(self._process, self._log, self._ready)

    def kill(self) -> None:
        """SIGKILL: as a crash would."""
        assert self._process is not None, "started first"
        self._process.kill()
        self._process.wait(STOP_SECONDS_MAX)


@dataclasses.dataclass(frozen=True)
class S3Server:
    """A running server, and how to reach one bucket of it."""

    endpoint: str
    access_key: str
    secret_key: str
    bucket: str
    process: ServerProcess

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        return self.process.pid

    def restart(self) -> None:
        """After its process was killed: start it again where it was. Raises `ProcessFailed`."""
        if not self.process.start():
            raise ProcessFailed(f"the server did not come back; its log:\n{self.process.log}")

    @property
    def url(self) -> str:
        """The bucket's URL."""
        return f"s3://{self.bucket}"

    @property
    def storage_options(self) -> dict[str, object]:
        """What s3fs needs beside the URL."""
        return self.options_at(self.endpoint)

    def access_at(self, endpoint: str = "", backend: BackendChoice = "auto") -> Access:
        """How `UrlObjects` gets there, directly or by another way such as a proxy."""
        return Access(
            backend=backend,
            endpoint=endpoint or self.endpoint,
            region=REGION,
            credentials=Credentials(
                kind="static", access_key=self.access_key, secret_key=self.secret_key
            ),
        )

    @property
    def settings(self) -> dict[str, object]:
        """The same as a sidecar's `store` section, without the URL."""
        return self.settings_at(self.endpoint)

    def settings_at(self, endpoint: str) -> dict[str, object]:
        """The `store` section for another way to the server."""
        return {
            "endpoint": endpoint,
            "region": REGION,
            "credentials": {
                "kind": "static",
                "access_key": self.access_key,
                "secret_key": self.secret_key,
            },
        }

    def options_at(self, endpoint: str) -> dict[str, object]:
        """The same for another way to the server, such as a proxy."""
        return {
            "key": self.access_key,
            "secret": self.secret_key,
            "endpoint_url": endpoint,
            "client_kwargs": {"region_name": REGION},
        }


@contextlib.contextmanager
def s3_server(tmp_path: Path, *, bucket: str = "kvlake") -> Generator[S3Server]:
    """SeaweedFS with one bucket; others are not made on the fly. Data and log go to `tmp_path`."""
    access_key, secret_key = f"AK{secrets.token_hex(9)}", secrets.token_hex(20)
    folder = Path(tempfile.mkdtemp(prefix="weed-", dir=tmp_path))

    def command(port: int) -> Sequence[str]:
        return seaweed_command(
            folder, port=port, bucket=bucket, access_key=access_key, secret_key=secret_key
        )

    with serve_process(command, folder / "log", ready=SEAWEED_READY) as (port, process):
        yield S3Server(f"http://{HOST}:{port}", access_key, secret_key, bucket, process)


@contextlib.contextmanager
def moto_server(tmp_path: Path, *, bucket: str = "kvlake") -> Generator[S3Server]:
    """Moto with one bucket. It accepts any credentials, so it cannot test wrong ones."""
    folder = Path(tempfile.mkdtemp(prefix="moto-", dir=tmp_path))

    def command(port: int) -> Sequence[str]:
        return [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", HOST, "-p", str(port)]

    with serve_process(command, folder / "log", ready="Running on http") as (port, process):
        _put_bucket(port, bucket)
        secret_key = secrets.token_hex(20)
        yield S3Server(f"http://{HOST}:{port}", "anyone", secret_key, bucket, process)


@contextlib.contextmanager
def serve_process(
    command: Callable[[int], Sequence[str]],
    log: Path,
    *,
    ready: str,
    environment: Mapping[str, str] | None = None,
) -> Generator[tuple[int, ServerProcess]]:
    """Run `command(port)` until the block ends; yields port and process once `ready` is logged.

    Raises `ProcessFailed` where it does not come up.
    """
    failure = ""
    for _ in range(START_ATTEMPTS_MAX):
        # A port that was free can be taken before the server binds it: then others are tried.
        (port,) = free_ports(1)
        process = ServerProcess(command(port), log, ready, environment or {})
        try:
            if process.start():
                yield port, process
                return
            failure = process.log
        finally:
            # Nobody needs what it would still do: SeaweedFS takes ten seconds to end by itself.
            process.kill()
    raise ProcessFailed(f"no server after {START_ATTEMPTS_MAX} attempts; the last log:\n{failure}")


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, ready: str) -> bool:
    deadline = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < deadline and process.poll() is None:
        if ready in log.read_text(errors="replace"):
            return True
        time.sleep(0.05)
    return False


def _put_bucket(port: int, bucket: str) -> None:
    connection = http.client.HTTPConnection(HOST, port, timeout=START_SECONDS_MAX)
    try:
        # Signed by nobody, but moto tells services apart by the name in this header.
        scope = f"anyone/20260101/{REGION}/s3/aws4_request"
        authorization = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0"
        connection.request("PUT", f"/{bucket}", headers={"Authorization": authorization})
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            raise ProcessFailed(f"PUT /{bucket}: {answer.status} {body[:500]!r}")
    finally:
        connection.close()
