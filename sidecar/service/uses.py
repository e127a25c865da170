"""The chunks of the last prompts of this node's engines, to be replayed elsewhere.

Owns these records, in bounded memory. Nothing that the cache does depends on them. They have no
tokens: a key is a digest of the tokens up to its end, of the cache salt and of the model.

Invariant: at most `kept_max` prompts, and `KEYS_MAX` keys except for the newest prompt.
"""

import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from sidecar.protocol import Use
from sidecar.sessions.session import Session

KEYS_MAX: Final = 1 << 18
ANSWER_KEYS_MAX: Final = 1 << 15
"""Keys in an answer, its last prompt aside: all of them would hold up the event loop."""
NAME_BYTES: Final = 12
"""Bytes of each key that are kept: enough to tell chunks apart."""


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """The chunks of one prompt."""

    number: int
    """Counts from 1."""
    at: float
    """Seconds since 1970."""
    model: str
    num_tokens: int
    tokens_per_key: int
    names: bytes
    """`NAME_BYTES` of each key, head first."""

    @property
    def keys(self) -> list[str]:
        """Names of the chunks in hexadecimal digits."""
        size = 2 * NAME_BYTES
        text = self.names.hex()
        return [text[first : first + size] for first in range(0, len(text), size)]


class UseLog:
    """The last `kept_max` prompts."""

    def __init__(self, kept_max: int) -> None:
        self._kept_max = kept_max
        self._num_bytes = 0
        self.last: deque[RecordedPrompt] = deque()
        self.number = 0
        """That of the last prompt."""

    def add(self, session: Session, message: Use) -> None:
        """Take the prompt of a request: the chunks of the KV cache group that has most of them."""
        self.number += 1
        if not self._kept_max:
            return
        keys, group = message.keys, 0
        if message.groups:
            ((group, _),) = Counter(message.groups).most_common(1)
            named = zip(message.keys, message.groups, strict=True)
            keys = [key for key, of in named if of == group]
        realm = session.realms[group]
        per_key = realm.block_tokens * realm.blocks_per_chunk
        num_tokens = min(message.num_tokens, len(keys) * per_key)
        names = b"".join([key[:NAME_BYTES] for key in keys])
        self.last.append(
            RecordedPrompt(self.number, time.time(), realm.model_name, num_tokens, per_key, names)
        )
        self._num_bytes += len(names)
        while len(self.last) > 1 and (
            len(self.last) > self._kept_max or self._num_bytes > KEYS_MAX * NAME_BYTES
        ):
            self._num_bytes -= len(self.last.popleft().names)

    def after(self, number: int) -> tuple[list[RecordedPrompt], bool]:
        """The first prompts after this one, and whether there are more."""
        found: list[RecordedPrompt] = []
        num_bytes = 0
        for one in self.last:
            if one.number > number:
                if num_bytes >= ANSWER_KEYS_MAX * NAME_BYTES:
                    return found, True
                found.append(one)
                num_bytes += len(one.names)
        return found, False
