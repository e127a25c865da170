"""What requests wait for before they are scheduled: the object store, and other engines.

Owns the lookups that the sidecar was sent, until they are given back, and which requests wait for
chunks that another engine has stored, or is storing. Does not own what a hit is (`lookup.py`), nor
which requests are read for at all (`scheduler.py`).

Invariants: a request waits until its deadline at most, and for no answer of a session that is over;
of a request that is over nothing is left here, nor in the sidecar.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from connector.scheduler.requests import PendingRead
from sidecar.protocol import Lookup, Release

if TYPE_CHECKING:
    from collections.abc import Callable

    from connector.client import Client, SidecarSession
    from connector.rate import PrefillRate
    from connector.scheduler.lookup import HitFinder
    from connector.scheduler.requests import RequestState, Stats
    from sidecar.protocol import LookupDone

SESSIONS_ASKED_MAX: Final = 4
"""Sessions that one request asks in turn: a sidecar that comes and goes holds no request up."""


class PendingLookups:
    """The requests that wait.

    Args:
        rate: how fast the engine computes what is not read.
        load_tokens_min: what would add less to a hit is not asked for.
    """

    def __init__(
        self,
        client: Client,
        finder: HitFinder,
        rate: PrefillRate,
        new_id: Callable[[], int],
        *,
        load_tokens_min: int,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._finder = finder
        self._rate = rate
        self._new_id = new_id
        self._load_tokens_min = load_tokens_min
        self.clock = clock
        self.lookups: dict[int, RequestState] = {}
        self._expecting: set[str] = set()

    @property
    def pending(self) -> bool:
        """Whether any request waits."""
        return bool(self.lookups or self._expecting)

    # --- other engines -------------------------------------------------------------------------

    def expect(self, state: RequestState, session: SidecarSession) -> None:
        """Wait from now on for what another engine has stored, or is storing."""
        wait_ms = state.request_params.wait_ms
        if wait_ms < 0:
            wait_ms = session.limits.lookup_wait_ms_max
        state.expects_until = self.clock() + wait_ms / 1000
        self._expecting.add(state.request.request_id)

    def expecting(
        self, state: RequestState, session: SidecarSession, local_tokens: int, stats: Stats
    ) -> bool:
        """Whether a request still waits for what another engine has."""
        if state.expects_until is None:
            return False
        wanted = min(state.request_params.expects_tokens, self._finder.longest(state))
        found = local_tokens
        if found < wanted:
            hit = self._finder.hit(state, session, local_tokens)
            if hit is not None:
                found = hit.wanted_tokens if state.request_params.asks_store else hit.end_tokens
        late = self.clock() >= state.expects_until
        if found < wanted and not late:
            return True
        stats.expected_late += found < wanted
        state.expects_until = None
        self._expecting.discard(state.request.request_id)
        return False

    # --- the object store ----------------------------------------------------------------------

    def ask_store(
        self, state: RequestState, session: SidecarSession, local_tokens: int, stats: Stats
    ) -> None:
        """Have the sidecar read what lies behind the hit and in the store alone, if it pays."""
        if not state.request_params.asks_store:
            return
        if state.asked_session is not session:
            if state.asked_sessions >= SESSIONS_ASKED_MAX:
                return
            state.asked_session = session
            state.asked_sessions += 1
        elif state.asked_tokens == local_tokens:
            return
        state.asked_tokens = local_tokens
        hit = self._finder.hit(state, session, local_tokens)
        if hit is None or not hit.wanted:
            return
        # What counts is what it adds to what can be loaded at once.
        if hit.wanted_tokens - hit.end_tokens < self._load_tokens_min:
            return
        lookup_id = self._new_id()
        wait_ms = session.limits.lookup_wait_ms_max
        keys, groups = [one.key for one in hit.wanted], [one.group for one in hit.wanted]
        lookup = Lookup(
            session.epoch,
            lookup_id,
            keys,
            wait_ms,
            state.tenant,
            # A state that is missing costs all that is behind the run without it.
            hit.wanted_tokens - min(hit.first_wanted_tokens, hit.end_tokens),
            self._rate.tokens_per_second,
            groups if any(groups) else [],
        )
        if self._client.send(session, lookup):
            stats.lookups_sent += 1
            state.from_store_keys.update(keys)
            deadline = self.clock() + wait_ms / 1000
            state.lookup = PendingRead(lookup_id, deadline, session)
            self.lookups[lookup_id] = state

    def leave_others(self, state: RequestState, session: SidecarSession) -> None:
        """Wait for no answer of another session than this one."""
        if state.lookup is not None and state.lookup.session is not session:
            # Nobody will answer: that sidecar is gone, or has forgotten us. The new one is asked.
            self._forget(state)

    def answered(self, message: LookupDone) -> None:
        """The sidecar has done what it was asked."""
        state = self.lookups.get(message.lookup_id)
        if state is not None and message.ready:
            self._over(state)
        elif state is not None:
            # The sidecar keeps nothing for it.
            self._forget(state)

    def reading(self, state: RequestState, stats: Stats) -> bool:
        """Whether a request still waits for what it asked of the store."""
        lookup = state.lookup
        if lookup is None:
            return False
        if self.clock() >= lookup.deadline:
            stats.lookups_expired += 1
            self._over(state)
            return False
        return True

    # --- the end -------------------------------------------------------------------------------

    def finished(self, state: RequestState) -> None:
        """A request is over, and what it asked for is given back."""
        self._expecting.discard(state.request.request_id)
        self._over(state)
        self.give_back(state)

    def give_back(self, state: RequestState) -> None:
        """A request needs no lookup's pins any more: a lease has its load's, or it loads nothing.

        Only lookups are given back: a load that runs on keeps its lease, which ends with it.
        """
        if not state.lookups_over:
            return
        session = self._client.session
        over, state.lookups_over = state.lookups_over, []
        ids = [lookup.lookup_id for lookup in over if lookup.session is session]
        if session is not None and ids:
            self._client.send(session, Release(session.epoch, [], ids))

    def _over(self, state: RequestState) -> None:
        """Wait no longer, and keep what there is until it is known what of it is loaded."""
        if state.lookup is not None:
            state.lookups_over.append(state.lookup)
        self._forget(state)

    def _forget(self, state: RequestState) -> None:
        if state.lookup is not None:
            self.lookups.pop(state.lookup.lookup_id, None)
            state.lookup = None
