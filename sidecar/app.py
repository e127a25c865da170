"""The sidecar process: sockets, the task group, readiness, draining.

Owns the start and the end of everything else. Does not own decisions (`core/engine.py`), how they
are carried out (`service/dispatcher.py`, `data/executor.py`), or handshakes.

Invariants: everything runs on one event loop inside one task group; threads only copy, hash and
access files. A stop is a drain: no new work is accepted, running copies end, the write queue is
written for at most `limits.drain_seconds_max`, and what is left is counted and logged. The process
ends at once at a second signal, and if a thread hangs in a system call long after these limits.
Unless it is killed, its sockets are removed at the end, and its memory is kept or removed
(`data/host_pool.py`). After a kill the next sidecar of the same name takes over.
"""

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import anyio.abc
import anyio.lowlevel
import pyarrow as pa

from sidecar.config.model import Config
from sidecar.core.commands import Restored, RestoredSlot, Tick
from sidecar.data.host_pool import closing, map_ahead, opened_pool
from sidecar.errors import StartError
from sidecar.events.sockets import EventSockets
from sidecar.exits import STOP_SIGNALS, Exit
from sidecar.logs import fields
from sidecar.observe.http import HttpServer
from sidecar.service.dispatcher import Dispatcher
from sidecar.service.handshake import Handshakes
from sidecar.service.runtime_dir import RuntimeDirectory
from sidecar.service.start_checks import shortages
from sidecar.service.store_stack import WrapStore, open_store
from sidecar.service.systemd import Notifier
from sidecar.service.watchdog import SelfChecks, Watchdog
from sidecar.transport.unix_socket import UnixListener
from sidecar.transport.zmtp_server import JobSocket
from tiers.errors import TierError
from tiers.pool.file import OpenStopped
from tiers.pool.host_pool import HostPool
from tiers.redaction import conceal
from tiers.store.middleware import Metered
from tiers.threads import NoThread

TICK_SECONDS: Final = 0.05
TICK_SECONDS_WAITED_FOR: Final = 0.01
"""While requests wait for the store: a late tick delays their first token."""
TICK_REST: Final = 9.0
"""Pause after a tick, in multiples of its duration: with thousands of lookups it takes
milliseconds."""
TICK_SECONDS_IDLE: Final = 1.0
STORE_CLOSE_SECONDS_MAX: Final = 2.0
ANNOUNCE_SECONDS_MAX: Final = 5.0
SIGNALS: Final = (*STOP_SIGNALS, signal.SIGHUP)
"""What a server handles from its start to its last callback."""
HANGING_SECONDS_MAX: Final = 10.0
"""How long a stop waits, beyond all other limits, for threads that cannot be interrupted."""

_logger = logging.getLogger("kvlake.server")


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A serving sidecar: where it is reached, and how to stop it (from any thread)."""

    epoch: int
    attach_path: Path
    http_url: str
    stop: Callable[[], None]


async def serve(
    config: Config,
    *,
    ready: Callable[[ServerInfo], None] | None = None,
    stopping: Callable[[], None] | None = None,
    wrap_store: WrapStore | None = None,
) -> Exit:
    """Run a sidecar until SIGTERM, SIGINT or `ServerInfo.stop`; returns the exit code.

    Needs the asyncio backend. `ready` is called once, when every socket is bound, and `stopping`
    once, when the drain begins or a signal ends the start. Raises `StartError` where an operator
    has to change something first.
    """
    # Arrow's threads would take the engine's cores; copying and hashing have their own threads.
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    conceal(config.secrets())
    async with contextlib.AsyncExitStack() as stack:
        stop = threading.Event()
        # While it starts, SIGINT stays with the event loop, which cancels the start.
        stop_start = partial(_stop_start, stop, stack, stopping)
        _handle_signals(stop_start, set(STOP_SIGNALS) - {signal.SIGINT})
        # Until the last callback: a signal that nobody handles would end the process before them.
        stack.callback(_handle_signals, None, SIGNALS)
        watchdog = Watchdog(Notifier())
        stack.callback(watchdog.stop)
        directory = RuntimeDirectory(config.runtime)
        stack.callback(directory.close)
        for shortage in shortages(config):
            _logger.warning(str(shortage))
        http = HttpServer(config.http, watchdog)
        await http.start()
        stack.push_async_callback(http.stop)
        store = None if config.store is None else open_store(config.store, wrap_store)
        opening = asyncio.create_task(opened_pool(config, stop))
        try:
            await asyncio.wait([opening])
        except BaseException:
            # Cancelled: nobody else would remove its file.
            stop.set()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([opening])
            raise
        finally:
            if opening.exception() is None:
                keep = config.host.after_stop == "keep"
                stack.enter_context(closing(opening.result()[0], keep=keep, option=config.option))
        if stop.is_set() and isinstance(opening.exception(), OpenStopped | None):
            return Exit.OK
        pool, restored = opening.result()
        server = Server(config, directory, pool, restored, store, http, watchdog)
        _handle_signals(server.signalled, SIGNALS)
        return await server.run(ready, stopping)


def _handle_signals(
    act: Callable[[signal.Signals], None] | None, numbers: Iterable[signal.Signals]
) -> None:
    """Call `act` at each of these signals; None: handle them no more."""
    # In another thread, signals belong to the embedding program.
    if threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()
    for number in numbers:
        if act is None:
            loop.remove_signal_handler(number)
        else:
            loop.add_signal_handler(number, act, number)


def _stop_start(
    stop: threading.Event,
    stack: contextlib.AsyncExitStack,
    stopping: Callable[[], None] | None,
    _number: signal.Signals,
) -> None:
    """Have the pool's opening end, and the process if it does not: a system call may hang."""
    if stop.is_set():
        os._exit(Exit.AT_ONCE)
    _logger.info("stopping before it serves")
    stop.set()
    if stopping is not None:
        stopping()
    timer = asyncio.get_running_loop().call_later(HANGING_SECONDS_MAX, _abandon_start)
    stack.callback(timer.cancel)


def _abandon_start() -> None:
    _logger.error("host memory is not made ready: the sidecar ends without it")
    os._exit(Exit.LOSS)


class Server:
    """One running sidecar."""

    def __init__(
        self,
        config: Config,
        directory: RuntimeDirectory,
        pool: HostPool,
        restored: tuple[RestoredSlot, ...],
        store: Metered | None,
        http: HttpServer,
        watchdog: Watchdog,
    ) -> None:
        self._config = config
        self._directory = directory
        self.dispatcher = Dispatcher(config, pool, store, epoch=time.time_ns())
        self._http = http
        self._watchdog = watchdog
        self._watchdog.broke = self._break
        self._watchdog.each_beat(self.dispatcher.leave_lost_gpus)
        self._taken_over = bool(restored)
        self.dispatcher.feed(Restored(restored))
        self.stopping = anyio.Event()
        self._in_terminal = os.isatty(0)
        """When it starts: a terminal that was closed is none."""
        self.broken: BaseException | None = None

    async def run(
        self, ready: Callable[[ServerInfo], None] | None, stopping: Callable[[], None] | None
    ) -> Exit:
        """Serve until stopped, drain, and close everything."""
        ended = Exit.OK
        dispatcher, directory = self.dispatcher, self._directory
        if lost := directory.read_lost():
            dispatcher.lost_before = lost
            _logger.warning(
                "the sidecar before this one stopped before it had written everything",
                extra=fields(objects_lost=lost),
            )
        async with contextlib.AsyncExitStack() as stack:
            if dispatcher.store is not None:
                stack.push_async_callback(_close_store, dispatcher.store.tier)
            stack.callback(dispatcher.close)
            jobs = JobSocket(
                directory.jobs_path,
                dispatcher.received,
                dispatcher.sessions.has_token,
                dispatcher.stranger,
                self._break,
                mode=directory.socket_mode,
                uids=self._config.runtime.served_uids,
                replies_queued_max=self._config.limits.replies_queued_max,
            )
            stack.callback(jobs.close)
            dispatcher.jobs = jobs
            events = self._open_events(stack)
            self._http.serve(dispatcher)
            stack.callback(self._http.serve, None)
            attaches = UnixListener(directory.attach_path, directory.socket_mode)
            stack.callback(attaches.close)
            async with anyio.create_task_group() as tasks:
                await self.start(tasks)
                handshakes = Handshakes(dispatcher, jobs.endpoint, tasks)
                attaches.start(handshakes.accepted, self._break)
                listeners = [attaches, jobs.listener]
                if events is not None:
                    listeners += [one.listener for one in events.unix_sockets]
                self_checks = SelfChecks(dispatcher, directory, listeners)
                loop = asyncio.get_running_loop()

                def stop() -> None:
                    # A closed loop has stopped already.
                    with contextlib.suppress(RuntimeError):
                        loop.call_soon_threadsafe(self.stopping.set)

                url = self._http.url
                info = ServerInfo(dispatcher.epoch, directory.attach_path, url, stop)
                _logger.info(
                    "serving",
                    extra=fields(attach=info.attach_path, http=info.http_url, epoch=info.epoch),
                )
                self._watchdog.serve(self_checks.check, self_checks.repair)
                if ready is not None:
                    ready(info)
                await self.stopping.wait()
                if stopping is not None:
                    stopping()
                self._watchdog.drain()
                seconds_max = self._config.limits.drain_seconds_max + ANNOUNCE_SECONDS_MAX
                timer = loop.call_later(seconds_max + HANGING_SECONDS_MAX, self._give_up)
                stack.callback(timer.cancel)
                attaches.close()
                directory.remove_sockets(directory.attach_path)
                if self.broken is None:
                    ended = await self.drain()
                    self._write_lost()
                dispatcher.end()
                tasks.cancel_scope.cancel()
        if self.broken is not None:
            raise self.broken
        return ended

    async def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Start the tasks that run until the end, apart from sockets."""
        self.dispatcher.executor.tasks = tasks
        try:
            await tasks.start(self.dispatcher.copies.run)
        except* NoThread as errors:
            # For `run`, which raises it as it is. A group of errors counts as a bug.
            self.broken = StartError(f"copy.threads: {errors.exceptions[0]}")
            tasks.cancel_scope.cancel()
        await anyio.lowlevel.checkpoint_if_cancelled()
        tasks.start_soon(self._tick)
        if self._taken_over and self._config.host.prefault:
            tasks.start_soon(map_ahead, self.dispatcher.pool)
        if (events := self.dispatcher.events) is not None:
            tasks.start_soon(events.sockets.answer, events.requested)
        if (store := self.dispatcher.store) is not None:
            tasks.start_soon(store.watch.run)
            tasks.start_soon(store.collector.run)

    def _open_events(self, stack: contextlib.AsyncExitStack) -> EventSockets | None:
        settings, directory = self._config.events, self._directory
        if not settings.enabled:
            return None
        sockets = EventSockets(settings, directory.events_path, directory.replay_path, self._break)
        stack.callback(sockets.close)
        self.dispatcher.publish(sockets, directory.first_event_number(self.dispatcher.epoch))
        return sockets

    def _break(self, error: BaseException) -> None:
        """Stop because of `error`, which was raised outside the task group."""
        self.broken = self.broken or error
        self.stopping.set()
        self.dispatcher.drained.set()

    def signalled(self, number: signal.Signals) -> None:
        """Stop; at a second signal, end at once."""
        # SIGHUP: a service manager requests a reload; a closed terminal requests the end.
        if number == signal.SIGHUP and not self._in_terminal:
            _logger.warning(
                "ignored: restart to read the configuration again",
                extra=fields(signal=number.name),
            )
            return
        if self.stopping.is_set():
            _logger.error("second signal, ending at once", extra=fields(signal=number.name))
            self._abandon(Exit.AT_ONCE)
        _logger.info("stopping", extra=fields(signal=number.name))
        self.stopping.set()

    def _give_up(self) -> None:
        """End the process: a system call of one of its threads hangs."""
        # An embedding program decides for itself.
        if threading.current_thread() is threading.main_thread():
            _logger.error(
                "a call of the store does not return (a mount whose server is gone?): the sidecar "
                "ends without it"
            )
            self._abandon(Exit.LOSS)

    def _abandon(self, code: Exit) -> None:
        """End the process now. Threads may be copying, so nothing is unmapped first."""
        self._write_lost()
        self._directory.remove_sockets()
        if self._config.host.after_stop == "remove":
            self.dispatcher.pool.remove_files()
        os._exit(code)

    def _write_lost(self) -> None:
        """Record how many objects are lost, where host memory is removed with them."""
        if self._config.host.after_stop == "remove":
            self.dispatcher.engine.writes.flush()
            left = self.dispatcher.engine.pending_work()
            self._directory.write_lost(left.writes_pending + left.writes_running)

    async def _tick(self) -> None:
        """Feed ticks to the engine: often while deadlines are pending, else rarely."""
        while True:
            begun = time.monotonic()
            self.dispatcher.feed(Tick())
            lookups = len(self.dispatcher.engine.lookups)
            if lookups or len(self.dispatcher.engine.leases):
                seconds = TICK_SECONDS_WAITED_FOR if lookups else TICK_SECONDS
                took = time.monotonic() - begun
                await anyio.sleep(max(seconds, took * TICK_REST))
            else:
                self.dispatcher.deadlines = anyio.Event()
                with anyio.move_on_after(TICK_SECONDS_IDLE):
                    await self.dispatcher.deadlines.wait()

    async def drain(self) -> Exit:
        """Finish running work, within `limits.drain_seconds_max`."""
        self.dispatcher.drain()
        with anyio.move_on_after(self._config.limits.drain_seconds_max) as patience:
            await self.dispatcher.drained.wait()
        store = self.dispatcher.store
        if store is not None:
            # Also after a drain that timed out: other sidecars need to know what was written.
            with anyio.move_on_after(ANNOUNCE_SECONDS_MAX):
                await store.watch.flush_all()
        # Loads are served until the end, so new ones may have arrived meanwhile.
        with anyio.CancelScope(deadline=patience.deadline):
            while self.broken is None and not self.dispatcher.engine.pending_work().idle:
                self.dispatcher.drained = anyio.Event()
                await self.dispatcher.drained.wait()
        if self.dispatcher.engine.writes.flushing:
            self.dispatcher.engine.writes.flush()
        left = self.dispatcher.engine.pending_work()
        rows_waiting = 0 if store is None else store.catalogs.rows_waiting
        if not left.idle:
            _logger.warning(
                "drained in part: limits.drain_seconds_max is over",
                extra=fields(
                    writes_left=left.writes_pending + left.writes_running,
                    memory=self._config.host.after_stop,
                    copies_left=left.copies_running,
                    reads_left=left.reads_running + left.reads_queued,
                    rows_untold=rows_waiting,
                ),
            )
            return Exit.LOSS
        if rows_waiting:
            _logger.warning(
                "drained, but other sidecars were not notified of all writes; they find them when "
                "they list the store (store.reconcile_every)",
                extra=fields(rows_untold=rows_waiting),
            )
            return Exit.LOSS
        _logger.info("drained")
        return Exit.OK


async def _close_store(store: Metered) -> None:
    with anyio.move_on_after(STORE_CLOSE_SECONDS_MAX, shield=True):
        try:
            await store.close()
        except TierError as error:
            _logger.warning("closing the store failed", extra=fields(error=error))
