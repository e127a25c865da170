"""What goes wrong in a life, and when.

Owns the kinds of faults, how often each comes, and their end (`heal`). A fault does what the world
outside would do to a sidecar, an engine, the store or the memory; none reaches into a decision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from sidecar.protocol import Lease, Lookup, Release
from tests.simulation.clock import EPOCH_SECONDS
from tests.simulation.content import Model, facts_of_prompt
from tests.simulation.engine import SimEngine
from tests.simulation.objects import Bucket, damaged
from tiers.catalog.names import object_name, parse_name

if TYPE_CHECKING:
    from tests.simulation.images import Place
    from tests.simulation.life import Life
    from tests.simulation.process import SidecarProcess

FAULTS_MAX = 14
FLOOD_MESSAGES = 24
LONG_SECONDS = 7.0


class Faults:
    """All faults of one life."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._world = life.world
        self._random = life.random
        self._kinds: list[tuple[float, str, Callable[[], object]]] = [
            (3, "sidecar killed", self._kill),
            (2, "sidecar terminated", self._terminate),
            (3, "sidecar stopped", self._freeze),
            (3, "sidecar stopped in the middle of a copy", lambda: self._within(self._freeze)),
            (2, "sidecar killed in the middle of a copy", lambda: self._within(self._kill)),
            (1, "sidecar stopped for long", self._freeze_long),
            (2, "engine dies", self._engine_dies),
            (2, "engine dies in the middle of a copy", lambda: self._within(self._engine_dies)),
            (1, "one client dies first", self._client_dies),
            (2, "session cut", self._cut),
            (2, "engine stalls", self._stall),
            (2, "client stops reading", self._deaf),
            (4, "abort", self._abort),
            (1, "reset", self._reset),
            (2, "requests at once", self._burst),
            (1, "flood of lookups", self._flood),
            (1, "flood of loads", self._flood_loads),
            (1, "leases without a load", self._leases),
            (1, "message of another life", self._stale),
            (2, "clock jumps", self._jump),
            (2, "memory damaged", self._damage),
            (4, "memory damaged, then loaded", self._damage_and_load),
            (2, "memory damaged before it is written", self._damage_unwritten),
            (2, "one rank is late", self._late_rank),
            (3, "loads without a lookup", self._load_unasked),
        ]
        if life.bucket is not None:
            self._kinds += [
                (2, "store goes down", lambda: self._mood("down", True)),
                (1, "store full", lambda: self._mood("full", True)),
                (2, "store slow", self._slow_store),
                (2, "store fails", lambda: self._mood("failure_rate", 0.3)),
                (2, "store damages", lambda: self._mood("damage_rate", 0.5)),
                (4, "another cluster writes", self._foreign),
                (2, "object vanishes", self._vanish),
                (3, "object damaged", self._spoil),
                (1, "objects under wrong names", self._misplace),
            ]

        if life.tight:
            self._kinds.append((60, "models take turns", self._take_turns))

    def plan(self) -> None:
        """Draw faults over the life's length."""
        often = self._life.often
        weights = [weight * (20 if name in often else 1) for weight, name, _ in self._kinds]
        length = self._life.horizon - self._world.now
        # Some lives are quiet: what happens by itself must be reached too.
        for number in range(FAULTS_MAX if often else self._random.choice((0, 2, 5, 9, FAULTS_MAX))):
            _, name, fault = self._random.choices(self._kinds, weights)[0]
            strike = functools.partial(self._strike, number, name, fault)
            self._world.after(self._random.uniform(0.1, length), strike)

    def _strike(self, number: int, name: str, fault: Callable[[], object]) -> None:
        if not self._life.healing and number not in self._life.without:
            self._world.note(f"FAULT {number} {name}")
            self._world.saw(f"fault: {name}")
            fault()

    def heal(self) -> None:
        """Everything that can be mended is."""
        life = self._life
        if life.bucket is not None:
            healthy = Bucket()
            for name in ("down", "full", "seconds_max", "failure_rate", "damage_rate"):
                setattr(life.bucket, name, getattr(healthy, name))
        for engine in life.engines:
            for wire in (engine.wire, *(rank.wire for rank in engine.ranks)):
                wire.reading = True
        process = life.process
        if process is not None and process.frozen:
            process.thaw()
        self._restart_when_over()

    def _restart_when_over(self) -> None:
        process = self._life.process
        if process is None or process.dead:
            self._life.start_sidecar()
        elif process.told_to_stop:
            self._world.after(0.1, self._restart_when_over)

    # --- the sidecar ---------------------------------------------------------------------------

    def _alive(self) -> bool:
        process = self._life.process
        return process is not None and not process.dead

    def _kill(self) -> None:
        process = self._life.process
        if process is not None and not process.dead:
            if any(hop.paused for hop in process.hops):
                self._world.saw("killed in the middle of a copy")
            process.kill()
            self._world.after(self._random.uniform(0.01, 0.8), self._restart_when_over)

    def _within(self, strike: Callable[[], object], tries: int = 1000) -> None:
        """Strike as soon as a copy stands in the middle of its work."""
        process = self._life.process
        if self._life.healing or tries == 0:
            return
        if process is not None and not process.dead and any(hop.paused for hop in process.hops):
            strike()
        else:
            self._world.after(0.0005, lambda: self._within(strike, tries - 1))

    def _terminate(self) -> None:
        process = self._life.process
        if process is not None and not process.dead and not process.frozen:
            if not process.dispatcher.engine.pending_work().idle:
                self._world.saw("drain with work left")
            process.terminate()
            self._world.after(0.1, self._restart_when_over)

    def _freeze(self) -> None:
        self._stop_for(self._random.choice((0.05, 0.5, 2.0)))

    def _freeze_long(self) -> None:
        """Longer than anybody waits for an answer to an attach."""
        life = self._life
        life.horizon = max(life.horizon, self._world.now + LONG_SECONDS + 0.5)
        self._stop_for(LONG_SECONDS)
        self._engine_dies()

    def _stop_for(self, seconds: float) -> None:
        process = self._life.process
        if process is None or process.dead or process.frozen:
            return
        if any(hop.paused for hop in process.hops):
            self._world.saw("stopped in the middle of a copy")
        process.freeze()
        self._world.after(seconds, lambda: None if process.dead else process.thaw())

    def _cut(self) -> None:
        process = self._life.process
        if process is not None and not process.dead and not process.frozen:
            sessions = process.dispatcher.sessions.all()
            if sessions:
                self._random.choice(sessions).connection.hang_up()

    def _damage(self) -> bytes:
        """Flip a bit of a slot; returns its key."""
        process = self._life.process
        if process is None or process.dead:
            return b""
        places = self._life.checks.images.sealed_payloads(process)
        partial = [place for place in places if place.partial]
        places = partial or places
        if not places:
            return b""
        place = self._random.choice(places)
        if place.partial:
            self._world.saw("damage of a chunk that is not complete")
        self._flip(process, place)
        return place.key

    def _flip(self, process: SidecarProcess, place: Place) -> None:
        if place.slot in self._life.checks.images.damaged:
            # The same bit again would mend it.
            return
        process.pool.memory[place.offset] ^= 1 << self._random.randrange(8)
        self._life.checks.images.damaged.add(place.slot)

    def _damage_and_load(self) -> None:
        key = self._damage()
        if key:
            # Several at once: each finds the damage while the others still copy.
            self._load(key, times=self._random.choice((1, 1, 3)))

    def _damage_unwritten(self) -> None:
        """Flip a bit of a slot that waits to be written, as soon as there is one."""
        process = self._life.process
        if self._life.healing or self._world.now >= self._life.horizon:
            return
        if process is not None and not process.dead:
            waiting = {chunk.key for chunk in process.dispatcher.engine.writes.pending}
            places = self._life.checks.images.sealed_payloads(process)
            places = [place for place in places if place.key in waiting]
            if places:
                self._world.saw("damage before a write")
                self._flip(process, self._random.choice(places))
                return
        self._world.after(0.02, self._damage_unwritten)

    def _load(self, key: bytes, times: int = 1) -> None:
        fact = self._life.checks.truth.facts[key]
        for engine in self._living():
            group = engine.group_of(fact.owner)
            if group is not None:
                engine.load_unasked(key, group, fact.num_blocks, times)

    # --- engines -------------------------------------------------------------------------------

    def _living(self) -> list[SimEngine]:
        return [engine for engine in self._life.engines if not engine.dead]

    def _some_engine(self) -> SimEngine | None:
        living = self._living()
        return self._random.choice(living) if living else None

    def _engine_dies(self) -> None:
        engine = self._some_engine()
        if engine is None:
            return
        engine.die()
        name = engine.name if self._random.random() < 0.5 else None
        # A supervisor may be quicker than the kernel.
        delay = self._random.choice((0.0, 0.1, 0.5))
        self._world.after(delay, lambda: self._new_engine(engine.model, name))

    def _take_turns(self) -> None:
        """The engines of the model that has a place end, so that another model's get it."""
        process = self._life.process
        served = [] if process is None or process.dead else process.dispatcher.sessions.all()
        if not served:
            return
        model_of = self._life.checks.images.model_of
        home = model_of(served[0].realm)
        for engine in self._living():
            if engine.model.groups[0] == home:
                engine.die()
                delay = self._random.uniform(0.3, 0.8)
                self._world.after(delay, functools.partial(self._new_engine, engine.model, None))

    def _new_engine(self, model: Model, name: str | None) -> None:
        if not self._life.healing:
            self._life.start_engine(model, name)

    def _client_dies(self) -> None:
        engine = self._some_engine()
        if engine is not None:
            # vLLM takes the others down a little later.
            self._random.choice([engine.wire, *(rank.wire for rank in engine.ranks)]).die()
            self._world.after(self._random.uniform(0.0, 0.6), engine.die)
            self._world.after(
                self._random.uniform(0.6, 0.9), lambda: self._new_engine(engine.model, engine.name)
            )

    def _stall(self) -> None:
        engine = self._some_engine()
        if engine is not None:
            engine.stall_seconds = self._random.choice((0.2, 1.0, 3.0))

    def _late_rank(self) -> None:
        engine = self._some_engine()
        if engine is not None:
            engine.late_rank_seconds = self._random.choice((0.05, 0.2, 0.6))
            # Somebody else finds what the first rank has stored, and it is damaged.
            for delay in (0.02, 0.06, 0.1, 0.15):
                self._world.after(delay, self._damage_partial)

    def _damage_partial(self) -> None:
        process = self._life.process
        if process is not None and not process.dead and not self._life.healing:
            places = self._life.checks.images.sealed_payloads(process)
            if any(place.partial for place in places):
                self._damage_and_load()

    def _load_unasked(self) -> None:
        engine = self._some_engine()
        if engine is not None:
            keys = self._known_keys(engine)
            for key in self._random.sample(keys, min(len(keys), 3)):
                self._load(key)

    def _deaf(self) -> None:
        engine = self._some_engine()
        if engine is not None:
            wire = self._random.choice([engine.wire, *(rank.wire for rank in engine.ranks)])
            wire.reading = False
            self._world.after(self._random.uniform(0.2, 2.0), wire.hear)

    def _abort(self) -> None:
        engine = self._some_engine()
        if engine is not None and engine.requests:
            engine.abort(self._random.choice(list(engine.requests)))

    def _reset(self) -> None:
        engine = self._some_engine()
        if engine is not None and engine.can_reset():
            engine.reset()

    def _burst(self) -> None:
        engine = self._some_engine()
        if engine is not None:
            for _ in range(8):
                self._life.add_request(engine)

    def _jump(self) -> None:
        self._world.now += self._random.choice((0.3, 1.5, 20.0))
        self._world.disturbed = self._world.now

    # --- messages ------------------------------------------------------------------------------

    def _known_keys(self, engine: SimEngine) -> list[bytes]:
        facts = self._life.checks.truth.facts
        return [key for key, fact in facts.items() if engine.group_of(fact.owner) is not None]

    def _owner_of(self, key: bytes) -> str:
        return self._life.checks.truth.facts[key].owner

    def _flood(self) -> None:
        engine = self._some_engine()
        session = engine.wire.session if engine is not None else None
        if engine is None or session is None:
            return
        keys = self._known_keys(engine)
        for number in range(FLOOD_MESSAGES):
            if keys:
                wanted = self._random.sample(keys, min(len(keys), 3))
                groups = [engine.group_of(self._owner_of(key)) or 0 for key in wanted]
                lookup = Lookup(
                    session.epoch,
                    1_000_000 + number,
                    wanted,
                    100,
                    groups=groups if any(groups) else [],
                )
                engine.wire.send(session, lookup)

    def _flood_loads(self) -> None:
        engine = self._some_engine()
        keys = [] if engine is None else self._known_keys(engine)
        if keys:
            self._load(self._random.choice(keys), times=FLOOD_MESSAGES)

    def _leases(self) -> None:
        engine = self._some_engine()
        session = engine.wire.session if engine is not None else None
        if engine is None or session is None:
            return
        keys = self._known_keys(engine)
        # Steps of jobs that never come, or of those that were or will be.
        first = self._random.choice((2, 2_000_000))
        for number in range(self._random.choice((1, 4, FLOOD_MESSAGES))):
            if keys:
                lease_id = first + number
                wanted = self._random.sample(keys, min(len(keys), 3))
                engine.wire.send(session, Lease(session.epoch, lease_id, wanted))
                if self._random.random() < 0.3:
                    engine.wire.send(session, Release(session.epoch, [lease_id], []))

    def _stale(self) -> None:
        engine = self._some_engine()
        session = engine.wire.session if engine is not None else None
        if engine is not None and session is not None:
            engine.wire.send(session, Lookup(session.epoch - 1, 3_000_000, [bytes(32)], 100))

    # --- the store -----------------------------------------------------------------------------

    def _mood(self, name: str, value: object) -> None:
        bucket = self._life.bucket
        assert bucket is not None
        well = getattr(Bucket(), name)
        setattr(bucket, name, value)
        self._world.after(self._random.uniform(0.1, 1.5), lambda: setattr(bucket, name, well))

    def _slow_store(self) -> None:
        self._mood("seconds_max", 0.3)
        # Ranks of one chunk are then read at different times: one is damaged while another comes.
        for delay in range(1, 30):
            self._world.after(delay * 0.05, self._damage_partial)

    def foreign_cluster(self) -> None:
        """Another cluster has served the same prompts for a while."""
        for model in self._life.models:
            for stem in self._life.stems:
                for salt in ("", "team-a"):
                    self._write_foreign(model, salt, stem)

    def _foreign(self) -> None:
        model = self._random.choice(self._life.models)
        self._write_foreign(
            model, self._random.choice(("", "team-a")), self._random.choice(self._life.stems)
        )

    def _write_foreign(self, model: Model, salt: str, stem: list[int]) -> None:
        bucket = self._life.bucket
        assert bucket is not None
        truth = self._life.checks.truth
        written = [
            (one, *fact) for one in model.groups for fact in facts_of_prompt(truth, one, salt, stem)
        ]
        for group, key, fact in written:
            for rank in range(group.ranks):
                if self._random.random() < 0.95:
                    name = object_name(group.digest, key, group.segment(rank))
                    image = group.image(key, fact, rank).tobytes()
                    bucket.put(name, image, EPOCH_SECONDS + self._world.now)

    def _some_object(self) -> str | None:
        bucket = self._life.bucket
        assert bucket is not None
        names = [name for name in bucket.objects if not name.startswith("quarantine/")]
        return self._random.choice(names) if names else None

    def _vanish(self) -> None:
        name = self._some_object()
        if name is not None and self._life.bucket is not None:
            del self._life.bucket.objects[name]

    def _spoil(self) -> None:
        name = self._some_object()
        bucket = self._life.bucket
        if name is not None and bucket is not None:
            bucket.objects[name] = damaged(self._world, bucket.objects[name])
            bucket.tainted.add(name)

    def _misplace(self) -> None:
        """Intact images under names of other chunks, where nothing but the key can tell."""
        bucket = self._life.bucket
        assert bucket is not None
        alike: dict[tuple[str, str, int], list[str]] = {}
        for name, image in bucket.objects.items():
            parts = parse_name(name)
            if parts is not None:
                alike.setdefault((parts.namespace, parts.segment.name, len(image)), []).append(name)
        for names in alike.values():
            moved = [bucket.objects[name] for name in names[1:] + names[:1]]
            for name, image in zip(names, moved, strict=True):
                if len(names) > 1 and self._random.random() < 0.3:
                    bucket.objects[name] = image
                    bucket.tainted.add(name)
