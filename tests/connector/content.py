"""What the KV of each token is, what a query reads of it, and what the model says next."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec

Slot = bytes
Block = list[Slot]


def next_token(tokens: Sequence[int]) -> int:
    """What the model says next."""
    return (sum(tokens) + len(tokens)) % 50


def content_of(
    tokens: Iterable[int], salt: str, weights: int, rank: int, group: int = 0
) -> list[Slot]:
    """What KV of each token is: a function of all tokens up to it, who asks, and the layers."""
    hasher = hashlib.blake2b(f"{salt}/{weights}/{rank}/{group}".encode(), digest_size=8)
    slots: list[Slot] = []
    for token in tokens:
        hasher.update(token.to_bytes(4, "little"))
        slots.append(hasher.digest())
    return slots


def first_read(spec: Any, position: int) -> int:
    """The first token that the query at `position` reads."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, position - int(spec.sliding_window) + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        chunk = int(spec.attention_chunk_size)
        return position // chunk * chunk
    return 0
