"""What vLLM's publisher has been told of the sidecar's tiers, and what it is told next.

Owns the blocks that were told of and still hold, by their place (name, tier, group), and the
changes that wait for vLLM to take them. Does not own vLLM's words for them (`events.py`).

Invariants:

* Whoever applies everything that `take` gave never has a block that is gone: of each place the last
  change counts, a block is told as removed exactly if it was told as stored, and the end of a
  session with the sidecar is the end of all that was told of. After a reset of vLLM's own cache,
  which its subscribers take for the end of every block, what holds is told anew.
* At most `told_max` blocks are told of at a time. One that is forgotten for that, the oldest, is
  told as removed; what waits is bounded by the same number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sidecar.protocol import EVENT_NAME_BYTES, Events, Release, RemovedEvent, StoredEvent

if TYPE_CHECKING:
    from collections.abc import Iterable

    from connector.client import Client
    from sidecar.protocol import ServerMessage

TOLD_MAX: Final = 1 << 18

Place = tuple[bytes, str, int]
TierEvent = StoredEvent | RemovedEvent


class TierEvents:
    """The tiers of one session after the other, as vLLM's subscribers know them."""

    def __init__(self, *, told_max: int = TOLD_MAX) -> None:
        self._told_max = told_max
        self._session: object = None
        self._taken = 0
        """Messages of the session that were taken, and how many it was told that were."""
        self._said = -1
        self._told: dict[Place, StoredEvent] = {}
        """As what each block was told of, last."""
        self._came: dict[Place, StoredEvent] = {}
        self._went: dict[Place, RemovedEvent] = {}

    def poll(self, client: Client) -> list[ServerMessage]:
        """Take what has arrived; what is not of the tiers is returned.

        Says how far the events were taken: the sidecar tells no more than it was asked for.
        """
        session = client.session
        self.follow(session)
        others: list[ServerMessage] = []
        for message in client.poll(session):
            if isinstance(message, Events):
                self.heard(message)
            else:
                others.append(message)
        if session is not None and session.wants_events and self._said != self._taken:
            release = Release(session.epoch, [], [], heard=self._taken)
            if client.send(session, release):
                self._said = self._taken
        return others

    def follow(self, session: object) -> None:
        """Say which session is the live one, None for none: with another one nothing holds."""
        if session is not self._session:
            self._session = session
            self._taken, self._said = 0, -1
            self._forget()

    def heard(self, message: Events) -> None:
        """Take a message of the live session."""
        self._taken += 1
        if message.anew:
            self._forget()
        for stored in message.stored:
            place = _place(stored)
            self._went.pop(place, None)
            # Taken out first, so that the newest is last.
            self._came.pop(place, None)
            self._came[place] = stored
            if len(self._came) > self._told_max:
                # It was not told of, or still holds as it was told.
                del self._came[next(iter(self._came))]
        for removed in message.removed:
            place = _place(removed)
            self._came.pop(place, None)
            if place in self._told:
                self._went[place] = removed

    def cleared(self) -> None:
        """VLLM tells its subscribers that all blocks are gone, these too: tell of them again."""
        for place in self._went:
            del self._told[place]
        # What came meanwhile is told as what it is now.
        self._came = self._told | self._came
        self._told, self._went = {}, {}

    def take(self) -> list[TierEvent]:
        """What to tell: what went, then what came, each in the order in which it did."""
        events: list[TierEvent] = [*self._went.values(), *self._came.values()]
        for place in self._went:
            del self._told[place]
        for place, stored in self._came.items():
            self._told.pop(place, None)
            self._told[place] = stored
        self._went, self._came = {}, {}
        too_many = len(self._told) - self._told_max
        if too_many > 0:
            oldest = list(self._told.items())[:too_many]
            events += _removals(oldest)
            for place, _ in oldest:
                del self._told[place]
        return events

    def _forget(self) -> None:
        self._came = {}
        self._went = dict(zip(self._told, _removals(self._told.items()), strict=True))


def _place(event: TierEvent) -> Place:
    return (event.key[:EVENT_NAME_BYTES], event.tier, event.group)


def _removals(told: Iterable[tuple[Place, StoredEvent]]) -> list[RemovedEvent]:
    return [RemovedEvent(stored.key, tier, group) for (_, tier, group), stored in told]
