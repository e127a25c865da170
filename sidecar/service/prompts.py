"""What became of the prompts of this node's engines: sums, and the last ones one by one.

Owns what schedulers report (`protocol/prompts.py`), in bounded memory. Nothing that the cache does
depends on it.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sidecar.protocol.prompts import PromptOutcome, PromptRecord, Prompts
from sidecar.sessions.model_names import ModelLabels
from sidecar.sessions.session import Session


@dataclass(slots=True)
class Seconds:
    """Seconds of all prompts since the start."""

    saved: float = 0.0
    """Computing what was loaded would have taken them, by the engines' own speed."""
    spent: float = 0.0
    """Lookups, waits for the store and loads took them."""
    gpu_saved: float = 0.0
    """The same, each times the ranks of its engine."""
    gpu_spent: float = 0.0

    @property
    def gpu(self) -> float:
        """Saved less spent, of all ranks. Below 0 if the cache costs time."""
        return self.gpu_saved - self.gpu_spent


@dataclass(frozen=True, slots=True)
class ReportedPrompt:
    """A prompt, with what the sidecar knows of its engine."""

    record: PromptRecord
    at: float
    """Seconds since 1970 when the report came."""
    engine_id: str
    model: str
    chunk_tokens: int
    gone_seconds: float | None
    """How long before the report its first missed chunk had left the cache, if that is known."""


class PromptLog:
    """Adds up reports, and keeps the last `kept_max` prompts."""

    def __init__(self, kept_max: int) -> None:
        self._last: deque[ReportedPrompt] = deque(maxlen=kept_max)
        self.prompts = 0
        self.tokens = Counter[PromptOutcome]()
        self.tokens_by_model = defaultdict[str, Counter[PromptOutcome]](Counter)
        self._labels = ModelLabels()
        self.seconds = Seconds()

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
            self.tokens_by_model[self._labels.of(realm.model_name)].update(record.tokens)
            saved = record.saved_us / 1e6
            spent = (record.lookup_us + record.read_us + record.load_us) / 1e6
            self.seconds.saved += saved
            self.seconds.spent += spent
            self.seconds.gpu_saved += saved * attach.world_size
            self.seconds.gpu_spent += spent * attach.world_size
            known = (gone_seconds(each.realm_id, record.missed) for each in session.realms)
            gone = next((seconds for seconds in known if seconds is not None), None)
            chunk_tokens = realm.block_tokens * realm.blocks_per_chunk
            self._last.append(
                ReportedPrompt(record, at, attach.engine_id, realm.model_name, chunk_tokens, gone)
            )

    def last(self, count: int, request_id: str = "") -> Iterator[ReportedPrompt]:
        """The last prompts, newest first; those of one request if it is named.

        VLLM adds to the id that a client knows: the prompt's number, and random digits.
        """
        found = (
            one
            for one in reversed(self._last)
            if not request_id or f"{one.record.request_id}-".startswith(f"{request_id}-")
        )
        for _, one in zip(range(count), found, strict=False):
            yield one
