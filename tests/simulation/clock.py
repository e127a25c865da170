"""Virtual time: one heap of events, one event loop per simulated process, and no other clock.

Owns `now`, the random numbers, the trace, and what stands in for the world outside while a seed
runs (`frozen`): clocks, entropy, worker threads. Does not own what happens in it.

Invariants: one `random.Random(seed)` decides everything; time moves only when nothing is left to
do at its present value; nothing here depends on hashes of objects, on addresses or on real time.
"""

# ruff: noqa: SLF001 (asyncio and anyio have no public way to run a loop in virtual time)
from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import heapq
import itertools
import logging
import math
import os
import random
import secrets
import sys
import threading
import time
from asyncio import events
from collections import Counter
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import anyio
import anyio.abc
import anyio.to_thread
import sniffio
from anyio._backends._asyncio import CancelScope as BackendScope
from greenlet import GreenletExit, getcurrent, greenlet

from tests import places
from tiers.kv.arrow_file import write_skeleton
from tiers.kv.slot_image import payload_hasher

START_SECONDS = 1_000.0
EPOCH_SECONDS = 1_800_000_000
PIECE_BYTES = 128
"""So that copies of a few hundred bytes come in several pieces."""
INDEX_ENTRIES_FIRST = 8
"""So that indexes grow."""
CREDIT_COMPUTE_SECONDS = 0.5
"""So that waiting uses a credit up within a life."""
PASS_PAUSE_SECONDS = 0.3
"""So that a catalog is doubted, and its objects gone through, more than once in a life."""
RATE_TOKENS_MIN = 12
"""So that steps of a few tokens measure how fast an engine computes."""


class Violation(AssertionError):
    """Something that must always hold does not. `rule` is short and names it."""

    def __init__(self, rule: str, detail: str = "") -> None:
        super().__init__(f"{rule}: {detail}" if detail else rule)
        self.rule = rule


class StepsOver(Exception):
    """The life was to be followed no further."""


class World:
    """Time, chance, and what was seen."""

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = START_SECONDS
        self.seen: Counter[str] = Counter()
        self.steps = 0
        self.steps_max = 0
        self.lines: list[str] = []
        self.broken: Violation | None = None
        """A rule that was found to be broken where the code at hand takes any exception."""
        self.disturbed = 0.0
        """When time last did what no process expects: it jumped, or a stopped process went on."""
        self._keep_trace = keep_trace
        self._hash = hashlib.blake2b(digest_size=16)
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def clock(self) -> float:
        """Seconds, as `time.monotonic` would give them."""
        return self.now

    def note(self, text: str, at_length: Callable[[], str] | None = None) -> None:
        """Add a line to the trace; `at_length` is made only where the trace is kept."""
        line = f"{self.now - START_SECONDS:10.4f} {text}"
        self._hash.update(line.encode())
        if self._keep_trace:
            self.lines.append(line if at_length is None else f"{line} {at_length()}")

    def saw(self, situation: str) -> None:
        """Count a situation that the simulation is there to reach."""
        self.seen[situation] += 1

    def count_step(self) -> None:
        """One more event. Raises `StepsOver` where it is one too many."""
        if self.steps_max and self.steps >= self.steps_max:
            raise StepsOver
        self.steps += 1

    @property
    def trace_hash(self) -> str:
        """Digest of all lines so far."""
        return self._hash.hexdigest()

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        """Have `call` called when that much time has passed."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._numbers), call))

    @property
    def next_time(self) -> float:
        """When the next call is due; infinity if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def take(self) -> Callable[[], object]:
        """The next call; time moves to where it is due."""
        due, _, call = heapq.heappop(self._heap)
        self.now = max(self.now, due)
        return call


class _NoSelector:
    """There is nothing to wait for but time."""

    def select(self, timeout: float | None) -> list[Any]:
        return []

    def close(self) -> None:
        return


class SimTask(asyncio.Task[Any]):
    """A task that hashes by its number: anyio and asyncio keep tasks in sets, and cancel in order.

    By default that is the order of addresses, which another process does not repeat.
    """

    def __init__(self, number: int, coro: Any, **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class _Scopes(dict[Any, None]):
    """Scopes within a scope: what anyio needs of a set, in the order of adding."""

    def add(self, scope: Any) -> None:
        self[scope] = None

    def remove(self, scope: Any) -> None:
        del self[scope]

    def discard(self, scope: Any) -> None:
        self.pop(scope, None)


def _make_scope(scope: Any, *arguments: Any, **options: Any) -> None:
    _scope_made(scope, *arguments, **options)
    scope._child_scopes = _Scopes()


_scope_made: Callable[..., None] = BackendScope.__init__


@functools.cache
def _with_a_clock() -> list[FunctionType]:
    """Functions of the product with an argument that defaults to a real clock."""
    members: list[object] = []
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] in places.PACKAGES:
            members += vars(module).values()
    methods = [list(vars(one).values()) for one in members if isinstance(one, type)]
    functions = [one for one in itertools.chain(members, *methods) if isinstance(one, FunctionType)]
    return [
        one
        for one in dict.fromkeys(functions)
        if any(map(_is_clock, (*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values())))
    ]


def _is_clock(value: object) -> bool:
    return value is _monotonic or value is _perf_counter


_monotonic, _perf_counter = time.monotonic, time.perf_counter


class VirtualLoop(asyncio.BaseEventLoop):
    """asyncio's own loop, turned by hand, on the clock of a world."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._selector = _NoSelector()
        self.faults: list[BaseException] = []
        self.set_exception_handler(self._failed)
        numbers = itertools.count()
        self.set_task_factory(
            lambda loop, coro, **options: SimTask(next(numbers), coro, loop=loop, **options)
        )

    def time(self) -> float:
        return self._world.now

    def _process_events(self, event_list: object) -> None:
        return

    def _write_to_self(self) -> None:
        return

    def _failed(self, loop: object, context: dict[str, Any]) -> None:
        self.faults.append(context.get("exception") or RuntimeError(context["message"]))

    @property
    def next_time(self) -> float:
        """When there is something to do; infinity if there never is."""
        inner = cast("Any", self)
        if inner._ready:
            return self._world.now
        scheduled = inner._scheduled
        while scheduled and scheduled[0]._cancelled:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            inner._timer_cancelled_count -= 1
        return scheduled[0]._when if scheduled else math.inf

    def turn(self) -> None:
        """One iteration: everything that is ready now, once."""
        inner = cast("Any", self)
        inner._thread_id = threading.get_ident()
        events._set_running_loop(self)
        try:
            inner._run_once()
        finally:
            events._set_running_loop(None)
            inner._thread_id = None


class Hop:
    """Work of a worker thread, run piece by piece on the virtual clock."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self.result: object = None
        self._greenlet = greenlet(self._run)
        self.started = False

    def _run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self._error = error

    def resume(self) -> bool:
        """Run the next piece; True when it was the last. Raises what the work raised."""
        self.started = True
        self._greenlet.parent = getcurrent()
        self._greenlet.switch()
        if self._greenlet.dead and self._error is not None:
            raise self._error
        return bool(self._greenlet.dead)

    @property
    def paused(self) -> bool:
        """Whether it stands in the middle of its work."""
        return self.started and not self._greenlet.dead

    def kill(self) -> None:
        """The process was killed: what the kernel takes back goes with it."""
        if self.paused:
            self._greenlet.parent = getcurrent()
            self._greenlet.throw(GreenletExit)


def pause() -> None:
    """Let other things happen here, if this is the work of a thread."""
    parent = getcurrent().parent
    if parent is not None:
        parent.switch()


class PausingHasher:
    """A payload's hasher that lets time pass between two pieces of a copy."""

    def __init__(self) -> None:
        self._inner = payload_hasher()

    def update(self, piece: Any) -> None:
        self._inner.update(piece)
        pause()

    def digest(self) -> bytes:
        return self._inner.digest()


Threads = Callable[[Hop], Any]
"""Runs a hop on a loop: an async function of the process that asked for it."""

_skeletons: dict[Any, Any] = {}


def _write_once(layout: Any, num_blocks: int, namespace_digest: bytes) -> Any:
    name = (layout, num_blocks, namespace_digest)
    if name not in _skeletons:
        _skeletons[name] = write_skeleton(layout, num_blocks, namespace_digest)
    return _skeletons[name]


@contextlib.contextmanager
def frozen(world: World, run_hop: Threads) -> Iterator[None]:
    """While this lasts, clocks, entropy and threads are the world's."""

    async def run_sync(
        work: Callable[..., object], *args: object, limiter: Any = None, **_: object
    ) -> object:
        async with limiter if limiter is not None else contextlib.nullcontext():
            hop = Hop(lambda: work(*args))
            with anyio.CancelScope(shield=True):
                await run_hop(hop)
            return hop.result

    class SimulatedThreads:
        """In place of `DedicatedThreads`: each piece of work is a hop."""

        def __init__(
            self,
            count: int,
            _: str,
            *,
            take: Callable[[], Any],
            carry_out: Callable[[Any], Any],
            ended: Callable[[list[tuple[Any, Any]]], None],
        ) -> None:
            self.running: list[tuple[float, Any] | None] = [None] * count
            self._take, self._carry_out, self._ended = take, carry_out, ended
            self._woken = anyio.Semaphore(0)

        def wake(self, count: int = 1) -> None:
            for _ in range(count):
                self._woken.release()

        async def run(
            self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
        ) -> None:
            async with anyio.create_task_group() as tasks:
                for number in range(len(self.running)):
                    tasks.start_soon(self._work, number)
                task_status.started()

        async def _work(self, number: int) -> None:
            while True:
                await self._woken.acquire()
                if (taken := self._take()) is None:
                    continue
                self.running[number] = (time.monotonic(), taken)
                done = await run_sync(self._carry_out, taken)
                self.running[number] = None
                self._ended([(taken, done)])

    def seeded(*seed: object) -> random.Random:
        return random.Random(*(seed or (world.random.getrandbits(64),)))  # type: ignore[arg-type]

    outside_threads = SimpleNamespace(current_thread=lambda: None, main_thread=lambda: world)
    patches: list[tuple[object, str, object]] = [
        (time, "monotonic", world.clock),
        (time, "perf_counter", world.clock),
        (time, "time", lambda: EPOCH_SECONDS + world.now),
        (time, "time_ns", lambda: int((EPOCH_SECONDS + world.now) * 1e9)),
        (os, "urandom", world.random.randbytes),
        (secrets, "token_bytes", lambda count=32: world.random.randbytes(count)),
        (secrets, "token_hex", lambda count=32: world.random.randbytes(count).hex()),
        (secrets, "randbelow", world.random.randrange),
        (anyio.to_thread, "run_sync", run_sync),
        (BackendScope, "__init__", _make_scope),
        # In the modules of these alone, and not wherever else it is used.
        (places.find("Retrying").module, "random", SimpleNamespace(Random=seeded)),
        (places.find("gather_group").module, "payload_hasher", PausingHasher),
        (places.find("Server").module, "threading", outside_threads),
    ]
    ours: dict[str, object] = {
        "DedicatedThreads": SimulatedThreads,
        # A thread of its own would end at a moment of its own.
        "_unmapping": SimpleNamespace(submit=lambda work: work()),
        "write_skeleton": _write_once,
        # Its length would depend on the machine and the process.
        "holder_name": lambda name: f"{name} on host, pid 1",
        "PIECE_BYTES_MAX": PIECE_BYTES,
        # Chunks are small, and threads are to share loads of them.
        "LOAD_BYTES_MIN": 1,
        "INDEX_ENTRIES_FIRST": INDEX_ENTRIES_FIRST,
        "PASS_PAUSE_SECONDS": PASS_PAUSE_SECONDS,
        "PREFILL_TOKENS_MIN": RATE_TOKENS_MIN,
        "CREDIT_COMPUTE_SECONDS": CREDIT_COMPUTE_SECONDS,
    }
    with contextlib.ExitStack() as stack:
        for target, name, value in patches:
            stack.enter_context(mock.patch.object(target, name, value))
        for name, value in ours.items():
            stack.enter_context(places.patched(name, value))
        for function in _with_a_clock():
            defaults = [
                world.clock if _is_clock(one) else one for one in function.__defaults__ or ()
            ]
            named = {
                name: world.clock if _is_clock(one) else one
                for name, one in (function.__kwdefaults__ or {}).items()
            }
            patch = mock.patch.multiple(
                function, __defaults__=tuple(defaults) or None, __kwdefaults__=named or None
            )
            stack.enter_context(patch)
        # As `anyio.run` does; callbacks that are no tasks are told by it where they run.
        library = sniffio.current_async_library_cvar
        stack.callback(library.reset, library.set("asyncio"))
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, logging.NOTSET)
        yield
