"""Load tools that others wrote: `vllm bench serve`, and guidellm in an environment of its own.

Owns their command lines and how their results are read. A tool that fails is a `ToolFailed` with
the end of what it printed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.compare.peers.arms import MODEL_NAME, ONE_THREAD
from benchmarks.compare.peers.processes import LOG_CHARACTERS_MAX, OTHER_CORE
from benchmarks.compare.peers.rows import Row, milliseconds, percentile
from tests import places

if TYPE_CHECKING:
    from collections.abc import Sequence

GUIDELLM: Final = ".venv-guidellm/bin/guidellm"
TOOL_SECONDS_MAX: Final = 600.0


class ToolFailed(Exception):
    """A load tool ended with an error, or wrote no result."""


@dataclass
class Load:
    """What a tool measured."""

    requests: int
    failures: int
    ttfts: list[float]
    """Seconds, of requests that were answered."""
    tpot_p99_ms: float | None
    rate: float | None
    """Generated tokens per second."""
    texts: list[str] = field(default_factory=list[str])
    """Answers in the order of the requests, if the tool keeps that order."""
    problem: str = ""
    """The first failure."""

    def row(self, scenario: str, arm: str) -> Row:
        """As a row without counters."""
        return Row(
            scenario,
            arm,
            requests=self.requests,
            failures=self.failures,
            ttft_p50=milliseconds(percentile(self.ttfts, 0.5)),
            ttft_p99=milliseconds(percentile(self.ttfts, 0.99)),
            tpot_p99=None if self.tpot_p99_ms is None else round(self.tpot_p99_ms, 1),
            rate=None if self.rate is None else round(self.rate, 1),
            note=self.problem[:120],
        )


def bench_command(
    url: str, model: Path, result: Path, options: Sequence[str], *, seed: int
) -> list[str]:
    """`vllm bench serve`, which writes its result to a file."""
    return [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
        *("--model", MODEL_NAME, "--tokenizer", str(model), "--seed", str(seed)),
        *("--temperature", "0", "--ignore-eos", "--disable-tqdm"),
        *("--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50,99"),
        *("--save-result", "--save-detailed"),
        *("--result-dir", str(result.parent), "--result-filename", result.name),
        *options,
    ]


def guidellm_command(
    url: str, model: Path, result: Path, options: Sequence[str], *, seed: int
) -> list[str]:
    """guidellm, which writes its result to a file."""
    backend = {
        "kind": "openai_http",
        "target": url,
        "model": MODEL_NAME,
        "request_format": "/v1/completions",
        "http2": False,
        "extras": {"body": {"temperature": 0.0}},
    }
    tokenizer = {"kind": "hf_auto", "model": str(model)}
    return [
        *(str(places.ROOT / GUIDELLM), "run", "--backend", json.dumps(backend)),
        *(
            "--tokenizer",
            json.dumps(tokenizer),
            "--seed",
            json.dumps({"kind": "static", "value": seed}),
        ),
        *("--output", json.dumps({"kind": "json", "path": str(result)})),
        "--disable-console",
        *options,
    ]


def start_tool(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a tool on the core of the caches. Raises `ToolFailed`."""
    if not Path(command[0]).exists():
        raise ToolFailed(f"{command[0]} is missing; make compare sets it up")
    variables = {
        **ONE_THREAD,
        # vLLM makes the prompts of a trace from hashes of strings.
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("ab") as output:
        return subprocess.Popen(
            ["taskset", "--cpu-list", str(OTHER_CORE), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=log.parent,
            env=os.environ | variables,
            start_new_session=True,
        )


def finish_tool(
    process: subprocess.Popen[bytes], log: Path, result: Path, seconds: float = TOOL_SECONDS_MAX
) -> dict[str, Any]:
    """Wait for its end; its result. Raises `ToolFailed`."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        problem = f"did not end in {seconds:.0f} s; its log:\n{tail(log)}"
        raise ToolFailed(problem) from None
    finally:
        stop_tool(process)
    if code or not result.is_file():
        raise ToolFailed(f"ended with {code}; its log:\n{tail(log)}")
    answer: dict[str, Any] = json.loads(result.read_text())
    return answer


def stop_tool(process: subprocess.Popen[bytes]) -> None:
    """End a tool that still runs, with everything that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tail(log: Path) -> str:
    """The end of a log."""
    return log.read_text(errors="replace")[-LOG_CHARACTERS_MAX:]


def bench_load(result: dict[str, Any]) -> Load:
    """The result of `vllm bench serve --save-detailed`."""
    errors = [str(error) for error in result.get("errors", [])]
    answered = [not error for error in errors]
    ttfts = [ttft for ttft, ok in zip(result["ttfts"], answered, strict=True) if ok and ttft > 0]
    problems = [error.strip().splitlines()[-1] for error in errors if error.strip()]
    return Load(
        requests=len(errors),
        failures=len(errors) - int(result["completed"]),
        ttfts=ttfts,
        tpot_p99_ms=result.get("p99_tpot_ms"),
        rate=result.get("output_throughput"),
        texts=list(result.get("generated_texts", [])),
        problem=problems[0] if problems else "",
    )


def guidellm_load(result: dict[str, Any]) -> Load:
    """The result of a guidellm run with one benchmark.

    A request that it cancelled while it was on its way counts as failed.
    """
    (benchmark,) = result["benchmarks"]
    requests = benchmark["requests"]
    good, unfinished = requests["successful"], requests["incomplete"]
    failed = [*requests["errored"], *unfinished]
    ttfts = [one["time_to_first_token_ms"] / 1000 for one in good]
    # Its time per output token contains the first one; this is the same as vLLM's.
    tpots = [one["inter_token_latency_ms"] for one in good if one["output_tokens"] > 1]
    seconds = max((one["request_end_time"] for one in good), default=0.0) - min(
        (one["request_start_time"] for one in good), default=0.0
    )
    tokens = sum(one["output_tokens"] for one in good)
    problem = str((failed[0].get("info") or {}).get("error") or "") if failed else ""
    if unfinished:
        problem = f"{len(unfinished)} not finished" + (f"; {problem}" if problem else "")
    return Load(
        requests=len(good) + len(failed),
        failures=len(failed),
        ttfts=ttfts,
        tpot_p99_ms=percentile(tpots, 0.99),
        rate=tokens / seconds if seconds else None,
        problem=problem,
    )
