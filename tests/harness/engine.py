"""A vLLM engine in a process of its own, driven by lines of JSON.

`EngineProcess` starts and drives it; `engine_host.py` is the process. Commands go in on standard
input, answers come out on a descriptor of their own, so that nothing vLLM prints can mix with them.
Several requests can run at once: each command has an id that its answer repeats.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import IO, TYPE_CHECKING, Any, ClassVar, Final, Protocol

from tests import places

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

ANSWERS_FD: Final = "KVLAKE_ANSWERS_FD"
"""An environment variable: the descriptor that the engine's process answers on."""

START_SECONDS_MAX: Final = 240.0
COMMAND_SECONDS_MAX: Final = 240.0
STOP_SECONDS_MAX: Final = 30.0


class EngineFailed(Exception):
    """The engine's process ended or answered with an error; the message holds its last lines."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of a request. `logprobs[i]` maps token id to log probability at position i."""

    tokens: list[int]
    logprobs: list[dict[str, float]]
    cached_tokens: int
    ttft_ms: float
    total_ms: float
    finish_reason: str | None
    kv_transfer_params: dict[str, Any] | None = None
    """What the connector reports about the request."""
    embeddings: list[list[float]] | None = None
    """From a pooling engine: one for the whole prompt, or one for each of its tokens."""
    samples: list[tuple[list[int], list[dict[str, float]]]] | None = None
    """If there are several: tokens and log probabilities of each, the first one included."""
    prompt_logprobs: list[dict[str, float] | None] | None = None
    """As `logprobs`, for each token of the prompt but the first."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to start an engine: a saved model, the sidecar's socket (or no connector at all)."""

    model: str
    socket: str | None
    engine_args: dict[str, Any] = field(default_factory=dict[str, Any])
    connector: dict[str, Any] | None = None
    """Replaces the whole `kv_transfer_config`, for comparisons with other connectors."""
    connector_extra: dict[str, Any] = field(default_factory=dict[str, Any])
    beside: tuple[dict[str, Any], ...] = ()
    """Further connectors, asked after that one by a `MultiConnector`."""
    threads_bind: str = "0"
    kv_cache_gib: int = 1
    kv_role: str = "kv_both"


class Process(Protocol):
    """What `EngineProcess` needs of `subprocess.Popen`."""

    pid: int
    stdin: IO[bytes] | None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; the exit code. Raises `subprocess.TimeoutExpired`."""
        ...


def launch(argument: str, environment: Mapping[str, str], answers: int, log: IO[bytes]) -> Process:
    """Start the process of an engine, in a session of its own, with commands on standard input.

    Args:
        argument: the `EngineSpec` as JSON.
        environment: all of its environment but the number of `answers`.
        answers: the descriptor that it answers on.
        log: what it prints goes there.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "tests.harness.engine_host", argument],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        pass_fds=[answers],
        env={**environment, ANSWERS_FD: str(answers)},
        start_new_session=True,
        cwd=places.ROOT,
    )


class EngineProcess:
    """A running engine process; a context manager that ends it."""

    launch: ClassVar[Callable[[str, Mapping[str, str], int, IO[bytes]], Process]] = staticmethod(
        launch
    )
    """How its process is started. Tests replace it by a faster way."""

    def __init__(self, spec: EngineSpec, log: Path) -> None:
        self.spec = spec
        self.version = ""
        self._log_path = log
        self._ids = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        answers_read, answers_write = os.pipe()
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": str(spec.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": spec.threads_bind,
            "VLLM_NO_USAGE_STATS": "1",
        }
        with log.open("ab") as log_file:
            self.process = type(self).launch(
                json.dumps(asdict(spec)), environment, answers_write, log_file
            )
        os.close(answers_write)
        self._reader = threading.Thread(target=self._read, args=(answers_read,), daemon=True)
        self._ready: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._answers[0] = self._ready
        self._reader.start()

    def wait_ready(self, seconds: float = START_SECONDS_MAX) -> EngineProcess:
        """Wait until the engine serves. Raises `EngineFailed`."""
        self.version = str(self._take(self._ready, seconds)["version"])
        return self

    def generate(self, prompt: list[int], **options: Any) -> Generation:
        """Run one request to its end; see `begin`."""
        return self.finish(self.begin(prompt, **options))

    def begin(
        self,
        prompt: list[int],
        *,
        max_tokens: int = 8,
        logprobs: int = 5,
        cache_salt: str | None = None,
        ignore_eos: bool = True,
        adapter: tuple[str, int, str] | None = None,
        regex: str | None = None,
        image: int | None = None,
        rank: int | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        priority: int = 0,
        samples: int = 1,
        prompt_logprobs: int | None = None,
        as_embeddings: bool = False,
        inputs: list[list[int]] | None = None,
        trace_headers: dict[str, str] | None = None,
    ) -> int:
        """Start a request; its handle goes to `finish` or `abort`.

        `adapter` is the name, number and folder of a LoRA adapter. The output must match `regex`.
        `image` is the seed of an image of random pixels, for the prompt's image token. `rank` is
        the data-parallel rank that computes it. The lowest `priority` runs first, if vLLM's
        scheduler is set to use it. With several `samples`, each is drawn with its own seed.
        `as_embeddings` sends rows of the model's embedding table instead of tokens. `inputs` follow
        the prompt as streaming input; the result has the tokens of all answers. `trace_headers`
        name the caller's span.
        """
        return self._send(
            "generate",
            prompt=prompt,
            max_tokens=max_tokens,
            logprobs=logprobs,
            cache_salt=cache_salt,
            ignore_eos=ignore_eos,
            adapter=adapter,
            regex=regex,
            image=image,
            rank=rank,
            kv_transfer_params=kv_transfer_params,
            priority=priority,
            samples=samples,
            prompt_logprobs=prompt_logprobs,
            as_embeddings=as_embeddings,
            inputs=inputs,
            trace_headers=trace_headers,
        )

    def begin_embedding(
        self, prompt: list[int], *, cache_salt: str | None = None, task: str = "embed"
    ) -> int:
        """Start a request of a pooling engine, which generates nothing; else as `begin`.

        `task` is vLLM's: `embed` for an embedding of the prompt, `token_embed` for one for each of
        its tokens.
        """
        return self._send("embed", prompt=prompt, cache_salt=cache_salt, task=task)

    def finish(self, handle: int, seconds: float = COMMAND_SECONDS_MAX) -> Generation:
        """Wait for a request that was begun."""
        return Generation(**self._wait(handle, seconds))

    def finish_or_refused(self, handle: int) -> None:
        """Wait for a request that was begun before a pause.

        vLLM 0.33 refuses one that reaches the engine during the pause; earlier releases keep it.
        """
        try:
            self.finish(handle)
        except EngineFailed as failed:
            if "RetryableRequestError: Generation is paused" not in str(failed):
                raise

    def abort(self, handle: int) -> None:
        """Abort a request that was begun; its `finish` returns the output until then."""
        self._call("abort", handle=handle)

    def reset_prefix_cache(self, *, connector: bool = False) -> None:
        """Empty the engine's own prefix cache; waits for blocks that are still being stored."""
        deadline = time.monotonic() + 20
        while not self._call("reset", connector=connector)["done"]:
            if time.monotonic() > deadline:
                raise EngineFailed("the engine's prefix cache could not be reset in 20 s")
            time.sleep(0.01)

    def pause(self, mode: str) -> None:
        """End requests by vLLM's `mode`, and reset its caches, the connector's too."""
        self._call("pause", mode=mode)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._call("resume")

    def counter(self, name: str, **labels: str) -> float:
        """A counter of vLLM's own metrics, without `_total`, summed over its other labels."""
        return float(self._call("counter", name=name, labels=labels)["value"])

    def dummy_step(self) -> None:
        """Have every worker compute a dummy step of vLLM, without a request.

        Eager workers on CPUs skip the warm-up, in which a later pipeline stage allocates memory for
        the output of the stage before it: without this they fail at the first request.
        """
        self._call("rpc", method="execute_dummy_batch")

    def poison(self) -> None:
        """Overwrite every KV block; only after `reset_prefix_cache`, with nothing running."""
        self._call("rpc", method="kvlake_poison")

    def digests(self, *, layers: int | None = None) -> list[dict[int, str]]:
        """Per worker: block id to digest of its bytes, for blocks that are not poison.

        With data-parallel ranks, all workers of the first, then those of the next. `layers` is the
        number of layers to include, from the first; by default all.
        """
        workers = self._call("rpc", method="kvlake_digests", args=[layers])["result"]
        return [{int(block): digest for block, digest in worker.items()} for worker in workers]

    def head_digests(self) -> list[dict[int, list[str]]]:
        """As `digests`, but for each KV head of a block; for models of plain attention."""
        workers = self._call("rpc", method="kvlake_head_digests")["result"]
        return [{int(block): heads for block, heads in worker.items()} for worker in workers]

    def rpc(self, method: str, **options: Any) -> None:
        """Call a method of every worker."""
        self._call("rpc", method=method, options=options)

    def add_lora(self, adapter: tuple[str, int, str]) -> None:
        """Load an adapter, called as in `begin`, before any request comes with it."""
        self._call("add_lora", adapter=adapter)

    def core(self, method: str) -> list[Any]:
        """Per data-parallel rank: what a method of vLLM's engine core returns."""
        results: list[Any] = self._call("core", method=method)["result"]
        return results

    def stop(self) -> None:
        """End the process and everything that it started."""
        self._close_input()
        if self.process.poll() is None:
            if not self.version:
                # It reads no input before it serves.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self.kill()
        # vLLM's own processes are in the session that we started; none may outlive it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL to the engine and everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_SECONDS_MAX)
        self._close_input()

    def _close_input(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def log_tail(self, lines: int = 40) -> str:
        """The last lines that the engine printed."""
        with contextlib.suppress(OSError):
            return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _call(self, verb: str, **arguments: Any) -> dict[str, Any]:
        return self._wait(self._send(verb, **arguments), COMMAND_SECONDS_MAX)

    def _send(self, verb: str, **arguments: Any) -> int:
        handle = next(self._ids)
        self._answers[handle] = queue.SimpleQueue()
        line = json.dumps({"id": handle, "verb": verb, **arguments}) + "\n"
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        except OSError as error:
            raise EngineFailed(f"the engine is gone: {error}\n{self.log_tail()}") from error
        return handle

    def _wait(self, handle: int, seconds: float) -> dict[str, Any]:
        answer = self._take(self._answers[handle], seconds)
        del self._answers[handle]
        return answer

    def _take(self, answers: queue.SimpleQueue[dict[str, Any]], seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while True:
            try:
                answer = answers.get(timeout=0.5)
            except queue.Empty:
                if not self._reader.is_alive() and answers.empty():
                    raise EngineFailed(f"the engine ended\n{self.log_tail()}") from None
                if time.monotonic() > deadline:
                    raise EngineFailed(f"no answer in {seconds:.0f} s\n{self.log_tail()}") from None
                continue
            if "error" in answer:
                raise EngineFailed(f"{answer['error']}\n{self.log_tail()}")
            return answer

    def _read(self, fd: int) -> None:
        with os.fdopen(fd) as stream:
            for line in stream:
                answer = json.loads(line)
                waiting = self._answers.get(answer.pop("id"))
                if waiting is not None:
                    waiting.put(answer)
