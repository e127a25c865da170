"""Writers, readers and compactors on one store, in any order, killed at any step, with damage.

What must hold: nothing is deleted that the catalog offers; what is offered is found by a reader
that starts now and by those that were there all along; and once everything is announced and the
objects were looked through, the catalog says what is there, except for what was withdrawn.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests import places
from tests.tiers.catalog.bucket import Bucket, Killed, View
from tests.tiers.catalog.kit import FOLDER, NAMESPACE, PREFIX, decode_manifest
from tests.tiers.tier_suite import image_of
from tiers.catalog.compaction import compact
from tiers.catalog.log import LogWriter
from tiers.catalog.major_compaction import CompactionPlan
from tiers.catalog.manifest import EMPTY_MANIFEST, Counts, Manifest
from tiers.catalog.names import (
    digest_in,
    object_name,
    parse_log,
    parse_manifest,
    parse_name,
    parse_snapshot,
)
from tiers.catalog.reader import CatalogReader
from tiers.catalog.retention import RetentionRules
from tiers.catalog.rows import CatalogCorrupt, Row, Rows, decode
from tiers.catalog.scan import Superseded
from tiers.errors import TierUnavailable
from tiers.kv.layout import Segment

GRACE, KEEP, TTL = 100.0, 300.0, 2000.0
SEGMENT = Segment(0, 8, 0, 4)
WRITERS, READERS, NUMBERS = 3, 2, 12
NO_KILL: Final = 1 << 30
IMAGE = image_of(500)

numbers = st.integers(0, NUMBERS - 1)
steps = st.one_of(st.just(NO_KILL), st.integers(0, 40))
Held = dict[bytes, tuple[int, bool]]


def key_of(number: int) -> bytes:
    return bytes([number * 20]) + number.to_bytes(31, "big")


def name_of(number: int) -> str:
    return object_name(NAMESPACE, key_of(number), SEGMENT)


def take(held: Held, rows: Rows) -> None:
    for index in range(len(rows)):
        row = rows.row(index)
        held[row.key] = max(held.get(row.key, (0, False)), (row.written_at, row.size_bytes == 0))


def offered(held: Held) -> set[int]:
    return {int.from_bytes(key[1:], "big") for key, (_, withdrawn) in held.items() if not withdrawn}


class Catalog(RuleBasedStateMachine):
    """One bucket and everybody around it."""

    def __init__(self) -> None:
        super().__init__()
        self.bucket = Bucket()
        self.bucket.before_delete = self._check_deleted
        self.names = itertools.count()
        self.patch = pytest.MonkeyPatch()
        places.patch(self.patch, "SNAPSHOT_ROWS", 5)
        places.patch(self.patch, "OVERLAY_ROWS", 8)
        places.patch(self.patch, "new_writer", self._new_writer)
        self.patch.setattr(anyio.to_thread, "run_sync", self._in_its_turn)
        self.waits: Iterator[int] = itertools.repeat(0)
        self.logs = [self._log() for _ in range(WRITERS)]
        self.readers = [CatalogReader(View(self.bucket), FOLDER, Counts()) for _ in range(READERS)]
        self.seen: list[Held] = [{} for _ in range(READERS)]
        self.read_at = [self.bucket.now] * READERS
        self.regular = [True] * READERS
        """Whether a reader looked often enough to have seen every file."""
        self.damaged = False

    def teardown(self) -> None:
        self.settle()
        self.patch.undo()

    async def _in_its_turn(self, work: Callable[..., Any], *args: Any) -> Any:
        """In place of a thread, which ends when the machine's load says so, and not the example."""
        for _ in range(next(self.waits)):
            await anyio.lowlevel.checkpoint()
        return work(*args)

    def _new_writer(self, kind: str = "s") -> str:
        return f"{kind}{next(self.names):015x}"

    def _log(self) -> LogWriter:
        view = View(self.bucket)
        return LogWriter(view, FOLDER, self._new_writer(), rows_max=9, seconds_max=1.0)

    # --- what is there, read without any of the code under test's positions --------------------

    def _manifest(self) -> Manifest:
        found = [EMPTY_MANIFEST]
        for name, (body, _) in self.bucket.objects.items():
            generation = parse_manifest(FOLDER, name)
            if generation is not None:
                try:
                    image = np.frombuffer(body, dtype=np.uint8)
                    found.append(decode_manifest(image, FOLDER, generation))
                except CatalogCorrupt:
                    continue
        return max(found, key=lambda one: one.generation)

    def _rows(self, name: str, held: Held) -> None:
        body, _ = self.bucket.objects.get(name, (b"", 0.0))
        try:
            take(held, decode(np.frombuffer(body, dtype=np.uint8), digest_in(name)))
        except CatalogCorrupt:
            return

    def _offered(self) -> set[int]:
        manifest, held = self._manifest(), Held()
        for name in manifest.snapshots:
            self._rows(name, held)
        for name in list(self.bucket.objects):
            log = parse_log(FOLDER, name)
            if log is None:
                continue
            merged = manifest.merged.get(log.writer)
            if merged is None or log.number > merged.number:
                self._rows(name, held)
        return offered(held)

    def _withdrawn(self) -> set[int]:
        """Numbers that some row withdraws at a time that no row that is there offers again."""
        held = Held()
        for name in list(self.bucket.objects):
            if parse_log(FOLDER, name) or parse_snapshot(FOLDER, name) is not None:
                self._rows(name, held)
        return {int.from_bytes(key[1:], "big") for key, (_, gone) in held.items() if gone}

    def _there(self) -> set[int]:
        return {n for n in range(NUMBERS) if name_of(n) in self.bucket.objects}

    def _check_deleted(self, names: Sequence[str]) -> None:
        keys = {parsed.key for name in names if (parsed := parse_name(name)) is not None}
        if keys:
            gone = {int.from_bytes(key[1:], "big") for key in keys}
            assert not gone & self._offered(), "deleted although it is offered"

    # --- writers -------------------------------------------------------------------------------

    async def _write(self, number: int, writer: int, skew: int) -> None:
        await View(self.bucket).write(name_of(number), IMAGE)
        written_at = self.bucket.micros + skew * 1_000_000
        self.logs[writer].append(Row(key_of(number), SEGMENT.name, written_at, len(IMAGE), 1))

    @rule(number=numbers, writer=st.integers(0, WRITERS - 1), skew=st.sampled_from([0, 0, -5, 20]))
    def write(self, number: int, writer: int, skew: int) -> None:
        anyio.run(self._write, number, writer, skew)
        # As a sidecar does it: at most some seconds later. Here before time moves on.
        anyio.run(self.logs[writer].flush)

    @rule(number=numbers)
    def write_and_die(self, number: int) -> None:
        """The object is there, and nobody was told."""
        anyio.run(self._write, number, 0, 0)
        self.logs[0] = self._log()

    @rule(writer=st.integers(0, WRITERS - 1))
    def new_life(self, writer: int) -> None:
        self.logs[writer] = self._log()

    @rule(number=numbers, writer=st.integers(0, WRITERS - 1))
    def find_missing(self, number: int, writer: int) -> None:
        """An object is gone, and who wanted to read it tells the others."""
        self.bucket.objects.pop(name_of(number), None)
        time, withdrawn = self.seen[0].get(key_of(number), (0, True))
        if not withdrawn:
            self.logs[writer].append(Row(key_of(number), SEGMENT.name, time))
            anyio.run(self.logs[writer].flush)

    @rule(number=numbers, writer=st.integers(0, WRITERS - 1))
    def miss(self, number: int, writer: int) -> None:
        """One reader is told that there is no object, though there is."""
        time, withdrawn = self.seen[1].get(key_of(number), (0, True))
        if not withdrawn:
            self.logs[writer].append(Row(key_of(number), SEGMENT.name, time))
            anyio.run(self.logs[writer].flush)

    @rule(number=numbers)
    def vanish(self, number: int) -> None:
        """A lifecycle rule of the bucket."""
        self.bucket.objects.pop(name_of(number), None)

    # --- readers -------------------------------------------------------------------------------

    async def _refresh(self, reader: int) -> None:
        try:
            async for rows in self.readers[reader].changes():
                take(self.seen[reader], rows)
        except TierUnavailable:
            return
        self.regular[reader] &= self.bucket.now - self.read_at[reader] < KEEP
        self.read_at[reader] = self.bucket.now

    @rule(reader=st.integers(0, READERS - 1))
    def refresh(self, reader: int) -> None:
        anyio.run(self._refresh, reader)

    @rule()
    def refresh_all(self) -> None:
        for reader in range(READERS):
            self.refresh(reader)

    # --- compactors ----------------------------------------------------------------------------

    def _plan(self, *, major: bool, reconcile: bool, ttl: bool, cap: bool) -> CompactionPlan:
        bounds = RetentionRules(TTL if ttl else None, 3 * len(IMAGE) if cap else None)
        return CompactionPlan(bounds, GRACE, KEEP, major, reconcile)

    async def _compact(self, plan: CompactionPlan, alive_for: int, *, after: bool) -> None:
        view = View(self.bucket, steps=alive_for, after=after)
        try:
            await compact(view, PREFIX, plan, self.bucket.now, clock=lambda: self.bucket.now)
        except (Killed, Superseded):
            return

    @rule(
        major=st.booleans(), reconcile=st.booleans(), ttl=st.booleans(), cap=st.booleans(),
        steps=steps, after=st.booleans(),
    )  # fmt: skip
    def compact(
        self, major: bool, reconcile: bool, ttl: bool, cap: bool, steps: int, after: bool
    ) -> None:
        plan = self._plan(major=major, reconcile=reconcile, ttl=ttl, cap=cap)
        anyio.run(lambda: self._compact(plan, steps, after=after))

    @rule(
        major=st.tuples(st.booleans(), st.booleans()), ttl=st.booleans(),
        steps=st.tuples(steps, steps), number=numbers, late=st.integers(0, 20),
        waits=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    )  # fmt: skip
    def at_once(
        self,
        major: tuple[bool, bool],
        ttl: bool,
        steps: tuple[int, int],
        number: int,
        late: int,
        waits: list[int],
    ) -> None:
        """Two compactors, a reader and a writer side by side."""

        async def later(work: Callable[[], Any]) -> None:
            for _ in range(late):
                await anyio.lowlevel.checkpoint()
            await work()

        async def write() -> None:
            await self._write(number, 1, 0)
            await self.logs[1].flush()

        async def run() -> None:
            async with anyio.create_task_group() as tasks:
                for one, alive_for in zip(major, steps, strict=True):
                    plan = self._plan(major=one, reconcile=False, ttl=ttl, cap=False)
                    tasks.start_soon(functools.partial(self._compact, after=False), plan, alive_for)
                tasks.start_soon(later, lambda: self._refresh(0))
                tasks.start_soon(later, write)

        self.waits = itertools.cycle(waits)
        anyio.run(run)
        self.waits = itertools.repeat(0)

    # --- the world -----------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1, 30, 150, 250, 2500, 5000]))
    def time_passes(self, seconds: int) -> None:
        self.bucket.now += seconds

    @rule(data=st.data(), lost=st.booleans())
    def damage(self, data: st.DataObject, lost: bool) -> None:
        names = self.bucket.names(FOLDER)
        if not names:
            return
        name = data.draw(st.sampled_from(names))
        self.damaged = True
        if lost:
            del self.bucket.objects[name]
        else:
            self.bucket.objects[name] = (b"damaged", self.bucket.now)

    @invariant()
    def one_manifest_holds(self) -> None:
        """Its snapshots are there, unless somebody damaged them."""
        if not self.damaged:
            assert set(self._manifest().snapshots) <= self.bucket.objects.keys()

    @rule()
    def settle(self) -> None:
        for log in self.logs:
            anyio.run(log.flush)
        self.refresh_all()
        for _ in range(5):
            # As often as those look that look often enough.
            self.bucket.now += 200
            self.refresh_all()
        self.compact(True, True, False, False, NO_KILL, False)
        for _ in range(3):
            self.refresh_all()
        now, there = self._offered(), self._there()
        assert now <= there
        assert there - now <= self._withdrawn()
        fresh = CatalogReader(View(self.bucket), FOLDER, Counts())
        held = Held()

        async def read() -> None:
            for _ in range(2):
                try:
                    async for rows in fresh.changes():
                        take(held, rows)
                except TierUnavailable:
                    continue

        anyio.run(read)
        assert offered(held) == now
        for reader in range(READERS):
            # One that missed a withdrawal offers what is gone: a miss, and then it knows. Damage
            # may take a withdrawal from the catalog, and not from who saw it: that costs hits.
            seen = self.seen[reader]
            both = {key: max(row, seen.get(key, row)) for key, row in held.items()}
            assert offered(both) <= offered(seen)
            assert self.damaged or now <= offered(seen)
            if self.regular[reader] and not self.damaged:
                assert offered(seen) == now


Catalog.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestCatalog = Catalog.TestCase
