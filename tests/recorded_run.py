"""The recorded run of the documentation: what operators see while a real engine serves a load.

`make record` runs `vllm serve`, `vllm bench serve` with repeated prefixes, `kvlake top` and the
page beside them, kills the sidecar in the middle, and starts it again. It writes what was seen to
`docs/evidence/recorded-run.md` and `docs/images/recorded-run.png`. Nothing in them is edited.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sidecar.demo.model import write_model
from sidecar.demo.processes import free_ports
from tests import places
from tests.browser import browser
from tests.harness.sidecars import SidecarProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Page

PAGE: Final = places.ROOT / "docs/evidence/recorded-run.md"
PICTURE: Final = places.ROOT / "docs/images/recorded-run.png"
BIN: Final = Path(sys.executable).parent
HOST_SIZE: Final = "160MiB"
PREFIXES: Final = 16
PREFIX_TOKENS: Final = 1536
SUFFIX_TOKENS: Final = 128
REQUESTS: Final = 480
CLIENTS: Final = 2
ENGINE_BLOCKS: Final = 256
SECONDS_BEFORE_KILL: Final = 40.0
SECONDS_DEAD: Final = 5.0
SECONDS_AFTER: Final = 30.0
START_SECONDS_MAX: Final = 240.0
LOAD_SECONDS_MAX: Final = 900.0
SERVE: Final = (
    "--served-model-name tiny --enforce-eager --dtype float32 --max-model-len 4096 "
    f"--block-size 32 --num-gpu-blocks-override {ENGINE_BLOCKS}"
)
LOAD: Final = (
    "--backend openai --model tiny --dataset-name prefix_repetition --ignore-eos --seed 1 "
    f"--prefix-repetition-num-prefixes {PREFIXES} --prefix-repetition-prefix-len {PREFIX_TOKENS} "
    f"--prefix-repetition-suffix-len {SUFFIX_TOKENS} --prefix-repetition-output-len 8 "
    f"--num-prompts {REQUESTS} --max-concurrency {CLIENTS}"
)
FIGURES: Final = {
    "completed": "requests answered",
    "failed": "requests failed",
    "median_ttft_ms": "median time to the first token, ms",
    "p99_ttft_ms": "99th percentile, ms",
    "total_token_throughput": "tokens per second, those of prompts included",
}


@dataclass
class Seen:
    """What one command printed, and when."""

    title: str
    command: str
    text: str
    at: float


class Recording:
    """Runs commands as an operator would, and keeps what they print."""

    def __init__(self, sidecar: SidecarProcess) -> None:
        self._began = time.monotonic()
        self._sidecar = sidecar
        self.seen: list[Seen] = []

    @property
    def now(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self._began

    def begin(self) -> None:
        """The load begins."""
        self._began = time.monotonic()

    def run(self, title: str, *words: str) -> None:
        """Run `kvlake` with these words."""
        done = subprocess.run(
            [BIN / "kvlake", *words, "--url", self._sidecar.http_url],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1"},
        )
        text = (done.stdout + done.stderr).rstrip()
        shown = " ".join(("kvlake", *words))
        self.seen.append(Seen(title, shown, text, self.now))


@contextlib.contextmanager
def _process(arguments: list[str], log: Path) -> Any:
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments,
            stdout=output,
            stderr=output,
            env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _until(what: str, true: Callable[[], object], seconds: float, log: Path | None = None) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, OSError):
            if true():
                return
        time.sleep(0.2)
    about = "" if log is None else log.read_text()[-3000:]
    raise TimeoutError(f"{what}: not in {seconds:.0f} s\n{about}")


def _answers(url: str) -> bool:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)


def record(folder: Path) -> dict[str, Any]:
    """Run it all; returns what was seen."""
    model = write_model(folder / "model")
    (folder / "bucket").mkdir()
    config = {
        "host": {"size": HOST_SIZE},
        "store": {"url": f"file://{folder / 'bucket'}", "refresh_seconds": "500ms"},
        "gpu": {"hour_price": 2.5, "currency": "USD"},
    }
    load_before = os.getloadavg()[0]
    (port,) = free_ports(1)
    engine = f"http://127.0.0.1:{port}"
    with SidecarProcess(folder / "side", config) as sidecar:
        transfer = {
            "kv_connector": "KVLakeConnector",
            "kv_connector_module_path": "connector.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": sidecar.socket},
        }
        serve = [str(BIN / "vllm"), "serve", str(model), *SERVE.split(), "--port", str(port)]
        serve += ["--kv-transfer-config", json.dumps(transfer)]
        log = folder / "engine.log"
        with _process(serve, log), browser() as chromium:
            _until("vLLM serves", lambda: _answers(f"{engine}/health"), START_SECONDS_MAX, log)
            page = chromium.new_page(viewport={"width": 1280, "height": 900})
            page.goto(sidecar.http_url)
            page.wait_for_selector("body[data-rounds]", timeout=60_000)
            recording = Recording(sidecar)
            load = [str(BIN / "vllm"), "bench", "serve", *LOAD.split(), "--base-url", engine]
            load += ["--tokenizer", str(model), "--save-result", "--result-dir", str(folder)]
            load += ["--result-filename", "load.json"]
            load_log = folder / "load.log"
            with _process(load, load_log) as bench:
                _until(
                    "the load begins",
                    lambda: sidecar.status()["prompts"]["prompts"] > 0,
                    START_SECONDS_MAX,
                    load_log,
                )
                recording.begin()
                time.sleep(SECONDS_BEFORE_KILL)
                recording.run("Under load", "top", "--once")
                recording.run("The same as text", "status")
                _photograph(page)
                recording.run("One request", "explain", "--last", "1")
                sidecar.kill()
                killed = recording.now
                recording.run("The sidecar was killed", "top", "--once")
                time.sleep(SECONDS_DEAD)
                sidecar.start()
                started = recording.now
                time.sleep(SECONDS_AFTER)
                recording.run("After its restart", "top", "--once")
                bench.wait(LOAD_SECONDS_MAX)
                if bench.returncode:
                    raise RuntimeError(load_log.read_text()[-3000:])
    return {
        "load_before": load_before,
        "killed": killed,
        "started": started,
        "seen": recording.seen,
        "load": json.loads((folder / "load.json").read_text()),
    }


def _photograph(page: Page) -> None:
    before = _rounds(page)
    _until("the page is drawn again", lambda: _rounds(page) > before + 1, 60.0)
    PICTURE.parent.mkdir(exist_ok=True)
    page.screenshot(path=PICTURE, full_page=True)


def _rounds(page: Page) -> int:
    return int(page.locator("body").get_attribute("data-rounds") or 0)


def render(result: dict[str, Any]) -> str:
    """The page of the documentation."""
    load = result["load"]
    figures = "\n".join(
        f"| {words} | {load.get(name, 0):,.0f} |" for name, words in FIGURES.items()
    )
    frames = "\n".join(
        f"### {one.title}\n\n{one.at:.0f} seconds after the load began:\n\n"
        f"```\n$ {one.command}\n{_narrow(one.text)}\n```\n"
        for one in result["seen"]
    )
    return f"""# A recorded run

Written by `make record`, {datetime.now(UTC):%Y-%m-%d}; long lines are folded. Load average before:
{result["load_before"]:.1f}. Two cores: the figures are those of a small model that computes on a
processor, beside its load, its cache and a browser.

A real engine serves, with room for {ENGINE_BLOCKS * 32:,} tokens of its own:

```
vllm serve MODEL {_folded(SERVE)}
```

Its sidecar has {HOST_SIZE} of host memory and a folder as the store. The load has {PREFIXES}
prefixes of {PREFIX_TOKENS:,} tokens, and {SUFFIX_TOKENS} more that no other request has:

```
vllm bench serve {_folded(LOAD)}
```

{result["killed"]:.0f} seconds after the load began, the sidecar was killed (SIGKILL), and
{result["started"] - result["killed"]:.0f} seconds later started again. The load went on:

| | |
|---|---|
{figures}

## The five questions

- **Does it help?** The first lines of `kvlake status`, and the first panel of `kvlake top`.
- **Is it healthy?** The second panel. A sidecar that is gone says so in the place of its figures;
  engines compute meanwhile.
- **Why was this request slow, or a miss?** `kvlake explain`.
- **What is in it?** The tiers in `kvlake status`, the third key of `kvlake top`, and the page.
- **What if it had more memory?** The line `chunks of prompts that an LRU would find`.

The page at the same moment has all of them:

![The page under load](../images/recorded-run.png)

## What the commands printed

{frames}"""


def _narrow(text: str) -> str:
    return "\n".join(
        textwrap.fill(
            line.rstrip(),
            96,
            subsequent_indent="    ",
            replace_whitespace=False,
            break_on_hyphens=False,
        )
        for line in text.splitlines()
    )


def _folded(options: str) -> str:
    """Options on lines of their own, as a shell takes them."""
    return " \\\n    ".join(re.split(r" (?=--)", options))


def main() -> None:
    """Record, and write the page."""
    folder = Path(tempfile.mkdtemp(prefix="kvl-record-", dir="/tmp"))
    try:
        PAGE.write_text(render(record(folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{PAGE.relative_to(places.ROOT)} is written")


if __name__ == "__main__":
    main()
