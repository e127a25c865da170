"""The README's section "Share prefixes between clusters", word for word, with a real S3 server.

Two machines are two runtime directories, one after the other; what the reader is told to have (a
bucket, credentials, an endpoint, a model) is given.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from sidecar.demo.model import write_model
from sidecar.demo.servers import free_ports, s3_server
from tests import places

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.engine, pytest.mark.promise("connector", "suite-commands")]

ROOT: Final = places.ROOT
SECTION: Final = "Share prefixes between clusters"
START_SECONDS_MAX: Final = 240.0
WAIT_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 90.0
PROMPT: Final = " ".join(f"w{i * 11 % 4000}" for i in range(1500))


def commands() -> list[list[str]]:
    """The lines of each block of code in the section."""
    text = (ROOT / "README.md").read_text()
    [section] = re.findall(rf"^## {SECTION}$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```$(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [block.strip().splitlines() for block in blocks]


class Machine:
    """Somebody's shell on a node of a cluster, where the section's first block is typed."""

    def __init__(self, folder: Path, environment: dict[str, str], model: str) -> None:
        self._folder = folder
        (port,) = free_ports(1)
        self._engine = f"http://127.0.0.1:{port}"
        (folder / "runtime").mkdir(parents=True, mode=0o700)
        self._environment = environment | {
            "XDG_RUNTIME_DIR": str(folder / "runtime"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        serve, status = commands()
        # The model, and what this backend and these ports need besides. In bfloat16 the log
        # probabilities of a hit and of a computation differ by as much as the machine rounds.
        options = f"--served-model-name tiny --dtype float32 --max-model-len 4096 --port {port}"
        script = "\n".join(serve).replace("MODEL", f"{model} --enforce-eager {options}")
        assert script.splitlines()[0] == "export KVLAKE_BUCKET=my-bucket"
        self._status = status
        self._log = folder / "log"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                ["bash", "-ec", script.replace("\nkvlake", "\nexec kvlake")],
                cwd=ROOT,
                env=self._environment,
                stdout=output,
                stderr=output,
            )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self.log()
            try:
                urllib.request.urlopen(f"{self._engine}/health", timeout=5).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
            else:
                return
        raise AssertionError(self.log())

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-5000:]

    def status(self) -> dict[str, Any]:
        """`kvlake status`, as the section has it, and for a program to read."""
        [line] = self._status
        told = subprocess.run(
            [*line.split(), "--json"],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            check=True,
            timeout=60,
        )
        status: dict[str, Any] = json.loads(told.stdout)
        return status

    def count(self, name: str) -> int:
        return int(self.status()["counters"][name])

    def wait_for(self, name: str, least: int) -> None:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while self.count(name) < least:
            assert time.monotonic() < deadline, f"{name}: {self.log()}"
            time.sleep(0.2)

    def generate(self) -> Any:
        body = {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": 1,
        }
        request = urllib.request.Request(
            f"{self._engine}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())["choices"][0]

    def stop(self) -> None:
        """Also of its memory, which a restart would find and another machine does not have."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(STOP_SECONDS_MAX) == 0, self.log()
        subprocess.run(
            ["kvlake", "pool", "remove", "--config", "configs/s3.yaml"],
            cwd=ROOT,
            env=self._environment | {"KVLAKE_BUCKET": "my-bucket"},
            check=True,
            timeout=60,
        )


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that takes seconds to compute the prompt, so that reading it is sooner, as with yours."""
    folder = tmp_path_factory.mktemp("slow-model")
    return str(write_model(folder, layers=8, hidden=768, heads=12, kv_heads=4))


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What the reader has: a bucket at some endpoint, credentials, and less memory than most."""
    with s3_server(tmp_path, bucket="my-bucket") as server:
        yield os.environ | {
            "KVLAKE_S3_ENDPOINT": server.endpoint,
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "KVLAKE_HOST_SIZE": "256MiB",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
        }


@contextlib.contextmanager
def first_cluster(folder: Path, environment: dict[str, str], model: str) -> Iterator[Any]:
    """What the first machine computed, once it is in the bucket."""
    first = Machine(folder / "first", environment, model)
    try:
        first.wait_ready()
        computed = first.generate()
        first.wait_for("chunks_written", 5)
        assert first.count("chunks_read") == 0
        yield computed
    finally:
        first.stop()


def test_the_first_cluster_writes_what_it_computed(
    folder: Path, environment: dict[str, str], slow_model: str
) -> None:
    with first_cluster(folder / "alone", environment, slow_model) as computed:
        assert computed["text"]


@pytest.mark.nightly
def test_the_second_cluster_reads_what_the_first_computed(
    folder: Path, environment: dict[str, str], slow_model: str
) -> None:
    with first_cluster(folder, environment, slow_model) as computed:
        pass
    second = Machine(folder / "second", environment, slow_model)
    try:
        second.wait_ready()
        # It has read the catalog when it says how many chunks there are.
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not (store := second.status()["tiers"]["store"])["listings"] or store["chunks"] < 5:
            assert time.monotonic() < deadline, second.log()
            time.sleep(0.2)
        read = second.generate()
        counters = second.status()["counters"]
        assert counters["chunks_read"] >= 5, f"{counters}\n{second.log()}"
        assert read["text"] == computed["text"]
        assert read["logprobs"]["token_logprobs"] == pytest.approx(
            computed["logprobs"]["token_logprobs"], abs=1e-3
        )
    finally:
        second.stop()
