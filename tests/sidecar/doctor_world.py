"""A directory in which something is wrong: what `kvlake doctor` is run beside.

Owns the directory and what is held open in it. Each test brings about its own fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
import zmq

from tiers.pool.host_pool import HostPool

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


def events_over_tcp(world: World, key: str, **endpoints: str) -> dict[str, Any]:
    places = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}
    subscribers = [zmq.curve_keypair()[0].decode().replace("$", "$$")]
    more = {"curve_secret_key_file": key, "subscribers": subscribers}
    return {"events": {"enabled": True, **places, **endpoints, **more}}


@pytest.fixture
def world(short_directory: Path) -> Iterator[World]:
    with contextlib.ExitStack() as held:
        yield World(short_directory, held)
