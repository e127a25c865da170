"""`kvlake run -- vllm serve`, driven over HTTP as a client would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar.demo.servers import free_ports

pytestmark = pytest.mark.engine

START_SECONDS_MAX = 240.0
STOP_SECONDS_MAX = 90.0


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        result: dict[str, Any] = json.load(answer)
        return result


def wait_until_served(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(log.read_text(errors="replace")[-3000:])


def test_two_requests_share_a_prefix(folder: Path, model: str) -> None:
    port, http_port = free_ports(2)
    name = f"demo-{os.getpid()}-run"
    config = folder / "run.yaml"
    settings = {
        "runtime": {"directory": str(folder / "run"), "name": name},
        "host": {"size": "256MiB"},
        "http": {"port": http_port},
    }
    config.write_text(yaml.safe_dump(settings))
    vllm = str(Path(sys.executable).with_name("vllm"))
    command = [
        *(sys.executable, "-m", "sidecar.cli", "run", "--config", str(config), "--"),
        *(vllm, "serve", model, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "bfloat16", "--block-size", "32", "--max-model-len", "4096"),
        *("--enforce-eager", "--enable-prompt-tokens-details"),
        *("--served-model-name", "tiny"),
    ]
    log = folder / "run.log"
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        # The development endpoint that resets the engine's own prefix cache.
        "VLLM_SERVER_DEV_MODE": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        base = f"http://127.0.0.1:{port}"
        wait_until_served(process, f"{base}/health", log)
        prefix = " ".join(f"w{i * 7 % 4000}" for i in range(1024))
        cached: list[int] = []
        for tail in ("w1 w2 w3", "w4 w5 w6"):
            body = {
                "model": "tiny",
                "prompt": f"{prefix} {tail}",
                "max_tokens": 4,
                "temperature": 0,
            }
            usage = post(f"{base}/v1/completions", body)["usage"]
            cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
            # Blocks are held until they are stored, so a reset that works says that they are.
            deadline = time.monotonic() + 20
            while True:
                urllib.request.urlopen(
                    urllib.request.Request(f"{base}/reset_prefix_cache", b""), timeout=10
                ).close()
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{http_port}/status", timeout=10
                ) as answer:
                    status = json.load(answer)
                if status["counters"]["chunks_stored"] >= 4 or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        assert cached[0] == 0
        assert cached[1] == 1024, log.read_text(errors="replace")[-3000:]
        assert status["counters"]["chunks_loaded"] >= 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_SECONDS_MAX) in (0, 128 + signal.SIGTERM)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert not list((folder / "run").rglob("*.sock")), "sockets are removed"
