"""Requests that wait before they are scheduled: for the object store, or for another engine.

Owns the lookups that the sidecar was sent until their release, the requests that expect chunks of
another engine, and the speed of this engine (`prefill.py`), which the sidecar weighs reads against.
Does not own what a hit is (`lookup.py`), nor which requests may read (`role.py`).

Invariants: no request waits beyond its deadline, or for an answer of a lost session. A request that
ended leaves nothing here and no pins in the sidecar.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from connector.client import Client, SidecarSession
from connector.scheduler.lookup import HitFinder, keys_and_groups
from connector.scheduler.prefill import PrefillTimes
from connector.scheduler.requests import RequestState, SentLookup, Settings
from connector.scheduler.stats import Stats
from sidecar.protocol import Lookup, LookupDone, Outcome, Release
from sidecar.protocol.prompts import PromptOutcome

SESSIONS_ASKED_MAX: Final = 4
"""Sessions that one request asks in turn, so that a restarting sidecar cannot delay it for ever."""
EXPECTED_SECONDS_EACH: Final = 200e-6
"""Between two further lookups of requests that expect chunks, ten times what one takes: any client
may send thousands of such requests, and not every step may look up all of them."""
REASONS: Final = {
    Outcome.EXPIRED: PromptOutcome.LATE,
    Outcome.RECOMPUTED: PromptOutcome.PLANNER,
    Outcome.FULL: PromptOutcome.REFUSED,
}
"""Why the rest of a lookup is computed, by its outcome."""


@dataclass(slots=True, eq=False)
class PendingLookups:
    """The requests that wait. A read that adds less than `load_tokens_min` is not asked for."""

    client: Client
    finder: HitFinder
    stats: Stats
    new_id: Callable[[], int]
    settings: Settings
    clock: Callable[[], float]
    times: PrefillTimes = field(default_factory=PrefillTimes, init=False)
    lookups: dict[int, RequestState] = field(default_factory=dict[int, "RequestState"], init=False)
    expecting_ids: set[str] = field(default_factory=set[str], init=False)
    _looked_up: float = field(default=0.0, init=False)
    """When the last of these requests is due to be looked up again."""

    @property
    def pending(self) -> bool:
        """Whether any request waits."""
        return bool(self.lookups or self.expecting_ids)

    def expect(self, state: RequestState, session: SidecarSession) -> None:
        """Start to wait for chunks that another engine has stored or is storing."""
        wait_ms = state.request_params.wait_ms
        if wait_ms < 0:
            wait_ms = session.limits.lookup_wait_ms_max
        state.expects_from = self.clock()
        state.expects_until = state.expects_from + wait_ms / 1000
        self.expecting_ids.add(state.request.request_id)

    def expecting(self, state: RequestState, session: SidecarSession, local_tokens: int) -> bool:
        """Whether a request still waits for another engine's chunks."""
        if state.expects_until is None:
            return False
        now = self.clock()
        if now < min(state.expects_again, state.expects_until):
            return True
        self._looked_up = max(now, self._looked_up) + EXPECTED_SECONDS_EACH
        state.expects_again = self._looked_up
        wanted = min(state.request_params.expects_tokens, self.finder.longest(state))
        found = local_tokens
        if found < wanted:
            hit = self.finder.hit(state, session, local_tokens)
            found = hit.wanted_tokens if state.request_params.asks_store else hit.end_tokens
        if found < wanted and now < state.expects_until:
            return True
        if found < wanted:
            self.stats.expected_late += 1
            limit = state.expects_until - state.expects_from
            state.late = (now - state.expects_from, limit)
        state.expects_until = None
        self.expecting_ids.discard(state.request.request_id)
        return False

    def ask_store(self, state: RequestState, session: SidecarSession, local_tokens: int) -> None:
        """Have the sidecar read what the hit lacks and only the store has, if that pays.

        Does nothing while a lookup of this session is not answered.
        """
        if state.lookup is not None and state.lookup.session is not session:
            # That sidecar is gone, or has forgotten us.
            self._ended(state, pinned=False)
        if state.lookup is not None or not state.request_params.asks_store:
            return
        asked = state.asked
        if session.token not in asked and len(asked) >= SESSIONS_ASKED_MAX:
            state.store_reason = PromptOutcome.REFUSED
            return
        if asked.get(session.token) == local_tokens:
            return
        asked[session.token] = local_tokens
        hit = self.finder.hit(state, session, local_tokens)
        # A read must pay by what it adds to what can be loaded at once.
        if not hit.wanted or hit.wanted_tokens - hit.end_tokens < self.settings.load_tokens_min:
            state.store_reason = PromptOutcome.TOO_SHORT
            return
        lookup_id = self.new_id()
        wait_ms = session.limits.lookup_wait_ms_max
        # With what is held: the sidecar must not make room with it for what it reads.
        keys, groups = keys_and_groups([*hit.held, *hit.wanted])
        # What the read saves ends where the hit would.
        tokens = hit.read_tokens
        seconds = self.times.seconds(hit.wanted_tokens - tokens, tokens)
        rate = tokens / seconds if seconds else 0.0
        lookup = Lookup(
            session.epoch,
            lookup_id,
            keys,
            wait_ms,
            tenant=state.tenant,
            num_tokens=tokens,
            prefill_tokens_per_second=rate,
            groups=groups,
            num_held=len(hit.held),
        )
        state.store_reason = PromptOutcome.REFUSED
        if self.client.send(session, lookup):
            self.stats.lookups_sent += 1
            state.from_store_keys.update(key for _, key in hit.wanted)
            now = self.clock()
            state.read_began = state.read_began or now
            state.lookup = SentLookup(lookup_id, now, now + wait_ms / 1000, session)
            self.lookups[lookup_id] = state

    def answered(self, message: LookupDone) -> None:
        """Take the sidecar's answer to a lookup."""
        state = self.lookups.get(message.lookup_id)
        if state is not None:
            state.store_reason = REASONS.get(message.outcome, PromptOutcome.STORE_AWAY)
            self._note_late(state)
            self._ended(state, pinned=message.ready > 0)

    def reading(self, state: RequestState) -> bool:
        """Whether a request still waits for its lookup."""
        if state.lookup is None:
            return False
        if self.clock() >= state.lookup.deadline:
            self.stats.lookups_expired += 1
            state.store_reason = PromptOutcome.LATE
            self._note_late(state)
            self._ended(state, pinned=True)
            return False
        return True

    def _note_late(self, state: RequestState) -> None:
        if state.lookup is not None and state.store_reason is PromptOutcome.LATE:
            sent = state.lookup.sent
            state.late = (self.clock() - sent, state.lookup.deadline - sent)

    def finished(self, state: RequestState) -> None:
        """Release everything of a request that ended."""
        self.expecting_ids.discard(state.request.request_id)
        self._ended(state, pinned=True)
        self.release(state)

    def release(self, state: RequestState) -> None:
        """Release the pins of ended lookups: the load has a lease by now, or there is no load."""
        if not state.lookups_over:
            return
        session = self.client.session
        over, state.lookups_over = state.lookups_over, []
        ids = [lookup.lookup_id for lookup in over if lookup.session is session]
        if session is not None and ids:
            self.client.send(session, Release(session.epoch, [], ids))

    def _ended(self, state: RequestState, *, pinned: bool) -> None:
        """Stop waiting. What the sidecar pins for the lookup stays until the load is known."""
        if state.lookup is not None:
            state.read_seconds += self.clock() - state.lookup.sent
            if pinned:
                state.lookups_over.append(state.lookup)
            self.lookups.pop(state.lookup.lookup_id, None)
            state.lookup = None
