"""What a scheduler says of the prompts that its engine has begun to answer."""

from enum import StrEnum
from typing import Annotated, Final

import msgspec

PROMPTS_PER_MESSAGE_MAX: Final = 1024
REQUEST_ID_CHARACTERS_MAX: Final = 256
KEY_BYTES: Final = 32
RUNS_MAX: Final = 64
COUNT_MAX: Final = 1 << 40

Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]


class PromptOutcome(StrEnum):
    """Where the KV of a prompt's token came from; from `NEW` on it was computed, and why."""

    LOCAL = "local"
    """It was in the engine's own prefix cache."""
    HOST = "host"
    STORE = "store"
    """The object store had to send it first."""
    OTHER = "other"
    """Another connector loaded it."""
    NEW = "new"
    """No tier had it, and none is remembered to have had it."""
    EVICTED = "evicted"
    """Not long ago it left its last tier to make room, or the store, or was refused room."""
    EXPIRED = "expired"
    """Its `ttl_seconds` had ended."""
    QUOTA = "quota"
    """It was evicted, or not stored, because its tenant was at its limit."""
    TOO_SHORT = "too_short"
    """It was there, but fewer than `load_tokens_min` tokens in a row were."""
    LATE = "late"
    """The object store, or the other engine, took longer than the request waits."""
    PLANNER = "planner"
    """The sidecar expected computing to be faster than reading it from the object store."""
    STORE_AWAY = "store_away"
    """The object store had it, but failed, or its reads were paused."""
    BEING_WRITTEN = "being_written"
    """This engine had computed it and was storing it."""
    REFUSED = "refused"
    """The engine had no sidecar, the request cannot be cached, or a limit was reached."""
    NOT_ASKED = "not_asked"
    """The request, or the engine, does not read the cache, or not that tier."""
    FAILED = "failed"
    """Its load failed."""
    TAIL = "tail"
    """No chunk can have it: the last token, and what follows the last whole block."""

    @property
    def labels(self) -> tuple[str, str]:
        """`outcome` and `reason` in metrics; the reason is empty unless it was computed."""
        return (self.value, "") if self in LOADED else ("computed", self.value)


LOADED: Final = (
    PromptOutcome.LOCAL,
    PromptOutcome.HOST,
    PromptOutcome.STORE,
    PromptOutcome.OTHER,
)


class TokenRun(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of a prompt with one outcome, from the end of the run before to `end_tokens`."""

    outcome: PromptOutcome
    end_tokens: Count


class PromptRecord(msgspec.Struct, array_like=True, frozen=True):
    """How one prompt came to its KV. There is nothing in it of what the prompt says."""

    request_id: Annotated[str, msgspec.Meta(max_length=REQUEST_ID_CHARACTERS_MAX)]
    tokens: dict[PromptOutcome, Count]
    missed: Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES)] = b""
    """Key of the first chunk that was looked up and not loaded; empty if there is none."""
    missed_token: Count = 0
    """The first token of that chunk that was not loaded, nor in the engine's own cache."""
    lookup_us: Count = 0
    """Microseconds that lookups in the shared index took."""
    read_us: Count = 0
    """Microseconds for which the request waited for the object store."""
    load_us: Count = 0
    """Microseconds from the plan of its load to the end of it on all ranks."""
    saved_us: Count = 0
    """Microseconds that computing what was loaded would have taken, as this engine computes."""
    missed_reason: PromptOutcome | None = None
    """Why that token was computed."""
    late_us: Count = 0
    """Microseconds of the wait that was too long, if there are `LATE` tokens."""
    late_limit_us: Count = 0
    """How long that wait might be."""
    runs: Annotated[list[TokenRun], msgspec.Meta(max_length=RUNS_MAX)] = []
    """The tokens in their order; the end is left out if there are more runs."""


class Prompts(msgspec.Struct, tag="prompts", frozen=True):
    """Prompts whose first token the engine has generated since the last message. Not answered."""

    epoch: int
    prompts: Annotated[list[PromptRecord], msgspec.Meta(max_length=PROMPTS_PER_MESSAGE_MAX)]
