"""What requests said of the chunks that they store, and asked to have kept.

Owns the shadow of both: of each slot until when it may be found and whether it may be written,
which outlives a sidecar as the slot does, and of each pin until when it holds. Rules are named as
in `checks.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sidecar.core.commands import (
    Command,
    Draining,
    Event,
    Gather,
    Read,
    Received,
    Scatter,
    SessionClosed,
    Write,
)
from sidecar.core.directory import Chunk, SegmentState
from sidecar.protocol import Pin, Release, Submit
from tests.simulation.clock import Violation, World

if TYPE_CHECKING:
    from sidecar.core.engine import Engine

SLACK_SECONDS = 0.002
"""Times are told in milliseconds."""


class Retained:
    """Over all lives of a sidecar; `begins` starts a new one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._slots: dict[int, tuple[float, bool]] = {}
        """Slot to when its chunk is to be forgotten, and whether it stays on the node."""
        self._pins: dict[tuple[int, Chunk], float] = {}
        self._refused = 0

    def begins(self) -> None:
        """Another sidecar: pins end with their session, what was said of a slot does not."""
        self._pins.clear()
        self._refused = 0

    def freed(self, slot: int) -> None:
        """A slot holds nothing any more."""
        self._slots.pop(slot, None)

    def after(self, engine: Engine, event: Event, commands: list[Command], now: float) -> None:
        """An event was handled."""
        for command in commands:
            match command:
                case Gather():
                    self._gathered(event, command, now)
                case Read():
                    self._slots.pop(command.slot, None)
                case Scatter():
                    if self._slots.get(command.slot, (math.inf,))[0] <= now:
                        raise Violation("an expired chunk is never served", f"{command}")
                case Write():
                    if self._slots.get(command.slot, (math.inf, False))[1]:
                        raise Violation("what stays on the node is not written", f"{command}")
                case _:
                    pass
        self._out_of_sight(engine, now)
        self._pins_hold(engine, event, now)

    def _gathered(self, event: Event, command: Gather, now: float) -> None:
        assert isinstance(event, Received)
        assert isinstance(event.message, Submit)
        (job,) = [one for one in event.message.stores if one.job_id == command.job_id]
        until = now + job.ttl_ms / 1000 if job.ttl_ms else math.inf
        self._slots[command.slot] = (until, job.stays or job.ttl_ms > 0)

    def _out_of_sight(self, engine: Engine, now: float) -> None:
        late = {slot for slot, (until, _) in self._slots.items() if until + SLACK_SECONDS <= now}
        if not late:
            return
        for realm in engine.directory.realms.values():
            for chunk in realm.chunks.values():
                for segment in chunk.segments:
                    if segment.state is SegmentState.HOST and segment.slot in late:
                        raise Violation("an expired chunk is out of sight", f"slot {segment.slot}")

    def _pins_hold(self, engine: Engine, event: Event, now: float) -> None:
        match event:
            case Received(message=Pin() as pin):
                if event.session_id in engine.sessions and not engine.draining:
                    self._pinned(engine, event.session_id, pin, now)
            case SessionClosed():
                self._end(event.session_id)
            case Received(message=Release(pins=True)):
                self._end(event.session_id)
            case Draining():
                self._pins.clear()
            case _:
                pass
        for (session_id, chunk), until in list(self._pins.items()):
            if until <= now or chunk.detached:
                del self._pins[session_id, chunk]
            elif not chunk.pins or not chunk.request_pins:
                raise Violation("a pin holds", f"{chunk.key.hex()[:12]} of session {session_id}")
        self._refused = engine.counters.pins_refused

    def _pinned(self, engine: Engine, session_id: int, message: Pin, now: float) -> None:
        """All but those that were refused are kept from now on."""
        session = engine.sessions[session_id]
        until = now + message.duration_ms / 1000
        own = {one.chunk for one in engine.request_pins if one.session_id == session_id}
        refused = engine.counters.pins_refused - self._refused
        groups = message.groups or [0] * len(message.keys)
        for key, group in set(zip(message.keys, groups, strict=True)):
            chunk = engine.directory.realms[session.groups[group].realm_id].chunks.get(key)
            if chunk is None or chunk not in own:
                refused -= 1
                continue
            name = (session_id, chunk)
            self._pins[name] = max(until, self._pins.get(name, 0.0))
        if refused:
            raise Violation("a pin is taken or refused", f"{refused} more refused than missing")

    def _end(self, session_id: int) -> None:
        for name in [name for name in self._pins if name[0] == session_id]:
            del self._pins[name]
