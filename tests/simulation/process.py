"""One life of the sidecar: the real one, on a virtual loop, without its sockets and threads.

Real: server (its tasks, ticks and drain), dispatcher, handshakes, sessions, realms, engine,
executor, copies, watch, catalog, the store's wrappers, the pool. Simulated: the ZMQ router, the
Unix connections (`Wire`), worker threads (`clock.Hop`), the object store's own behaviour
(`objects.py`).

Owns starting, stopping (SIGTERM), killing (SIGKILL), and freezing (SIGSTOP) it. What a kill takes
away is what the kernel takes away: locks, mappings and sockets, and nothing is tidied up.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio

from sidecar.app import Server
from sidecar.config.model import Config
from sidecar.core.commands import Command, Event
from sidecar.data.host_pool import open_pool
from sidecar.protocol.codec import decode_server
from sidecar.protocol.peer import Peer
from sidecar.service.handshake import Handshakes
from sidecar.service.store_stack import open_store
from sidecar.transport.zmtp_server import JobSocket, Sent
from tests import places
from tests.simulation.clock import Hop, Violation, VirtualLoop, World
from tests.simulation.objects import Bucket, FaultyObjects

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.simulation.checks import Checks
    from tests.simulation.wire import Wire

QUEUE_FRAMES_MAX = 40
"""Messages that a client which does not read may have waiting; the real limit is 4,096."""
HOP_SECONDS_MAX = 0.002
TURNS_TO_DIE_MAX = 1_000


class SimConnection:
    """The sidecar's end of one client's Unix connection."""

    def __init__(self, process: SidecarProcess, wire: Wire, frame: bytes, fds: list[int]) -> None:
        self.peer = Peer(pid=wire.pid, uid=os.geteuid(), gid=os.getegid())
        self.wire = wire
        self._process = process
        self._frame = frame
        self._fds = fds
        self._over = anyio.Event()
        self._gone = False

    async def receive_attach(self) -> tuple[bytes, list[int]]:
        """The frame that came with the connection."""
        fds, self._fds = self._fds, []
        return self._frame, fds

    def try_send(self, payload: bytes, fds: tuple[int, ...] = ()) -> bool:
        """Hand a frame to the client, later."""
        if self._gone:
            return False
        copies = [os.dup(fd) for fd in fds]
        self.wire.from_socket(self, payload, copies)
        return True

    async def wait_end(self) -> str:
        """Wait for the client's end of file."""
        await self._over.wait()
        return "end of file"

    def at_end(self) -> bool:
        """Whether the client is known to be gone."""
        return self._gone

    def hang_up(self) -> None:
        """End the conversation on both sides."""
        if not self._gone and not self._process.dead:
            self.wire.cut(self)
        self.ended()

    def ended(self) -> None:
        """The client's end of file arrived."""
        self._gone = True
        self._over.set()

    def close(self) -> None:
        """The socket is closed: the client reads end of file."""
        self.drop()
        if not self._process.dead:
            self.wire.cut(self)

    def drop(self) -> None:
        """Close descriptors that were on their way."""
        while self._fds:
            os.close(self._fds.pop())


class SimRouter:
    """The sidecar's end of the jobs channel."""

    endpoint = "sim://jobs"

    def __init__(self, process: SidecarProcess) -> None:
        self._process = process
        self.wires: dict[bytes, Wire] = {}

    def forget(self, token: bytes) -> None:
        """Close the connection of a session that has ended."""
        self.wires.pop(token, None)

    def send(self, routing_id: bytes, payload: bytes) -> Sent:
        """Queue one message for a client."""
        wire = self.wires.get(routing_id)
        if wire is None or wire.token != routing_id:
            return Sent.GONE
        if wire.waiting >= QUEUE_FRAMES_MAX:
            self._process.world.saw("client does not read")
            return Sent.FULL
        self._process.checks.sent(self._process, routing_id, decode_server(payload))
        wire.from_router(self._process, payload)
        return Sent.OK


class SidecarProcess:
    """A sidecar between its start and its end."""

    def __init__(
        self,
        world: World,
        config: Config,
        bucket: Bucket | None,
        checks: Checks,
    ) -> None:
        self.world = world
        self.config = config
        self.checks = checks
        self.dead = False
        self.frozen = False
        self.stopping = False
        self.told_to_stop = False
        self.loop = VirtualLoop(world)
        self.hops: list[Hop] = []
        self._backlog: deque[Callable[[], object]] = deque()
        self._connections: list[SimConnection] = []
        self.objects = None if bucket is None else FaultyObjects(world, bucket, self)
        store = None
        if config.store is not None:
            store = open_store(config.store, lambda _: cast("Any", self.objects))
        self.pool, restored = open_pool(config)
        checks.begins(restored)
        nothing: Any = SimpleNamespace()
        beatless: Any = SimpleNamespace(each_beat=lambda _: None)
        # One at a time, for no life here has more than a few.
        with (
            places.patched("READS_BEGUN_MAX", 1),
            places.patched("ADOPTED_MAX", 1),
        ):
            self.server = Server(config, nothing, self.pool, restored, store, nothing, beatless)
        self.dispatcher = self.server.dispatcher
        self.epoch = self.dispatcher.epoch
        self.router = SimRouter(self)
        self.dispatcher.jobs = cast("JobSocket", self.router)
        checks.watch(self)
        self._tasks: anyio.abc.TaskGroup | None = None
        self._main = self.loop.create_task(self._run())

    async def _run(self) -> None:
        """As `Server.run`, without sockets and signals."""
        dispatcher = self.dispatcher
        async with anyio.create_task_group() as tasks:
            await self.server.start(tasks)
            self._tasks = tasks
            self._handshakes = Handshakes(dispatcher, self.router.endpoint, tasks)
            await self.server.stopping.wait()
            self.stopping = True
            if self.server.broken is None:
                await self._drain()
            dispatcher.end()
            tasks.cancel_scope.cancel()

    async def _drain(self) -> None:
        began, written = self.world.now, self._written_when_announced()
        await self.server.drain()
        if self.world.now - began >= self.config.limits.drain_seconds_max - 1e-6:
            return
        left = self.dispatcher.engine.pending_work()
        if not left.idle:
            raise Violation("a drain waits for what was begun", f"{left}")
        if written and written[-1] != self.checks.conduct.written:
            raise Violation("a drain announces what was written", f"{written[-1]} of all")

    def _written_when_announced(self) -> list[int]:
        """How much was written whenever the catalog is told of all of it."""
        written: list[int] = []
        if self.dispatcher.store is not None:
            watch: Any = self.dispatcher.store.watch
            flush = watch.flush

            async def noted() -> bool:
                written.append(self.checks.conduct.written)
                return bool(await flush())

            watch.flush = noted
        return written

    # --- life ----------------------------------------------------------------------------------

    @property
    def next_time(self) -> float:
        """When it has something to do; never, where it is stopped or over."""
        return math.inf if self.dead or self.frozen else self.loop.next_time

    def turn(self) -> None:
        """Let it run everything that is ready, once."""
        self.loop.turn()
        if self.loop.faults:
            fault = self.loop.faults[0]
            if isinstance(fault, Violation):
                raise fault
            raise Violation("nothing raises on the loop", repr(fault)) from fault
        if self._main.done():
            error = None if self._main.cancelled() else self._main.exception()
            if error is not None:
                raise _root(error)
            self._stopped()

    def call(self, work: Callable[[], object]) -> None:
        """Have `work` done on its loop, when it is awake."""
        if self.dead:
            return
        if self.frozen:
            self._backlog.append(work)
        else:
            self.loop.call_soon(work)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = True

    def thaw(self) -> None:
        """SIGCONT; what came meanwhile waits in its sockets."""
        self.frozen = False
        self.world.disturbed = self.world.now
        while self._backlog and not self.dead:
            self.loop.call_soon(self._backlog.popleft())

    def terminate(self) -> None:
        """SIGTERM: drain and end."""
        self.told_to_stop = True
        self.call(self.server.stopping.set)

    def _stopped(self) -> None:
        """It ended by itself: as the rest of `Server.run` and `serve`."""
        self.world.note("sidecar ended")
        for connection in list(self._connections):
            connection.hang_up()
        self.dispatcher.close()
        keep = self.config.host.after_stop == "keep"
        leaked = self.pool.close(keep=keep)
        if leaked and not self.server.dispatcher.engine.draining:
            raise Violation("every slot is freed", f"{len(leaked)} slots at the end")
        self._over(kept=keep)

    def kill(self) -> None:
        """SIGKILL."""
        self._over(killed=True, kept=True)

    def _over(self, *, killed: bool = False, kept: bool) -> None:
        self.dead = True
        self.checks.died(self, kept=kept)
        if killed:
            # It learns of nothing any more: not of its clients' ends, nor that time has passed.
            cast("Any", self.dispatcher.engine).handle_all = _deaf
        for hop in self.hops:
            hop.kill()
        self.dispatcher.end()
        for session in self.dispatcher.sessions.all():
            if session.memory is not None:
                memory = cast("Any", session.memory)
                memory._copies = 0  # noqa: SLF001 (a process that dies runs no code)
                memory.end()
        for wire in list(self.router.wires.values()):
            wire.sidecar_gone(self)
        for connection in self._connections:
            connection.drop()
            connection.wire.sidecar_gone(self)
        self._end_tasks()
        if killed:
            for realm in self.dispatcher.realms.all():
                _forget_index(realm.index)
            _forget_pool(self.pool)

    def _end_tasks(self) -> None:
        for _ in range(TURNS_TO_DIE_MAX):
            tasks = asyncio.all_tasks(self.loop)
            if not tasks:
                break
            # The set's own order depends on tasks of other loops that are not collected yet.
            for task in sorted(tasks, key=hash):
                task.cancel()
            self.loop.turn()
        for task in asyncio.all_tasks(self.loop):
            raise Violation("every task can be cancelled", repr(task))
        if self._main.done() and not self._main.cancelled():
            self._main.exception()
        self.loop.faults.clear()
        self.loop.close()

    # --- clients -------------------------------------------------------------------------------

    @property
    def accepting(self) -> bool:
        """Whether a connection would be answered at all."""
        return not self.dead and not self.stopping

    def connect(self, wire: Wire, frame: bytes, fds: list[int]) -> SimConnection:
        """A client connects and sends its `Attach`."""
        connection = SimConnection(self, wire, frame, fds)
        self._connections.append(connection)
        self.call(lambda: self._accept(connection))
        return connection

    def _accept(self, connection: SimConnection) -> None:
        if self._tasks is None or self.stopping:
            connection.close()
            return
        self._tasks.start_soon(self._handshakes.serve, cast("Any", connection), connection.peer)

    def forget(self, connection: SimConnection) -> None:
        """The connection is over on both sides."""
        if connection in self._connections:
            self._connections.remove(connection)

    def receive(self, token: bytes, frame: bytes) -> None:
        """A message arrived on the jobs channel."""
        self.call(lambda: self._received(token, frame))

    def _received(self, token: bytes, frame: bytes) -> None:
        self.checks.received(token, frame)
        self.dispatcher.received(token, [frame])


async def run_hop(world: World, process: SidecarProcess, hop: Hop) -> None:
    """What a worker thread does with its work, in virtual time."""
    process.hops.append(hop)
    try:
        while True:
            await anyio.sleep(world.random.random() * HOP_SECONDS_MAX)
            if hop.resume():
                return
    finally:
        process.hops.remove(hop)


@contextlib.contextmanager
def real_sockets_replaced() -> Iterator[None]:
    """`Handshakes` takes our connections as they are."""
    with places.patched("Connection", lambda connection, _: connection):
        yield


def _forget_index(index: Any) -> None:
    """The kernel unmaps it; readers keep theirs, and nothing says that it is over."""
    if index._map.closed:  # noqa: SLF001 (a process that dies runs no code)
        return
    index._states.release()  # noqa: SLF001 (a process that dies runs no code)
    index._tags.release()  # noqa: SLF001 (a process that dies runs no code)
    del index._columns  # noqa: SLF001 (a process that dies runs no code)
    index._map.close()  # noqa: SLF001 (a process that dies runs no code)
    os.close(index.fd)


def _deaf(events: Sequence[Event], now: float) -> list[Command]:
    return []


def _forget_pool(pool: Any) -> None:
    """The kernel unmaps it and drops its lock; the files stay."""
    os.close(pool._lock_fd)  # noqa: SLF001 (a process that dies runs no code)
    pool._memory = None  # noqa: SLF001 (a process that dies runs no code)


def _root(error: BaseException) -> BaseException:
    """What a task raised, out of the groups of its task groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


__all__ = ["SidecarProcess", "SimConnection", "real_sockets_replaced", "run_hop"]
