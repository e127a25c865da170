"""The README's section "Share prefixes between clusters", word for word, with a real S3 server.

Two machines are two runtime directories, one after the other; what the reader is told to have (a
bucket, credentials, an endpoint, a model) is given. `kvlake run` and `vllm serve` start here as
users start them, and are driven over HTTP as a client would.

The file that the commands name is the README's with a name and a port besides, so that the default
ones stay free for other clones on this machine. `kvlake status` gets the same file for that reason.
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
import yaml

from sidecar.cli.client import SidecarClient, url_of
from sidecar.cli.console import NoAnswer
from sidecar.config.model import Config, load
from sidecar.demo.model import write_model
from sidecar.demo.processes import free_ports
from tests import places
from tests.harness.servers import s3_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.engine, pytest.mark.promise("connector", "suite-commands")]

ROOT: Final = places.ROOT
SECTION: Final = "Share prefixes between clusters"
FILE: Final = "configs/s3.yaml"
START_SECONDS_MAX: Final = 240.0
WAIT_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 90.0
BUCKET: Final = {"KVLAKE_BUCKET": "my-bucket"}
PROMPT: Final = " ".join(f"w{i * 11 % 3800}" for i in range(1500))
PREFIX: Final = " ".join(f"w{i * 7 % 3800}" for i in range(1024))


def commands() -> list[list[str]]:
    """The lines of each block of code in the section."""
    text = (ROOT / "README.md").read_text()
    [section] = re.findall(rf"^## {SECTION}$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```$(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [block.strip().splitlines() for block in blocks]


def own_name(machine: str) -> str:
    """A sidecar's name, with which the host memory that it may leave is found at the end."""
    return f"demo-{os.getpid()}-readme-{machine}"


class Machine:
    """Somebody's shell on a node of a cluster, where the section's first block is typed."""

    def __init__(self, folder: Path, environment: dict[str, str], model: str) -> None:
        self.folder = folder
        port, http_port = free_ports(2)
        self._engine = f"http://127.0.0.1:{port}"
        self._sidecar = f"http://127.0.0.1:{http_port}"
        (folder / "runtime").mkdir(parents=True, mode=0o700)
        (folder / FILE).parent.mkdir()
        own = {"runtime": {"name": own_name(folder.name)}, "http": {"port": http_port}}
        (folder / FILE).write_text(f"{(ROOT / FILE).read_text()}\n{yaml.safe_dump(own)}")
        self._environment = environment | {
            "XDG_RUNTIME_DIR": str(folder / "runtime"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        serve, self._status = commands()
        # The model, and what this backend, these ports and a client that counts need besides. In
        # bfloat16 the log probabilities of a hit and of a computation differ by as much as the
        # machine rounds.
        options = (
            f"--enforce-eager --served-model-name tiny --dtype float32 --max-model-len 4096 "
            f"--port {port} --enable-prompt-tokens-details"
        )
        script = "\n".join(serve).replace("MODEL", f"{model} {options}")
        assert script.splitlines()[0] == "export KVLAKE_BUCKET=my-bucket"
        self._log = folder / "log"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                ["bash", "-ec", script.replace("\nkvlake", "\nexec kvlake")],
                cwd=folder,
                env=self._environment,
                stdout=output,
                stderr=output,
            )

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self, what: str, condition: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self.log()[-5000:]
            # Servers that are not there yet, or not there any more, refuse or hang up.
            with contextlib.suppress(urllib.error.URLError, OSError, NoAnswer):
                if condition():
                    return
            time.sleep(0.1)
        raise AssertionError(f"{what}: {self.log()[-5000:]}")

    def wait_ready(self) -> None:
        self.wait("vLLM serves", lambda: self.get("/health") is None, START_SECONDS_MAX)

    def told(self) -> dict[str, Any]:
        """`kvlake status`, as the section has it, and for a program to read."""
        [line] = self._status
        told = subprocess.run(
            [*line.split(), "--json", "--config", FILE],
            cwd=self.folder,
            env=self._environment | BUCKET,
            capture_output=True,
            check=True,
            timeout=60,
        )
        status: dict[str, Any] = json.loads(told.stdout)
        return status

    def looked_up(self, prompt: str) -> dict[str, Any]:
        """What `kvlake explain --prompt` finds of a text in the engine's namespace."""
        told = subprocess.run(
            [
                *("kvlake", "explain", "--prompt", "-", "--engine", self._engine, "--json"),
                *("--config", FILE),
            ],
            cwd=self.folder,
            env=self._environment | BUCKET,
            input=prompt.encode(),
            capture_output=True,
            check=True,
            timeout=60,
        )
        [realm] = json.loads(told.stdout)["realms"]
        assert realm["attached"]
        return dict(realm)

    def status(self) -> dict[str, Any]:
        """The same without the command."""
        return SidecarClient(self._sidecar, WAIT_SECONDS_MAX).get()

    def count(self, name: str) -> int:
        return int(self.status()["counters"][name])

    def wait_for(self, name: str, least: int) -> None:
        self.wait(name, lambda: self.count(name) >= least, WAIT_SECONDS_MAX)

    def get(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What vLLM answers, or None. With a body it is a POST."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._engine}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            content = answer.read()
        return json.loads(content) if content else None

    def complete(self, prompt: str) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 1}
        answer: dict[str, Any] = self.get("/v1/completions", body)
        return answer

    def generate(self) -> Any:
        return self.complete(PROMPT)["choices"][0]

    def cached_tokens(self, tail: str) -> int:
        """Tokens of the prompt that were cached, as the answer tells the client."""
        usage = self.complete(f"{PREFIX} {tail}")["usage"]
        assert usage["prompt_tokens"] == 1024 + len(tail.split())
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

    def reset(self) -> None:
        """Have the engine forget its own prefix cache, once no block is held for a store."""

        def done() -> bool:
            answer = self.get("/reset_prefix_cache", {})
            # vLLM 0.31 does not say.
            return answer is None or bool(answer["success"])

        self.wait("the prefix cache is reset", done, WAIT_SECONDS_MAX)

    def hits(self, tail: str, least: int) -> bool:
        """Whether the prefix is loaded from the sidecar, and `least` chunks have been by then."""
        self.reset()
        return self.cached_tokens(tail) == 1024 and self.count("chunks_loaded") >= least

    def end(self) -> None:
        """SIGTERM, unless it was sent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(STOP_SECONDS_MAX) == 0, self.log()[-5000:]

    def stop(self) -> None:
        """Also of its memory, which a restart would find and another machine does not have."""
        try:
            self.end()
        finally:
            subprocess.run(
                ["kvlake", "pool", "remove", "--config", FILE],
                cwd=self.folder,
                env=self._environment | BUCKET,
                check=True,
                timeout=60,
            )


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that takes seconds to compute the prompt, so that reading it is sooner, as with yours."""
    folder = tmp_path_factory.mktemp("slow-model")
    return str(write_model(folder, layers=8, hidden=768, heads=12, kv_heads=4))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What the reader has: a bucket at some endpoint, credentials, and less memory than most."""
    with s3_server(tmp_path_factory.mktemp("s3"), bucket="my-bucket") as server:
        yield os.environ | {
            "KVLAKE_S3_ENDPOINT": server.endpoint,
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "KVLAKE_HOST_SIZE": "256MiB",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
            # For the endpoint that resets the engine's own prefix cache.
            "VLLM_SERVER_DEV_MODE": "1",
        }


@contextlib.contextmanager
def machine(folder: Path, environment: dict[str, str], model: str) -> Iterator[Machine]:
    """One whose engine serves."""
    there = Machine(folder, environment, model)
    try:
        there.wait_ready()
        yield there
    finally:
        there.stop()


@pytest.fixture(scope="class")
def first(folder: Path, environment: dict[str, str], model: str) -> Iterator[Machine]:
    with machine(folder / "alone", environment, model) as there:
        yield there


def test_commands_without_options_find_the_sidecar_of_the_file(
    environment: dict[str, str],
) -> None:
    found, default = load(ROOT / FILE, environment=environment | BUCKET), Config()
    assert url_of(found) == url_of(default)
    assert found.runtime.attach_path == default.runtime.attach_path
    serve, status = commands()
    assert (status, FILE in serve[1].split()) == (["kvlake status"], True)


class TestFirstCluster:
    def test_it_writes_what_it_computed(self, first: Machine) -> None:
        assert first.generate()["text"]
        first.wait_for("chunks_written", 5)
        counters = first.told()["counters"]
        assert counters["chunks_written"] >= 5
        assert counters["chunks_read"] == 0

    def test_two_requests_share_a_prefix(self, first: Machine) -> None:
        stored, loaded = first.count("chunks_stored"), first.count("chunks_loaded")
        assert first.cached_tokens("w1 w2 w3") == 0
        # The engine's own prefix cache.
        assert first.cached_tokens("w4 w5") == 1024
        first.wait_for("chunks_stored", stored + 4)
        assert first.count("chunks_loaded") == loaded
        first.wait("it is loaded", lambda: first.hits("w6 w7 w8", loaded + 4), WAIT_SECONDS_MAX)

    @pytest.mark.promise("prompt-match")
    def test_a_prompt_is_looked_up_by_its_text(self, first: Machine) -> None:
        words = [f"w{i * 13 % 3800}" for i in range(1024)]
        prompt = " ".join([*words, "w12"])
        first.complete(prompt)
        first.wait(
            "its chunks are stored",
            lambda: first.looked_up(prompt)["found_tokens"] == 1024,
            WAIT_SECONDS_MAX,
        )
        assert first.looked_up(prompt)["runs"][0]["where"] == "host"
        words[600] = "w13"
        changed = first.looked_up(" ".join(words))
        assert (changed["found_tokens"], changed["differs_at"]) == (512, 600)

    def test_a_killed_sidecar_is_started_again(self, first: Machine) -> None:
        """The engine serves on meanwhile, and uses the new one as soon as it is there."""
        first.cached_tokens("w9")
        killed = first.status()["pid"]
        os.kill(killed, signal.SIGKILL)
        first.reset()
        assert first.cached_tokens("w10") in (0, 1024)
        first.wait(
            "both roles are attached to a new sidecar",
            lambda: first.status()["pid"] != killed and len(first.status()["sessions"]) == 2,
            WAIT_SECONDS_MAX,
        )
        # The first of these may come before the prefix was stored again.
        first.wait("the new sidecar serves hits", lambda: first.hits("w11", 4), WAIT_SECONDS_MAX)

    def test_sigterm_ends_everything(self, first: Machine) -> None:
        """Processes that are left are looked for when the module ends."""
        first.end()
        assert not list(first.folder.rglob("*.sock"))
        assert "drained" in first.log()


@pytest.mark.nightly
def test_the_second_cluster_reads_what_the_first_computed(
    folder: Path, environment: dict[str, str], slow_model: str
) -> None:
    with machine(folder / "first", environment, slow_model) as one:
        computed = one.generate()
        one.wait_for("chunks_written", 5)
    with machine(folder / "second", environment, slow_model) as other:

        def listed() -> bool:
            """It has read the catalog when it says how many chunks there are."""
            store = other.status()["tiers"]["store"]
            return bool(store["listings"]) and store["chunks"] >= 5

        other.wait("the catalog is read", listed, WAIT_SECONDS_MAX)
        read = other.generate()
        counters = other.told()["counters"]
        assert counters["chunks_read"] >= 5, f"{counters}\n{other.log()[-5000:]}"
        assert read["text"] == computed["text"]
        assert read["logprobs"]["token_logprobs"] == pytest.approx(
            computed["logprobs"]["token_logprobs"], abs=1e-3
        )
