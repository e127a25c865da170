"""A vLLM engine in a process of its own, which answers one command at a time.

`DemoEngine` starts and drives it; `python -m sidecar.demo.engine MODEL SOCKET` is the process. A
command is a line of JSON on its standard input. Answers are lines of JSON on a descriptor of their
own, so that nothing that vLLM prints can mix with them.
"""

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from sidecar.demo.processes import ProcessFailed

ANSWERS_FD: Final = "KVLAKE_ANSWERS_FD"
"""An environment variable: the descriptor that the engine's process answers on."""
ANSWER_SECONDS_MAX: Final = 240.0
RESET_SECONDS_MAX: Final = 20.0
STOP_SECONDS_MAX: Final = 30.0
GENERATED_TOKENS: Final = 16
LOGPROBS: Final = 5
POISON: Final = 0x7B
"""Every byte of a poisoned block: a huge bfloat16, which changes the result of any attention."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of a request. `logprobs[i]` maps token id to log probability at position i."""

    tokens: list[int]
    logprobs: list[dict[str, float]]
    cached_tokens: int
    ttft_ms: float


def launch_engine(
    model: str, socket: str, environment: Mapping[str, str], answers: int, log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start an engine's process in a session of its own, with commands on standard input."""
    return subprocess.Popen(
        [sys.executable, "-m", "sidecar.demo.engine", model, socket],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        pass_fds=[answers],
        env={**environment, ANSWERS_FD: str(answers)},
        start_new_session=True,
    )


class DemoEngine:
    """A running engine process; a context manager that ends it."""

    def __init__(self, model: str, socket: str, log: Path) -> None:
        self.version = ""
        self._log = log
        answers, theirs = os.pipe()
        self._answers = os.fdopen(answers, "rb", buffering=0)
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        environment = os.environ | {
            # The demo's model is removed with its folder, so its digests go there. What vLLM keeps
            # stays where it is, and makes the next start faster.
            "XDG_CACHE_HOME": str(log.parent / "cache"),
            "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", f"{caches}/vllm"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with log.open("ab") as file:
            self._process = launch_engine(model, socket, environment, theirs, file)
        os.close(theirs)

    def wait_ready(self) -> None:
        """Wait until the engine serves. Raises `ProcessFailed`."""
        self.version = str(self._answer()["version"])

    def generate(self, prompt: list[int], cache_salt: str | None = None) -> Generation:
        """Run one request to its end."""
        self.begin(prompt, cache_salt)
        return self.finish()

    def begin(self, prompt: list[int], cache_salt: str | None = None) -> None:
        """Start a request. `finish` must be called before anything else."""
        self._send("generate", prompt=prompt, cache_salt=cache_salt)

    def finish(self) -> Generation:
        """Wait for the request that was begun."""
        return Generation(**self._answer())

    def reset(self) -> None:
        """Empty the engine's prefix cache, after running stores, and poison its KV blocks."""
        self._send("reset")
        self._answer()

    def _send(self, verb: str, **arguments: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"verb": verb, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ProcessFailed(f"the engine ended: {error}\n{self._log_tail()}") from error

    def _answer(self) -> dict[str, Any]:
        readable, _, _ = select.select([self._answers], [], [], ANSWER_SECONDS_MAX)
        line = self._answers.readline() if readable else b""
        if not line:
            problem = "the engine ended" if readable else f"no answer in {ANSWER_SECONDS_MAX:g} s"
            raise ProcessFailed(f"{problem}\n{self._log_tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ProcessFailed(f"{answer['error']}\n{self._log_tail()}")
        return answer

    def _log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])

    def __enter__(self) -> "DemoEngine":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        try:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            if not self.version:
                # It reads no input before it serves.
                self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS_MAX)
        finally:
            # vLLM's own processes are in the session that was started here; none may outlive it,
            # also after a second Ctrl-C.
            self._signal(signal.SIGKILL)
            self._process.wait(STOP_SECONDS_MAX)
            self._answers.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


# --- the process ---------------------------------------------------------------------------------


class KVPoison:
    """Mixed into vLLM's workers (`worker_extension_cls`), so that `collective_rpc` can call it."""

    model_runner: Any

    def kvlake_poison(self) -> None:
        """Overwrite every KV block, so that a load that copies nothing is noticed."""
        import torch

        for tensor in self.model_runner.kv_caches:
            tensor.view(torch.uint8).fill_(POISON)


async def _generate(engine: Any, prompt: list[int], cache_salt: str | None) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    given = TokensPrompt(prompt_token_ids=prompt)
    if cache_salt is not None:
        given["cache_salt"] = cache_salt
    params = SamplingParams(
        max_tokens=GENERATED_TOKENS, logprobs=LOGPROBS, temperature=0.0, ignore_eos=True
    )
    started, ttft_ms = time.perf_counter(), 0.0
    last: Any = None
    async for output in engine.generate(given, params, f"request-{started}"):
        ttft_ms = ttft_ms or (time.perf_counter() - started) * 1000
        last = output
    sample = last.outputs[0]
    return {
        "tokens": list(sample.token_ids),
        "logprobs": [
            {str(token): value.logprob for token, value in position.items()}
            for position in sample.logprobs
        ],
        "cached_tokens": int(last.num_cached_tokens or 0),
        "ttft_ms": ttft_ms,
    }


async def _reset(engine: Any) -> dict[str, Any]:
    deadline = time.monotonic() + RESET_SECONDS_MAX
    while await engine.reset_prefix_cache() is False:
        if time.monotonic() > deadline:
            raise TimeoutError(f"prefix cache not reset in {RESET_SECONDS_MAX:g} s")
        await asyncio.sleep(0.01)
    await engine.collective_rpc("kvlake_poison")
    return {}


def dtype() -> str:
    """The numbers that this machine's CPU multiplies fast, as vLLM names them.

    PyTorch has fast products of bfloat16 with AVX-512; with AVX2 alone they take five times as long
    as those of float32.
    """
    import torch

    return "float32" if torch.backends.cpu.get_cpu_capability() == "AVX2" else "bfloat16"


async def _serve(model: str, socket: str, answers: IO[str]) -> None:
    import vllm
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {
        "model": model,
        "dtype": dtype(),
        "block_size": 32,
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "worker_extension_cls": "sidecar.demo.engine.KVPoison",
        "kv_transfer_config": {
            "kv_connector": "KVLakeConnector",
            "kv_connector_module_path": "connector.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": socket},
        },
    }
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    verbs: dict[str, Any] = {"generate": _generate, "reset": _reset}
    try:
        print(json.dumps({"version": f"vllm {vllm.__version__}"}), file=answers, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            try:
                answer = await verbs[command.pop("verb")](engine, **command)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        engine.shutdown()


def main() -> None:
    """The process; its arguments are the model's folder and the sidecar's socket."""
    _, model, socket = sys.argv
    fd = int(os.environ.pop(ANSWERS_FD))
    os.set_inheritable(fd, False)
    with os.fdopen(fd, "w") as answers:
        asyncio.run(_serve(model, socket, answers))


if __name__ == "__main__":
    main()
