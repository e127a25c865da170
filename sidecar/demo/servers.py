"""SeaweedFS, an S3 server on loopback, for the demo's two clusters.

Owns its command line, starting it, waiting for it and stopping it. Credentials are made for one
run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Generator

HOST: Final = "127.0.0.1"
REGION: Final = "us-east-1"
SEAWEED_READY: Final = "All enabled components are running"
"""Its log says this when it serves."""
START_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 10.0


class ServerFailed(RuntimeError):
    """A server did not start; the message has its log."""


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
        raise ServerFailed("weed is not installed; in a clone of kvlake: pip install '.[demo]'")
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

    Raises `ServerFailed`.
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
        )
    try:
        deadline = time.monotonic() + START_SECONDS_MAX
        while SEAWEED_READY not in (text := log.read_text(errors="replace")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailed(f"the S3 server did not start; its log:\n{text[-4000:]}")
            time.sleep(0.05)
        yield {
            "url": "s3://kvlake",
            "endpoint": f"http://{HOST}:{port}",
            "region": REGION,
            "credentials": {"kind": "static", **keys},
        }
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
