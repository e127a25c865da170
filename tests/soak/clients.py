"""The clients of a soak: a few at a time, each asks, waits for its answer, and asks again.

Owns the load and what was counted of it. Does not own which prompt comes next (`prompts.py`), nor
when there is load (`run.py`). Invariants: a held load has no request running; whatever goes wrong
in a client is a failure that is told, and ends the run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from tests.harness.engine import EngineFailed, EngineProcess, Generation
from tests.soak.prompts import Ask, Prompts

Sample = dict[str, float]

CLIENTS: Final = 4
MAX_TOKENS: Final = 4
REQUEST_SECONDS_MAX: Final = 180.0
RECENT_MAX: Final = 12
SLOW_SECONDS: Final = 30.0
"""A request that takes longer hangs: the deadlines that it may meet add up to much less."""


class Clients:
    """Threads that ask whatever engine there is.

    Args:
        engine: the engine of now; it is replaced only while the load is held.
        seed: from which the prompts follow.
    """

    def __init__(self, engine: Callable[[], EngineProcess], seed: int) -> None:
        self._engine = engine
        self._prompts = Prompts(seed)
        self._lock = threading.Lock()
        self._go = threading.Event()
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._requests = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._ttft_ms = 0.0
        self.over = threading.Event()
        self.slowest_seconds = 0.0
        self.failures: list[str] = []
        self.recent: deque[tuple[Ask, Generation]] = deque(maxlen=RECENT_MAX)
        """The last ones, for checks against an engine without kvlake."""

    @property
    def held(self) -> bool:
        """Whether no new request may begin."""
        return not self._go.is_set()

    def start(self) -> None:
        """Make the threads; the load is held until `release`."""
        self._threads = [threading.Thread(target=self._client) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def release(self) -> None:
        """Let requests begin."""
        self._go.set()

    def hold(self) -> None:
        """Let no request begin, and wait until none runs. Raises `EngineFailed`."""
        with self._lock:
            self._go.clear()
        deadline = time.monotonic() + 2 * REQUEST_SECONDS_MAX
        while True:
            with self._lock:
                if not self._running:
                    return
            if time.monotonic() > deadline:
                raise EngineFailed(f"a request did not end in {2 * REQUEST_SECONDS_MAX:.0f} s")
            time.sleep(0.02)

    def stop(self) -> None:
        """End the threads, each after its request."""
        self.over.set()
        self._go.set()
        for thread in self._threads:
            thread.join()
        self._go.clear()

    def totals(self) -> Sample:
        """What was counted since the start."""
        with self._lock:
            return {
                "requests": self._requests,
                "prompt_tokens": self._prompt_tokens,
                "cached_tokens": self._cached_tokens,
                "ttft_ms_sum": self._ttft_ms,
            }

    def next(self) -> Ask:
        """A prompt of the load, for others."""
        with self._lock:
            return self._prompts.next()

    def _client(self) -> None:
        while not self.over.is_set():
            self._go.wait()
            with self._lock:
                if self.held or self.over.is_set():
                    continue
                self._running += 1
                ask = self._prompts.next()
            try:
                self._ask(ask)
            except Exception as error:
                with self._lock:
                    self.failures.append(f"{type(error).__name__}: {error}"[:500])
                self.over.set()
            finally:
                with self._lock:
                    self._running -= 1

    def _ask(self, ask: Ask) -> None:
        engine = self._engine()
        started = time.monotonic()
        handle = engine.begin(ask.prompt, max_tokens=MAX_TOKENS, cache_salt=ask.salt)
        answer = engine.finish(handle, REQUEST_SECONDS_MAX)
        with self._lock:
            self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - started)
            self._requests += 1
            self._prompt_tokens += len(ask.prompt)
            self._cached_tokens += answer.cached_tokens
            self._ttft_ms += answer.ttft_ms
            self.recent.append((ask, answer))
            if len(answer.tokens) != MAX_TOKENS:
                self.failures.append(f"{len(answer.tokens)} tokens came, not {MAX_TOKENS}")
