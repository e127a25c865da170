"""A long run of everything under load and kills; says whether anything grew or got slower.

    python -m tests.soak.run --minutes 30 [--seed 1] [--name 30min]

Owns the clock of a run: the load, what happens when, the samples, the checks against the oracle,
and the report. Does not own the processes (`world.py`) or the judgement (`verdicts.py`).

Invariants: what is done follows from the seed; processes are started from the main thread alone
(the kernel ends them with the thread that did); the exit code is 0 only if every verdict is good.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sidecar.demo.engine import EngineFailed
from tests.e2e import arms
from tests.faulty_proxy import Fault
from tests.soak import plot, probes, verdicts
from tests.soak.prompts import Ask, Prompts
from tests.soak.verdicts import Sample, Verdict
from tests.soak.world import World, world

RESULTS: Final = Path(__file__).parents[2] / "benchmarks" / "results"
CLIENTS: Final = 4
MAX_TOKENS: Final = 4
SAMPLE_SECONDS: Final = 2.0
WINDOW_SECONDS: Final = 10.0
POINTS_MAX: Final = 400
ATTACH_SECONDS_MAX: Final = 60.0
REQUEST_SECONDS_MAX: Final = 180.0
EXPECTED_ERRORS: Final = (
    # Our own doing: faults of the store, and SIGSTOP.
    "kvlake.store: the store is unwell",
    'kvlake.server: not ready why="the event loop stood still',
    'kvlake.server: not ready why="the store is unwell',
)
_ERROR_LINE: Final = re.compile(r"\b(ERROR|CRITICAL)\b|^Traceback")


@dataclass
class Tally:
    """What the clients counted. Guarded by its lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_ms: float = 0.0
    running: int = 0
    failures: list[str] = field(default_factory=list[str])

    def totals(self) -> Sample:
        """The running totals."""
        with self.lock:
            return {
                "requests": self.requests,
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "ttft_ms_sum": self.ttft_ms,
            }


class Soak:
    """One run in one world."""

    def __init__(self, made: World, seconds: float, seed: int) -> None:
        self._world = made
        self._seconds = seconds
        self._chooser = random.Random(seed)
        self._prompts = Prompts(seed)
        self._started = time.monotonic()
        self._tally = Tally()
        self._go = threading.Event()
        self._over = threading.Event()
        self.samples: list[Sample] = []
        self.events: list[tuple[float, str]] = []
        self.checks: Counter[str] = Counter()
        self.wrong: list[str] = []

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def run(self, *, chaos: bool) -> None:
        """Load, samples and events until the time is over."""
        threads = [threading.Thread(target=self._client) for _ in range(CLIENTS)]
        threads.append(threading.Thread(target=self._watch))
        for thread in threads:
            thread.start()
        try:
            self._go.set()
            self._events(chaos=chaos)
        finally:
            self._over.set()
            self._go.set()
            for thread in threads:
                thread.join()

    # --- load ------------------------------------------------------------------------------

    def _next(self) -> Ask:
        with self._tally.lock:
            return self._prompts.next()

    def _client(self) -> None:
        while not self._over.is_set():
            self._go.wait()
            with self._tally.lock:
                if not self._go.is_set() or self._over.is_set():
                    continue
                self._tally.running += 1
                ask = self._prompts.next()
            try:
                engine = self._world.engine
                assert engine is not None, "it is replaced only while nothing runs"
                handle = engine.begin(ask.prompt, max_tokens=MAX_TOKENS, cache_salt=ask.salt)
                answer = engine.finish(handle, REQUEST_SECONDS_MAX)
                with self._tally.lock:
                    self._tally.requests += 1
                    self._tally.prompt_tokens += len(ask.prompt)
                    self._tally.cached_tokens += answer.cached_tokens
                    self._tally.ttft_ms += answer.ttft_ms
                    if len(answer.tokens) != MAX_TOKENS:
                        self._tally.failures.append(f"{len(answer.tokens)} tokens came")
            except EngineFailed as error:
                with self._tally.lock:
                    self._tally.failures.append(str(error)[:500])
                self._over.set()
            finally:
                with self._tally.lock:
                    self._tally.running -= 1

    def _quiet(self) -> None:
        """Hold the clients, and wait until no request runs."""
        with self._tally.lock:
            self._go.clear()
        deadline = time.monotonic() + REQUEST_SECONDS_MAX
        while True:
            with self._tally.lock:
                if not self._tally.running:
                    return
            if time.monotonic() > deadline:
                raise EngineFailed(f"a request did not complete in {REQUEST_SECONDS_MAX} s")
            time.sleep(0.02)

    # --- events ----------------------------------------------------------------------------

    def _events(self, *, chaos: bool) -> None:
        """From the main thread: kills and checks, at times that the seed chose."""
        self._check()
        checks = self._seconds / max(2, min(12, round(self._seconds / 120)))
        next_check, next_event = checks, 20.0 + self._chooser.random() * 10
        engine_kills = [0.38 * self._seconds, 0.9 * self._seconds] if self._seconds > 400 else []
        while self.now < self._seconds and not self._over.is_set():
            time.sleep(0.2)
            if engine_kills and self.now > engine_kills[0]:
                engine_kills.pop(0)
                self._replace_engine()
            elif self.now > next_check:
                next_check += checks
                self._check()
            elif chaos and self.now > next_event:
                next_event = self.now + 15 + self._chooser.random() * 45
                self._event()

    def _event(self) -> None:
        # A long life in the middle, without which slow growth could not be told.
        middle = 0.4 < self.now / self._seconds < 0.8
        names = ["stop", "slow_down", "hang_up", "server"]
        name = self._chooser.choice(names if middle else [*names, "kill", "drain", "kill"])
        self.events.append((self.now, name))
        match name:
            case "kill":
                self._world.kill_sidecar()
            case "drain":
                self._world.drain_sidecar()
            case "stop":
                self._world.stop_sidecar_for(1 + 4 * self._chooser.random())
            case "server":
                self._world.restart_server_after(1 + 4 * self._chooser.random())
            case "slow_down":
                self._world.store_fault(Fault.SLOW_DOWN, self._chooser.randint(1, 20))
            case _:
                self._world.store_fault(Fault.HANG_UP, self._chooser.randint(1, 20))

    def _replace_engine(self) -> None:
        self.events.append((self.now, "engine"))
        self._quiet()
        self._world.kill_engine()
        self._world.start_engine()
        self._go.set()

    def _check(self) -> None:
        """A prompt of the load: loaded through kvlake, equal to the engine's own hit."""
        self._quiet()
        engine = self._world.engine
        assert engine is not None
        arms.attach(engine, self._world.sidecar)
        call = arms.Call(self._next().prompt, MAX_TOKENS)
        oracle = arms.Oracle(engine, call)
        answer = arms.external_hit(engine, call, before=[call]).generation
        try:
            oracle.check(answer)
            self.checks["equal, loaded" if answer.cached_tokens else "equal, computed"] += 1
        except AssertionError:
            self.wrong.append(f"at {self.now:.0f} s, {answer.cached_tokens} tokens cached")
        self.events.append((self.now, "check"))
        self._go.set()

    # --- samples ---------------------------------------------------------------------------

    def _watch(self) -> None:
        calibration = probes.Calibration()
        while not self._over.wait(SAMPLE_SECONDS):
            sample: Sample = {"time": round(self.now, 2)}
            sample |= calibration.sample() | self._tally.totals()
            process, engine = self._world.sidecar.process, self._world.engine
            if process is not None:
                sample |= probes.process_sample([process.pid], "sidecar")
                sample["sidecar.life"] = process.pid
            if engine is not None:
                pids = probes.processes_of(engine.process.pid)
                sample |= probes.process_sample(pids, "engine")
                sample["engine.life"] = engine.process.pid
            sample |= probes.shared_memory_sample(self._world.sidecar.name)
            sample |= probes.status_sample(self._world.sidecar.status)
            sample["paused"] = float(not self._go.is_set())
            self.samples.append(sample)

    # --- the end ---------------------------------------------------------------------------

    def windows(self) -> list[Sample]:
        """Throughput by window, warm-up and pauses left out."""
        made: list[Sample] = []
        start = 0
        for number, sample in enumerate(self.samples):
            part = self.samples[start : number + 1]
            if sample["time"] - part[0]["time"] < WINDOW_SECONDS:
                continue
            start = number
            if any(one["paused"] for one in part) or part[0]["time"] < self.warm_seconds:
                continue
            made.append(_window(part))
        return made

    @property
    def warm_seconds(self) -> float:
        """How long nothing is judged: caches fill, allocators settle."""
        return min(60.0, self._seconds / 5)

    def judge(self) -> list[Verdict]:
        """Every verdict."""
        warm = self.warm_seconds
        life_warm = min(30.0, self._seconds / 5)
        log = self._world.sidecar.log_path.read_text(errors="replace").splitlines()
        errors = [line for line in log if _ERROR_LINE.search(line)]
        bad = [line for line in errors if not any(part in line for part in EXPECTED_ERRORS)]
        checked = ", ".join(f"{count} {name}" for name, count in self.checks.items())
        return [
            *verdicts.growth(self.samples, "sidecar", life_warm),
            *verdicts.growth(self.samples, "engine", max(life_warm, warm)),
            *verdicts.shared_growth(self.samples, warm),
            verdicts.throughput(self.windows()),
            verdicts.none_of("requests that did not complete", self._tally.failures),
            verdicts.none_of(f"answers that differ ({checked})", self.wrong),
            verdicts.none_of(f"error lines beside {len(errors) - len(bad)} expected ones", bad),
        ]

    def report(self, found: list[Verdict], seed: int) -> dict[str, object]:
        """The document that is kept."""
        step = max(1, -(-len(self.samples) // POINTS_MAX))
        return {
            "seconds": self._seconds,
            "seed": seed,
            "requests": self._tally.requests,
            "prompt_tokens": self._tally.prompt_tokens,
            "sidecar_lives": self._world.sidecar_lives,
            "verdicts": [vars(one) for one in found],
            "events": [(round(at, 1), what) for at, what in self.events],
            "windows": self.windows(),
            "samples": _columns(self.samples[::step]),
        }

    def picture(self, title: str) -> str:
        """The plot, with the windows' throughput among the samples."""
        merged = sorted([*self.samples, *self.windows()], key=lambda one: one["time"])
        step = max(1, -(-len(merged) // (2 * POINTS_MAX)))
        windows = {id(one) for one in self.windows()}
        kept = [
            one for number, one in enumerate(merged) if number % step == 0 or id(one) in windows
        ]
        return plot.svg(kept, self.events, title)


def _window(part: list[Sample]) -> Sample:
    first, last = part[0], part[-1]
    seconds = last["time"] - first["time"]

    def made(name: str) -> float:
        return last[name] - first[name]

    return {
        "time": last["time"],
        "requests_per_second": made("requests") / seconds,
        "tokens_per_second": made("prompt_tokens") / seconds,
        "hit_ratio": made("cached_tokens") / max(made("prompt_tokens"), 1),
        "ttft_ms": made("ttft_ms_sum") / max(made("requests"), 1),
        "calibration_seconds": sorted(one["calibration_seconds"] for one in part)[len(part) // 2],
    }


def _columns(samples: list[Sample]) -> dict[str, object]:
    """Each quantity as one row of numbers, None for gaps; one number where it never changed."""
    names = sorted({name for sample in samples for name in sample})
    made: dict[str, object] = {}
    for name in names:
        values = [float(f"{one[name]:.5g}") if name in one else None for one in samples]
        made[name] = values[0] if len(set(values)) == 1 else values
    return made


def soak(
    folder: Path, seconds: float, seed: int, *, module: str = "sidecar.cli", chaos: bool = True
) -> tuple[Soak, list[Verdict]]:
    """Run and judge one soak in `folder`."""
    with world(folder, module=module) as made:
        one = Soak(made, seconds, seed)
        one.run(chaos=chaos)
        return one, one.judge()


def main() -> int:
    """The command; 0 if every verdict is good."""
    parser = argparse.ArgumentParser(description="Run kvlake for long, under load and kills.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="", help="keep benchmarks/results/soak-NAME.{json,svg}")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvl-soak-", dir="/tmp"))
    one, found = soak(folder, given.minutes * 60, given.seed)
    for verdict in found:
        print(f"{'good' if verdict.good else 'BAD '}  {verdict.name}: {verdict.said}")
    name = given.name or f"{given.minutes:g}min"
    RESULTS.mkdir(parents=True, exist_ok=True)
    document = one.report(found, given.seed)
    (RESULTS / f"soak-{name}.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    title = f"kvlake soak: {given.minutes:g} minutes, {document['requests']} requests"
    (RESULTS / f"soak-{name}.svg").write_text(one.picture(title))
    good = all(verdict.good for verdict in found)
    print(
        f"soak: {'good' if good else 'BAD'}; soak-{name}.json and .svg in {RESULTS}; logs {folder}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
