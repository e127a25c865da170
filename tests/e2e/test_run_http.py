"""`kvlake run -- vllm serve`, driven over HTTP as a client would."""

from __future__ import annotations

import contextlib
import json
import os
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

from sidecar.demo.servers import free_ports
from tests import places
from tests.e2e.arms import PATIENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.engine, pytest.mark.promise("connector", "suite-commands")]

START_SECONDS_MAX: Final = 240.0
WAIT_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 90.0
PREFIX: Final = " ".join(f"w{i * 7 % 4000}" for i in range(1024))


class Service:
    """The running command, and its two HTTP servers: vLLM's and the sidecar's."""

    def __init__(self, process: subprocess.Popen[bytes], ports: list[int], log: Path) -> None:
        self.process = process
        self.log = log
        self._engine, self._sidecar = (f"http://127.0.0.1:{port}" for port in ports)

    def request(self, url: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(url, data, headers), timeout=120
        ) as answer:
            content = answer.read()
        return json.loads(content) if content else None

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.request(f"{self._sidecar}/status")
        return status

    def wait(self, what: str, condition: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
            # Servers that are not there yet, or not there any more, refuse or hang up.
            with contextlib.suppress(urllib.error.URLError, OSError):
                if condition():
                    return
            time.sleep(0.1)
        raise AssertionError(f"{what}: {self.log.read_text(errors='replace')[-3000:]}")

    def healthy(self) -> bool:
        self.request(f"{self._engine}/health")
        return True

    def cached_tokens(self, tail: str) -> int:
        """Tokens of the prompt that were cached, as the answer tells the client."""
        body = {
            "model": "tiny",
            "prompt": f"{PREFIX} {tail}",
            "max_tokens": 4,
            "temperature": 0,
        }
        usage = self.request(f"{self._engine}/v1/completions", body)["usage"]
        assert usage["prompt_tokens"] == 1024 + len(tail.split())
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

    def reset(self) -> None:
        """Have the engine forget its own prefix cache, once no block is held for a store."""

        def done() -> bool:
            answer = self.request(f"{self._engine}/reset_prefix_cache", {})
            # vLLM 0.31 does not say.
            return answer is None or bool(answer["success"])

        self.wait("the prefix cache is reset", done, WAIT_SECONDS_MAX)


@pytest.fixture(scope="module")
def service(folder: Path, model: str) -> Iterator[Service]:
    ports = free_ports(2)
    config = folder / "run.yaml"
    settings = {
        "runtime": {"directory": str(folder / "run"), "name": f"demo-{os.getpid()}-run"},
        "host": {"size": "256MiB", "after_stop": "remove"},
        "http": {"port": ports[1]},
        "limits": PATIENT,
    }
    config.write_text(yaml.safe_dump(settings))
    command = [
        *(sys.executable, *places.program(), "run", "--config", str(config), "--"),
        *(str(Path(sys.executable).with_name("vllm")), "serve", model),
        *("--host", "127.0.0.1", "--port", str(ports[0]), "--served-model-name", "tiny"),
        *("--dtype", "bfloat16", "--block-size", "32", "--max-model-len", "4096"),
        *("--enforce-eager", "--enable-prompt-tokens-details"),
    ]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        # For the endpoint that resets the engine's own prefix cache.
        "VLLM_SERVER_DEV_MODE": "1",
    }
    log = folder / "run.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        service = Service(process, ports, log)
        service.wait("vLLM serves", service.healthy, START_SECONDS_MAX)
        yield service
    finally:
        if process.poll() is None:
            # Its children end with it: the sidecar by the kernel, vLLM by this signal.
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_SECONDS_MAX)


def test_two_requests_share_a_prefix(service: Service) -> None:
    assert service.cached_tokens("w1 w2 w3") == 0
    # The engine's own prefix cache.
    assert service.cached_tokens("w4 w5") == 1024
    service.wait(
        "the prefix is in host memory",
        lambda: service.status()["counters"]["chunks_stored"] >= 4,
        WAIT_SECONDS_MAX,
    )
    assert service.status()["counters"]["chunks_loaded"] == 0
    service.reset()
    assert service.cached_tokens("w6 w7 w8") == 1024
    assert service.status()["counters"]["chunks_loaded"] == 4


def test_a_killed_sidecar_is_started_again(service: Service) -> None:
    """The engine serves on meanwhile, and uses the new one as soon as it is there."""
    service.cached_tokens("w9")
    first = service.status()["pid"]
    os.kill(first, signal.SIGKILL)
    service.reset()
    assert service.cached_tokens("w10") == 0
    service.wait(
        "both roles are attached to a new sidecar",
        lambda: service.status()["pid"] != first and len(service.status()["sessions"]) == 2,
        WAIT_SECONDS_MAX,
    )

    def hits() -> bool:
        service.reset()
        cached_tokens = service.cached_tokens("w11")
        return cached_tokens == 1024 and service.status()["counters"]["chunks_loaded"] >= 4

    # The first of these may come before the prefix was stored again.
    service.wait("the new sidecar serves hits", hits, WAIT_SECONDS_MAX)


def test_sigterm_ends_everything(service: Service, folder: Path) -> None:
    """What is left of processes and pool files is looked for when the module ends."""
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(STOP_SECONDS_MAX) == 0, service.log.read_text()[-3000:]
    assert not list((folder / "run").rglob("*.sock"))
    assert "drained" in service.log.read_text()
