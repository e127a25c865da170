"""One simulated life: a node with a sidecar, engines on it, users, a shared bucket, and faults.

Owns the plan that a seed stands for: which models and engines there are, what users ask, which
faults come when, and how it ends: all faults stop, everything is finished, and nothing may be left.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from sidecar.config.model import Config
from sidecar.core.directory import Cause, Directory, HostSegment
from tests import places
from tests.simulation.checks import Checks
from tests.simulation.clock import START_SECONDS, StepsOver, Violation, World, frozen
from tests.simulation.content import Model, templates_of, with_window
from tests.simulation.engine import SimEngine
from tests.simulation.faults import Faults
from tests.simulation.objects import Bucket
from tests.simulation.process import SidecarProcess, real_sockets_replaced, run_hop
from tests.simulation.wire import Node

MODELS = (
    Model("one", ranks=1, words=1, layer_major=True),
    Model("one", ranks=2, words=1, layer_major=False),
    Model("wide", ranks=1, words=20, layer_major=False),
)
SEVERAL_GROUPS = "several groups"
"""Among what comes often: every model then has a second KV cache group."""
SEVERAL_GROUPS_RATE = 0.25
TIGHT_REALMS_RATE = 0.4
"""Share of lives with several models that have room for one of them only."""
DENSITY_RATE = 0.5
"""Share of lives with the default policy, which may refuse to store."""
LEARNS_SOON = {
    "CHOSEN_FOR": 2,
    "LEARNED_MIN": 16,
    "REMEMBERED_MIN": 24,
    "SAMPLED_MIN": 16,
    "TRIED_EVERY": 4,
}
"""Constants of `density` for lives in which a few hundred chunks are used."""
WINDOWS = (6, 10, 24)
"""Tokens that a second group reads: less than a chunk of the first one, and more."""
SALTS = (None, None, None, "team-a", "team-b")
VERIFY_WRITES = 1.0
"""`integrity.verify_writes`: below 1, readers find what was damaged before it was written."""
HEAL_SECONDS_MAX = 120.0
SETTLE_SECONDS = 2.0
LEAVE_SECONDS = 4.0


@dataclass(slots=True)
class Result:
    """How a life went."""

    seed: int
    steps: int
    trace_hash: str
    seen: Counter[str]
    violation: Violation | None = None
    lines: list[str] = field(default_factory=list[str])

    @property
    def rule(self) -> str:
        """The rule that was broken, or nothing."""
        return "" if self.violation is None else self.violation.rule


class Life:
    """Everything of one seed."""

    def __init__(
        self,
        node: Node,
        directory: Path,
        models: Sequence[Model],
        without: frozenset[int],
        often: Collection[str],
    ) -> None:
        world = node.world
        self.world = world
        self.without = without
        self.often = often
        """Kinds of faults that come more often than others."""
        self.random = world.random
        self.directory = directory
        self.node = node
        self.models = self.random.sample(models, self.random.choice((1, 1, 2)))
        self.checks = Checks(world, [group for model in self.models for group in model.groups])
        self.bucket = Bucket() if self.random.random() < 0.85 else None
        self.config = self._configure()
        self.engines: list[SimEngine] = []
        self.stems = [
            [self.random.randrange(50) for _ in range(self.random.choice((9, 16, 24, 40, 52)))]
            for _ in range(self.random.choice((2, 3)))
        ]
        self.horizon = START_SECONDS + self.random.uniform(1.0, 3.5)
        self.healing = False
        self.tight: bool
        """Whether the sidecar has room for the realms of one model only."""
        self._names = 0
        self._requests = 0

    @property
    def process(self) -> SidecarProcess | None:
        """The sidecar of now."""
        return self.node.process

    def _configure(self) -> Config:
        chance = self.random
        store: dict[str, Any] | None = None
        if self.bucket is not None:
            store = {
                "url": f"file://{self.directory}/unused",
                "write": chance.choice(
                    ("through", "through", "through", "on_reuse", "on_evict", "off")
                ),
                "read": "on" if chance.random() < 0.95 else "off",
                "refresh_seconds": chance.choice((0.2, 1.0)),
                "writes_inflight_max": chance.choice((1, 3)),
                "reads_inflight_max": chance.choice((1, 2, 4)),
                "write_queue_max": chance.choice((1, 1 << 16, 1 << 30)),
                "breaker": {
                    "failures_max": chance.choice((1, 5)),
                    "pause": chance.choice((0.1, 1.0)),
                    "pause_max": 2.0,
                },
                "recompute": chance.choice(("when_sooner", "never")),
                "regret_max": chance.choice((0.04, 0.3, 1.0)),
                "deadline_seconds_max": 0.4,
                "retries_max": chance.choice((0, 1)),
            }
        load_deadline = chance.choice((0.3, 0.8))
        config = Config.model_validate(
            {
                "runtime": {"directory": str(self.directory), "name": "sim"},
                "chunk": {"tokens": 16},
                "host": {
                    "directory": str(self.directory),
                    "policy": self._policy(chance.choice(("lru", "fifo"))),
                    "prefault": False,
                    "after_stop": chance.choice(("keep", "keep", "remove")),
                },
                "store": store,
                "limits": {
                    "lookup_wait": chance.choice((0.05, 0.2)),
                    "load_deadline": load_deadline,
                    "store_deadline": chance.choice((0.4, 1.0)),
                    "lease_ttl": load_deadline + chance.choice((0.0, 0.5)),
                    "jobs_inflight_max": chance.choice((2, 4, 16)),
                    "copies_queued_max": chance.choice((16, 64, 1024)),
                    "storing_max": chance.choice((None, None, 6 * 8192)),
                    "lookups_max": chance.choice((2, 8, 64)),
                    "leases_max": chance.choice((2, 8, 64)),
                    "sessions_max": 16,
                    "drain_seconds_max": chance.choice((0.05, 1.0)),
                },
                "copy": {"threads": chance.choice((1, 1, 2)), "prefault": False},
                "integrity": {"verify_writes": VERIFY_WRITES},
                "http": {"port": 0},
                "tenants": self._tenants(),
            }
        )
        # Smaller than an operator may make it, so that there is never enough of it.
        size_bytes = chance.choice((6, 10, 16, 32)) * 16384
        host = config.host.model_copy(update={"size": size_bytes})
        memory_bytes = chance.choice((16_000, 40_000, 1 << 20))
        changes = {
            "memory_max": memory_bytes,
            "realms_max": self._realms_max(),
            "gone_keys_max": random.Random(f"gone of {self.world.seed}").choice((0, 3, 1000)),
        }
        limits = config.limits.model_copy(update=changes)
        return config.model_copy(update={"host": host, "limits": limits})

    def _policy(self, other: str) -> str:
        """Nothing else that is drawn depends on it."""
        own = random.Random(f"the policy of {self.world.seed}")
        return "density" if own.random() < DENSITY_RATE else other

    def _realms_max(self) -> int:
        """Nothing else that is drawn depends on it."""
        own = random.Random(f"the realms of {self.world.seed}")
        groups = [len(model.groups) for model in self.models]
        self.tight = len(groups) > 1 and own.random() < TIGHT_REALMS_RATE
        return max(groups) if self.tight else sum(groups)

    def _tenants(self) -> dict[str, Any]:
        if self.random.random() < 0.5:
            return {}
        sizes = (8192, 3 * 8192, 6 * 8192)
        named = {"a": {"salt": "team-a", "host_max": self.random.choice(sizes)}}
        default = {"host_max": self.random.choice((None, None, None, 12 * 8192))}
        return {"named": named, "default": default}

    # --- actors --------------------------------------------------------------------------------

    def start_sidecar(self) -> None:
        """A sidecar starts on the node, unless there is one."""
        if self.process is not None and not self.process.dead:
            return
        self.world.note("sidecar starts")
        self.node.process = SidecarProcess(
            self.world,
            self.config,
            self.bucket,
            self.checks,
        )

    def start_engine(self, model: Model, name: str | None = None) -> SimEngine:
        """An engine starts; users ask it things from then on."""
        if name is None:
            self._names += 1
            name = f"e{self._names}"
        self.world.note(f"engine {name} starts: {model.name} tp{model.ranks}")
        engine = SimEngine(
            self.world,
            self.node,
            self.checks,
            name,
            model,
            num_blocks=self.random.choice((22, 28, 40)),
            late_fences=self.random.random() < 0.5,
            want_events=self.random.random() < 0.3,
        )
        self.engines.append(engine)
        self.world.after(self.random.random() * 0.3, lambda: self._ask(engine))
        return engine

    def prompt(self) -> list[int]:
        """The beginning of a stem, and something of its own."""
        chance = self.random
        stem = chance.choice(self.stems)
        keep = chance.choice((len(stem), len(stem), chance.randrange(1, len(stem) + 1)))
        tail = chance.choice((0, 0, 1, 3, 4, 5, chance.randrange(24)))
        return [*stem[:keep], *(chance.randrange(50) for _ in range(tail))]

    def add_request(self, engine: SimEngine) -> None:
        """A user asks an engine."""
        self._requests += 1
        prompt, length = self.prompt(), self.random.choice((1, 2, 5, 12))
        # What it may grow to must fit into the engine's memory.
        prompt = prompt[: engine.tokens_max - length]
        name = f"r{self._requests}"
        self.world.note(f"{engine.name} gets {name}: {len(prompt)} tokens")
        engine.add(name, prompt, length, self.random.choice(SALTS))

    def _ask(self, engine: SimEngine) -> None:
        if engine.dead or self.world.now >= self.horizon:
            return
        self.add_request(engine)
        self.world.after(self.random.expovariate(5.0), lambda: self._ask(engine))

    # --- from the start to the end -------------------------------------------------------------

    def run(self) -> None:
        """Live, heal, leave; raises `Violation`."""
        self.start_sidecar()
        for model in self.models:
            self.start_engine(model)
        if len(self.models) == 1 or self.random.random() < 0.3:
            self.start_engine(self.random.choice(self.models))
        faults = Faults(self)
        if self.bucket is not None and self.random.random() < 0.5:
            faults.foreign_cluster()
        faults.plan()
        self._until(lambda: self.world.now >= self.horizon)
        self.world.note("healing")
        self.healing = True
        faults.heal()
        self._until(self._idle, HEAL_SECONDS_MAX, "every request is finished")
        # An answer may still be on its way where nobody waits for it any more.
        self._for(SETTLE_SECONDS)
        process = self.process
        assert process is not None
        self.checks.answered(process)
        for engine in self.engines:
            if not engine.dead:
                engine.check_idle()
        self.world.note("everybody leaves")
        for engine in self.engines:
            engine.die()
        self._for(LEAVE_SECONDS)
        self.checks.quiet(process)
        process.terminate()
        self._until(lambda: process.dead, 30.0, "a drain ends")

    def _idle(self) -> bool:
        process = self.process
        return (
            process is not None
            and not process.dead
            and not any(engine.busy for engine in self.engines if not engine.dead)
            and process.dispatcher.engine.pending_work().idle
        )

    def _for(self, seconds: float) -> None:
        end = self.world.now + seconds
        self.world.after(seconds, lambda: None)
        self._until(lambda: self.world.now >= end)

    def _until(self, over: Callable[[], bool], seconds_max: float = 1e9, rule: str = "") -> None:
        end = self.world.now + seconds_max
        while not over():
            if self.world.now > end:
                process = self.process
                state = [str(engine) for engine in self.engines if engine.busy and not engine.dead]
                work = process.dispatcher.engine.pending_work() if process is not None else None
                detail = f"not within {seconds_max} simulated seconds: {state}, {work}"
                raise Violation(rule, detail)
            self._step()

    def _step(self) -> None:
        world, process = self.world, self.process
        world.count_step()
        if world.broken is not None:
            raise world.broken
        due = process.next_time if process is not None else float("inf")
        if process is not None and due <= world.next_time:
            world.now = max(world.now, due)
            process.turn()
        else:
            world.take()()

    def close(self) -> None:
        """Give back what the operating system lent."""
        for engine in self.engines:
            engine.die()
        if self.process is not None and not self.process.dead:
            self.process.kill()


def models_of(seed: int, often: Collection[str]) -> tuple[Model, ...]:
    """The models of a seed's world. Nothing else that is drawn depends on their groups.

    Where something comes `often`, they have several groups only if that is among it.
    """
    own = random.Random(f"the KV cache groups of {seed}")
    several, window = own.random() < SEVERAL_GROUPS_RATE, own.choice(WINDOWS)
    if often:
        several = SEVERAL_GROUPS in often
    return tuple(with_window(model, window) for model in MODELS) if several else MODELS


def _noting_transitions(checks: Checks) -> Any:
    move = Directory.move

    def noted(self: Directory, segment: HostSegment, cause: Cause) -> None:
        checks.moved(segment, cause)
        move(self, segment, cause)

    return mock.patch.object(Directory, "move", noted)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kvl-sim-", dir="/dev/shm"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def simulate(
    seed: int,
    *,
    steps_max: int = 0,
    without: frozenset[int] = frozenset(),
    often: Collection[str] = (),
    trace: bool = False,
) -> Result:
    """Live the life of a seed, or its first `steps_max` steps, `without` some of its faults.

    With kinds of faults that come `often`, it is another life, with many faults.
    """
    world = World(seed, keep_trace=trace)
    world.steps_max = steps_max
    models = models_of(seed, often)
    for group in (group for model in models for group in model.groups):
        for rank in range(group.ranks):
            templates_of(group, rank)
    violation: Violation | None = None
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(_scratch())
        node = Node(world)

        async def hop(work: Any) -> None:
            assert node.process is not None, "only a sidecar has worker threads"
            await run_hop(world, node.process, work)

        for constant, value in LEARNS_SOON.items():
            stack.enter_context(places.patched(constant, value))
        stack.enter_context(frozen(world, hop))
        stack.enter_context(real_sockets_replaced())
        life = Life(node, directory, models, without, often)
        stack.enter_context(_noting_transitions(life.checks))
        stack.enter_context(life.checks.copying.watched())
        try:
            life.run()
        except StepsOver:
            pass
        except Violation as error:
            violation = error
        except Exception as error:
            violation = Violation("nothing raises", f"{type(error).__name__}: {error}")
            violation.__cause__ = error
        # Giving back is no part of the life: one that was cut short is a part of the whole.
        lines = list(world.lines)
        with contextlib.suppress(Violation):
            life.close()
    return Result(seed, world.steps, world.trace_hash, world.seen, violation, lines)
