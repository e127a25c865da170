"""The namespaces that `make gpu-test` starts processes in, with a sidecar and without a device."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.protocol import Outcome
from tests import places
from tests.gpu.double.control import wait_until
from tests.gpu.real.apart import NAMESPACES
from tests.gpu.real.cases import require_namespaces
from tests.sidecar.client import Worker, key_of

pytestmark = pytest.mark.promise("gpu-rehearsal")

APART = [sys.executable, "-m", "tests.gpu.real.apart", "77"]


@pytest.fixture(scope="module", autouse=True)
def _permitted() -> None:
    require_namespaces()


def test_a_module_runs_in_namespaces_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "looks.py").write_text(
        "import json, os, sys\n"
        "spaces = {name: os.readlink(f'/proc/self/ns/{name}') for name in sys.argv[2:]}\n"
        "print(json.dumps([spaces, os.getpid(), os.listdir('/dev/shm')]))\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{places.ROOT}:{tmp_path}"}
    done = subprocess.run(
        [*APART, "looks", "7", *NAMESPACES], env=environment, stdout=subprocess.PIPE, check=False
    )
    spaces, pid, shared = json.loads(done.stdout)
    assert done.returncode == 7
    assert (pid, shared) == (77, [])
    for name in NAMESPACES:
        assert spaces[name] != os.readlink(f"/proc/self/ns/{name}")


def accepts(path: Path) -> bool:
    """Whether somebody listens there. A socket's file exists before."""
    with socket.socket(socket.AF_UNIX) as connection:
        return not connection.connect_ex(str(path))


def test_a_sidecar_apart_serves_a_worker(short_directory: Path) -> None:
    config = short_directory / "kvlake.yaml"
    sections = {
        "runtime": {"directory": str(short_directory)},
        "host": {"size": "16MiB", "directory": "/dev/shm", "prefault": False},
        "http": {"port": 0},
    }
    config.write_text(json.dumps(sections))
    attach = short_directory / "default" / "attach.sock"
    command = [*APART, places.program()[-1], "serve", "--config", str(config)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(places.ROOT)}) as sidecar:
        try:
            wait_until(lambda: accepts(attach) or sidecar.poll() is not None)
            with Worker(attach) as worker:
                wanted = worker.fill([1, 2, 3, 4], 5)
                assert worker.store(1, key_of("apart"), [1, 2, 3, 4]) is Outcome.OK
                worker.poison()
                assert worker.load(2, key_of("apart"), [9, 8, 7, 6]) is Outcome.OK
                assert [worker.read(block) for block in (9, 8, 7, 6)] == wanted
            sidecar.send_signal(signal.SIGTERM)
            assert sidecar.wait(60) == 0
        finally:
            sidecar.kill()
