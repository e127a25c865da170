"""What became of the prompts of this node's engines: sums, and the last ones one by one.

Owns what schedulers report (`protocol/prompts.py`), in bounded memory. Nothing that the cache does
depends on it.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from sidecar.protocol.prompts import LOADED, PromptOutcome, PromptRecord, Prompts
from sidecar.sessions.session import Session


@dataclass(slots=True)
class Seconds:
    """Seconds of all prompts since the start."""

    saved: float = 0.0
    """Computing what was loaded would have taken them, by the engines' own speed."""
    spent: float = 0.0
    """Lookups, waits for the store and loads took them."""
    gpu: float = 0.0
    """Saved less spent, each times the ranks of its engine. Below 0 if the cache costs time."""


SAMPLE_SECONDS: Final = 10.0
HISTORY_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class ReportedPrompt:
    """A prompt, with what the sidecar knows of its engine."""

    record: PromptRecord
    at: float
    """Seconds since 1970 when the report came."""
    engine_id: str
    realm_id: int
    chunk_tokens: int
    gone_seconds: float | None
    """How long before the report its first missed chunk had left the cache, if that is known."""


class Window(NamedTuple):
    """Sums over a time."""

    seconds: float
    prompts: int
    tokens: Counter[PromptOutcome]
    gpu_seconds: float
    """Saved, net."""

    @property
    def hit_share(self) -> float | None:
        """Part of the tokens that was not computed, without those that no cache can have."""
        total = self.tokens.total() - self.tokens[PromptOutcome.TAIL]
        return sum(self.tokens[outcome] for outcome in LOADED) / total if total else None


class PromptLog:
    """Adds up reports, and keeps the last `kept_max` prompts."""

    def __init__(self, kept_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: deque[ReportedPrompt] = deque(maxlen=kept_max)
        self.prompts = 0
        self.tokens = Counter[PromptOutcome]()
        self.seconds = Seconds()
        samples = round(HISTORY_SECONDS / SAMPLE_SECONDS) + 1
        self._history: deque[Window] = deque(maxlen=samples)
        """The time of each sample, and the sums until then."""
        self._history.append(self._now())

    def add(
        self,
        session: Session,
        message: Prompts,
        gone_seconds: Callable[[int, bytes], float | None],
    ) -> None:
        """Take a scheduler's report. `gone_seconds`: how long a realm's chunk has been gone."""
        attach, realm, at = session.attach, session.realm, time.time()
        for record in message.prompts:
            self.prompts += 1
            self.tokens.update(record.tokens)
            saved = record.saved_us / 1e6
            spent = (record.lookup_us + record.read_us + record.load_us) / 1e6
            self.seconds.saved += saved
            self.seconds.spent += spent
            self.seconds.gpu += (saved - spent) * attach.world_size
            known = (gone_seconds(each.realm_id, record.missed) for each in session.realms)
            gone = next((seconds for seconds in known if seconds is not None), None)
            chunk_tokens = realm.block_tokens * realm.blocks_per_chunk
            self._last.append(
                ReportedPrompt(record, at, attach.engine_id, realm.realm_id, chunk_tokens, gone)
            )

    def sample(self) -> None:
        """Take a sample if the last one is `SAMPLE_SECONDS` old."""
        if self._clock() - self._history[-1].seconds >= SAMPLE_SECONDS:
            self._history.append(self._now())

    def over_last(self, seconds: float) -> Window:
        """The sums of the last `seconds`, or up to a sample more; less after a start."""
        now = self._now()
        before = next(
            (one for one in reversed(self._history) if now.seconds - one.seconds >= seconds),
            self._history[0],
        )
        return Window(
            now.seconds - before.seconds,
            now.prompts - before.prompts,
            now.tokens - before.tokens,
            now.gpu_seconds - before.gpu_seconds,
        )

    def _now(self) -> Window:
        return Window(self._clock(), self.prompts, self.tokens.copy(), self.seconds.gpu)

    def last(self, count: int, request_id: str = "") -> Iterator[ReportedPrompt]:
        """The last prompts, newest first; those of one request if it is named."""
        found = (one for one in reversed(self._last) if request_id in ("", one.record.request_id))
        for _, one in zip(range(count), found, strict=False):
            yield one
