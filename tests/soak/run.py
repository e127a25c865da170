"""A long run of everything under load and kills; says whether anything grew or got slower.

    python -m tests.soak.run --minutes 30 [--seed 1] [--docs]

Owns the clock of a run: when there is load, what happens when, the samples, and the checks. Does
not own the processes (`world.py`), the load (`clients.py`), the measure of speed (`pace.py`), the
judgement (`verdicts.py`) or what is told (`report.py`).

Invariants: what is done follows from the seed; processes are started from the main thread alone
(the kernel ends them with the thread that did); whatever goes wrong in a run, it ends with a
report, and the exit code is 0 only if every verdict is good.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from sidecar.exits import Exit
from tests.e2e import arms
from tests.faulty_proxy import Fault
from tests.harness.sidecars import ERROR_LINE, STOOD_STILL, ProcessFailed
from tests.soak import probes, report, verdicts
from tests.soak.clients import MAX_TOKENS, REQUEST_SECONDS_MAX, SLOW_SECONDS, Clients
from tests.soak.pace import Pace
from tests.soak.verdicts import Sample, Verdict
from tests.soak.world import STORE_SIZE, World, world

SAMPLE_SECONDS: Final = 2.0
REST_SECONDS_MAX: Final = 60.0
PACE_SHARE: Final = 0.2
"""Share of the run at its start and at its end in which its speed is measured."""
PACE_ROUNDS: Final = (2, 60)
"""At least and at most, each time."""
EVENT_SECONDS: Final = (5.0, 30.0)
"""Between one event and the next."""
PACE_SECONDS_MIN: Final = 100.0
"""A shorter run takes a single round, each time."""
KILLS_UNTIL: Final = 0.45
"""Share of the run. One life of each process then goes on to its end: slow growth needs time."""
EXPECTED_ERRORS: Final = (
    # Our own doing: faults of the store, and SIGSTOP.
    "kvlake.store: object store unavailable",
    STOOD_STILL,
    'kvlake.server: not ready why="the store is unwell',
)
LOSSY_ERROR: Final = "slots were still in use at the end"
"""Expected where the drain says that its time was over while reads or stores still ran."""


class Soak:
    """One run in one world."""

    def __init__(self, made: World, seconds: float, seed: int) -> None:
        self._world = made
        self.seconds = seconds
        self.seed = seed
        self._chooser = random.Random(seed)
        self._first = ["drain", "kill"]
        self._started = time.monotonic()
        self.clients = Clients(lambda: made.engine, seed)
        self.pace = Pace(seed, self._rest)
        self.samples: list[Sample] = []
        self.rounds: list[Sample] = []
        self.events: list[tuple[float, str]] = []
        self.checks: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.stored: list[Sample] = []
        self.unrest: list[str] = []
        self.broken: list[str] = []
        """What ended the run before its time."""
        self._errors_judged = 0

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def warm_seconds(self) -> float:
        """How long nothing is judged: caches fill, allocators settle."""
        return min(60.0, self.seconds / 5)

    def run(self, *, chaos: bool) -> None:
        """Load, samples and events until the time is over."""
        watch = threading.Thread(target=self._watch)
        self.clients.start()
        watch.start()
        try:
            self._phases(chaos=chaos)
        except (Exception, KeyboardInterrupt) as error:
            self._break(error)
        finally:
            self.clients.stop()
            watch.join()

    def _break(self, error: BaseException) -> None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        self.broken.append(f"at {self.now:.0f} s in {where}: {type(error).__name__}: {error}")

    def _phases(self, *, chaos: bool) -> None:
        """From the main thread: a check, the load, and the measure of speed around the events."""
        self._check()
        self._warm()
        self._measure("start")
        self._events((1 - PACE_SHARE) * self.seconds, chaos=chaos)
        self._check()
        self._measure("end")
        self._rest()
        self._ask_store()

    def _warm(self) -> None:
        """Load until caches are warm; on a slow machine the check before took all of that time."""
        self.clients.release()
        while self.now < self.warm_seconds or not self.clients.totals()["requests"]:
            if self.clients.over.wait(0.2):
                return

    # --- events ----------------------------------------------------------------------------

    def _events(self, until: float, *, chaos: bool) -> None:
        """Kills and checks, at times that the seed chose."""
        start = self.now
        checks = (until - start) / max(1, min(10, round((until - start) / 120)))
        next_check, next_event = start + checks, start + self._chooser.uniform(2, 5)
        shares = (0.15, 0.35) if self.seconds > 400 else (0.35,) if self.seconds > 100 else ()
        engine_kills = [share * self.seconds for share in shares]
        while self.now < until:
            self.clients.release()
            if self.clients.over.wait(0.2):
                return
            if chaos and engine_kills and self.now > engine_kills[0]:
                engine_kills.pop(0)
                self._replace_engine()
            elif self.now > next_check:
                next_check += checks
                self._check()
                self._round("middle")
            elif chaos and self.now > next_event:
                self._event()
                next_event = self.now + self._chooser.uniform(*EVENT_SECONDS)

    def _event(self) -> None:
        names = ["stop", "slow_down", "hang_up", "server"]
        if self.now < KILLS_UNTIL * self.seconds:
            names += ["kill", "kill", "drain", "drain"]
        # A short run, too, has both.
        name = self._first.pop() if self._first else self._chooser.choice(names)
        self.events.append((self.now, name))
        match name:
            case "kill":
                self._world.kill_sidecar()
            case "drain":
                self._world.drain_sidecar()
            case "stop":
                self._world.stop_sidecar_for(self._chooser.uniform(1, 5))
            case "server":
                self._world.restart_server_after(self._chooser.uniform(1, 5))
            case "slow_down":
                self._world.store_fault(Fault.SLOW_DOWN, self._chooser.randint(1, 20))
            case _:
                self._world.store_fault(Fault.HANG_UP, self._chooser.randint(1, 20))

    def _replace_engine(self) -> None:
        self.events.append((self.now, "engine"))
        self.clients.hold()
        self._world.kill_engine()
        self._world.start_engine()
        self.clients.release()

    # --- checks ----------------------------------------------------------------------------

    def _rest(self) -> None:
        """Wait until the sidecar has nothing to do and holds nothing. One that does is noted."""
        held: dict[str, int] = {}

        def idle(status: dict[str, Any]) -> bool:
            nonlocal held
            held = arms.held(status)
            return not held

        try:
            self._world.sidecar.wait("it comes to rest", idle, REST_SECONDS_MAX)
        except (ProcessFailed, OSError) as error:
            # First what it is: the error has the whole status, of which reports show the start.
            self.unrest.append(f"at {self.now:.0f} s, {held}: {error}")

    def _check(self) -> None:
        """A prompt of the load is loaded through kvlake; and what others got lately was right."""
        self.clients.hold()
        self.events.append((self.now, "check"))
        engine = self._world.engine
        self._rest()
        arms.attach(engine, self._world.sidecar)
        prompt = self.clients.next().prompt
        if len(prompt) % arms.BLOCK_TOKENS == 0:
            # All of it could be loaded, but for its last token. The engine's own hit of whole
            # blocks is one block less, so it has none that this could be compared with.
            prompt = prompt[:-1]
        call = arms.Call(prompt, MAX_TOKENS)
        oracle = arms.Oracle(engine, call)
        answer = arms.external_hit(engine, call, before=[call]).generation
        try:
            oracle.check(answer)
            self.checks["loaded" if answer.cached_tokens else "computed"] += 1
        except AssertionError as error:
            failed = engine.counter("vllm:kvlake_loads_failed")
            self.wrong.append(
                f"at {self.now:.0f} s, {answer.cached_tokens} tokens cached, {failed:.0f} loads "
                f"failed so far, alone: {str(error)[:500]}"
            )
        self._ask_store()
        given = [answer for _, answer in self.clients.recent]
        reference = self._world.reference
        expected = [
            reference.finish(
                reference.begin(ask.prompt, max_tokens=MAX_TOKENS), REQUEST_SECONDS_MAX
            )
            for ask, _ in self.clients.recent
        ]
        self.clients.recent.clear()
        self.pace.compare(f"at {self.now:.0f} s", given, expected)

    def _ask_store(self) -> None:
        objects, num_bytes = self._world.stored()
        self.stored.append(
            {"time": round(self.now, 2), "store.objects": objects, "store.bytes": num_bytes}
        )

    def _measure(self, phase: str) -> None:
        """Rounds until their ratio is known well enough, or their time is over."""
        at_least, at_most = PACE_ROUNDS
        until = self.now + PACE_SHARE * self.seconds
        if self.seconds < PACE_SECONDS_MIN:
            at_least = at_most = 1
        else:
            # The first one brings the code of both engines into the caches of the machine.
            self._round("middle")
        for number in range(at_most):
            if number >= at_least and (self.now > until or self.clients.over.is_set()):
                return
            self._round(phase)

    def _round(self, phase: str) -> None:
        self.clients.hold()
        taken = self.pace.take(self._world.engine, self._world.reference)
        phases: Sample = {f"pace.{phase}": 1.0}
        self.rounds.append({"time": round(self.now, 2)} | taken | phases)

    # --- samples ---------------------------------------------------------------------------

    def _watch(self) -> None:
        calibration = probes.Calibration()
        told = 0
        while not self.clients.over.wait(SAMPLE_SECONDS):
            try:
                self.samples.append(self._sample(calibration))
            except Exception as error:
                self._break(error)
                self.clients.over.set()
            if self.now // 60 > told:
                told = int(self.now // 60)
                print(self._progress(), flush=True)

    def _sample(self, calibration: probes.Calibration) -> Sample:
        sample: Sample = {"time": round(self.now, 2), "held": float(self.clients.held)}
        sample |= calibration.sample() | self.clients.totals()
        process, engine_pid = self._world.sidecar.process, self._world.engine_pid
        if process is not None:
            sample |= probes.process_sample([process.pid], "sidecar")
            sample["sidecar.life"] = process.pid
        if engine_pid is not None:
            sample |= probes.process_sample(probes.processes_of(engine_pid), "engine")
            sample["engine.life"] = engine_pid
        sample |= probes.shared_memory_sample(self._world.shared_files())
        sample["runtime.files"] = self._world.runtime_files()
        return sample | probes.status_sample(self._world.sidecar.status)

    def _progress(self) -> str:
        last = self.samples[-1] if self.samples else {}
        return (
            f"{self.now / 60:5.1f} min: {last.get('requests', 0):,.0f} requests, "
            f"{len(self.events)} events, {len(self.rounds)} rounds, sidecar "
            f"{last.get('sidecar.anonymous_bytes', 0) / 2**20:.0f} MiB, engine "
            f"{last.get('engine.anonymous_bytes', 0) / 2**20:.0f} MiB"
        )

    # --- the end ---------------------------------------------------------------------------

    def judge(self) -> list[Verdict]:
        """Every verdict."""
        life_warm = min(60.0, self.seconds / 5)
        log = self._sidecar_log()
        errors = [line for line in log if ERROR_LINE.search(line)]
        bad = unexpected(log)
        self._errors_judged = len(bad)
        bad += [
            line
            for path in self._world.engine_logs()
            for line in path.read_text(errors="replace").splitlines()
            if ERROR_LINE.search(line)
        ]
        slow = self.clients.slowest_seconds
        said = f"the slowest took {slow:.1f} s (at most {SLOW_SECONDS:.0f})"
        checks = ", ".join(f"{count} {name}" for name, count in self.checks.items())
        compared = (
            f"{checks} against the oracle, {self.pace.compared} against the reference, "
            f"at most {self.pace.farthest:.3f} apart"
        )
        return [
            *verdicts.growth(self.samples, "sidecar", life_warm),
            *verdicts.growth(self.samples, "engine", life_warm),
            *verdicts.whole_growth(self.samples, self.warm_seconds),
            verdicts.bounded("store.bytes", self.stored, 2 * STORE_SIZE),
            verdicts.throughput(self._ratios("start"), self._ratios("end"), self.seconds),
            verdicts.hits(self._phase("start"), self._phase("end")),
            verdicts.none_of("requests that failed", self.clients.failures),
            Verdict("requests that hang", slow <= SLOW_SECONDS, said),
            verdicts.none_of(f"wrong answers ({compared})", [*self.wrong, *self.pace.wrong]),
            verdicts.none_of("something held at rest", self.unrest),
            verdicts.none_of(f"errors in logs beside {len(errors) - len(bad)} expected", bad),
            verdicts.none_of("what ended the run early", self.broken),
        ]

    def wrong_at_end(self) -> list[str]:
        """Once all has ended: what the sidecar logged since `judge`, and how it ended."""
        found = unexpected(self._sidecar_log())[self._errors_judged :]
        code = self._world.sidecar_exit
        if code not in (Exit.OK, Exit.LOSS):
            found.append(f"the sidecar ended with {code}")
        return found

    def _sidecar_log(self) -> list[str]:
        return self._world.sidecar.log_path.read_text(errors="replace").splitlines()

    def _phase(self, phase: str) -> list[Sample]:
        return [one for one in self.rounds if f"pace.{phase}" in one]

    def _ratios(self, phase: str) -> list[float]:
        return [one["pace.ratio"] for one in self._phase(phase)]


def unexpected(log: Sequence[str]) -> list[str]:
    """Lines of the sidecar's log that tell of an error which the run did not cause itself."""
    found: list[str] = []
    lossy = False
    for line in log:
        if "drained" in line:
            lossy = "drained in part" in line
        if not ERROR_LINE.search(line) or any(part in line for part in EXPECTED_ERRORS):
            continue
        if not (lossy and LOSSY_ERROR in line):
            found.append(line)
    return found


def soak(
    folder: Path, seconds: float, seed: int, *, program: Sequence[str] = (), chaos: bool = True
) -> tuple[Soak, list[Verdict]]:
    """Run and judge one soak in `folder`. Raises only where its processes do not start."""
    one: Soak | None = None
    found: list[Verdict] = []
    left: list[str] = []
    try:
        # Without kills a hit is missed for want of time alone, which says nothing of the sidecar.
        with world(folder, program=program, limits={} if chaos else arms.PATIENT) as made:
            one = Soak(made, seconds, seed)
            one.run(chaos=chaos)
            found = one.judge()
        left = [*map(str, made.shared_files()), *one.wrong_at_end()]
    except Exception as error:
        if one is None:
            raise
        left.append(f"{type(error).__name__}: {error}")
    return one, [*found, verdicts.none_of("left behind, or wrong at the end", left)]


def main() -> int:
    """The command; 0 if every verdict is good."""
    parser = argparse.ArgumentParser(description="Run kvlake for long, under load and kills.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--docs", action="store_true", help="put what comes of it in docs/")
    given = parser.parse_args()
    # As Ctrl-C does: a run that is told to end has its report too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="kvl-soak-", dir="/tmp"))
    one, found = soak(folder, given.minutes * 60, given.seed)
    told = report.Told(one, found)
    print(told.summary())
    for path in told.write(folder, docs=given.docs):
        print(f"wrote {path}")
    good = all(verdict.good for verdict in found)
    print(f"soak: {'good' if good else 'BAD'}; logs are in {folder}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
