"""A real sidecar process, with the double as its libcuda or beside a real device."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any, Self

from sidecar.cli.client import SidecarClient
from tests import places
from tests.gpu.child import Machine
from tests.gpu.double.control import Double, wait_until

STATUS_SECONDS_MAX = 60.0


class SidecarProcess:
    """`kvlake serve`; `with` stops it and checks that it ended well, unless it was killed."""

    def __init__(self, machine: Machine, directory: Path, **sections: dict[str, Any]) -> None:
        config: dict[str, dict[str, Any]] = {
            "runtime": {"directory": str(directory)},
            "host": {"size": "16MiB", "directory": str(directory), "prefault": False},
            "http": {"port": 0},
            "copy": {"threads": 2},
            "limits": {"load_deadline": "20s", "store_deadline": "20s", "lease_ttl": "60s"},
        }
        for name, values in sections.items():
            config[name] = {**config.get(name, {}), **values}
        path = directory / "kvlake.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        self._machine = machine
        self.socket = directory / "default" / "attach.sock"
        self._ready = directory / "ready.json"
        with self._ready.open("wb") as ready:
            command: list[str | int] = [
                "serve",
                "--config",
                str(path),
                "--ready-fd",
                ready.fileno(),
            ]
            module = places.program()[-1]
            self.process = machine.start(module, command, machine.env())
        self.pid = self.process.pid
        try:
            wait_until(lambda: self._ready.stat().st_size or self.process.poll() is not None)
            assert self.process.poll() is None, "the sidecar did not start; stderr says why"
            self.url: str = json.loads(self._ready.read_text())["http_url"]
        except BaseException:
            self.kill()
            raise

    @property
    def left(self) -> dict[str, int]:
        """What it holds of the double's things."""
        assert isinstance(self._machine, Double)
        return self._machine.process(self.pid).left

    def status(self) -> dict[str, Any]:
        """Its status document."""
        return SidecarClient(self.url, STATUS_SECONDS_MAX).get()

    def kill(self) -> None:
        """End it as the kernel would."""
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> None:
        """Let it drain."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(90) in (0, -signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
