"""Memory of a policy, in bytes for each chunk that is cached.

What Python allocated for the policy while a synthetic stream of prompts passes, in a run of its
own, because tracing allocations slows down everything that is timed. As in the sidecar, each
message has keys of its own: those that a policy keeps count, also of chunks that are not cached.
The key with which a chunk is added is the directory's, and does not count.

The stream has conversations: three of four requests continue one of the last 64, the others begin
one behind one of 16 shared beginnings. It is long enough to fill what a policy remembers.
"""

from __future__ import annotations

import gc
import hashlib
import random
import tracemalloc
from typing import TYPE_CHECKING, Final

from benchmarks.replay.traces import REALM_ID

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiers.policy import Policy
    from tiers.policy.key import CacheKey

DIFFERENT_SPAN: Final = 6
DIFFERENT_MIN: Final = 60_000
"""Different chunks of the stream: this many times the capacity, and at least so much."""
NUMBER_BYTES: Final = 8
CONVERSATIONS: Final = 64
BEGINNINGS: Final = 16
BEGINNING_CHUNKS: Final = 8
TURN_CHUNKS_MAX: Final = 16
"""New chunks of one request."""
CHUNKS_MAX: Final = 256
"""Chunks of a conversation before it ends."""
CHUNK_TOKENS: Final = 512


class _Stream:
    """Numbers of chunks, and their keys: a hash that ends with the number."""

    def __init__(self, different: int) -> None:
        self.keys = [
            hashlib.sha256(number.to_bytes(NUMBER_BYTES, "big")).digest()[:-NUMBER_BYTES]
            + number.to_bytes(NUMBER_BYTES, "big")
            for number in range(different)
        ]
        generator = random.Random(1)
        self.requests: list[list[int]] = []
        shared = [
            list(range(one * BEGINNING_CHUNKS, (one + 1) * BEGINNING_CHUNKS))
            for one in range(BEGINNINGS)
        ]
        used = BEGINNINGS * BEGINNING_CHUNKS
        conversations: list[list[int]] = []
        while used + TURN_CHUNKS_MAX <= different:
            if len(conversations) < CONVERSATIONS or generator.random() < 1 / 4:
                chunks = list(generator.choice(shared))
                conversations.append(chunks)
                del conversations[:-CONVERSATIONS]
            else:
                place = generator.randrange(CONVERSATIONS)
                chunks = conversations[place]
                if len(chunks) > CHUNKS_MAX:
                    chunks = conversations[place] = list(generator.choice(shared))
            new = generator.randint(1, TURN_CHUNKS_MAX)
            chunks.extend(range(used, used + new))
            used += new
            self.requests.append(chunks.copy())


def bytes_per_chunk(make_policy: Callable[[], Policy], capacity: int) -> float:
    """Bytes that a policy has allocated for each of `capacity` chunks, once all are cached."""
    stream = _Stream(max(DIFFERENT_MIN, DIFFERENT_SPAN * capacity))
    cached = bytearray(len(stream.keys))
    gc.collect()
    tracemalloc.start()
    try:
        policy = make_policy()
        for numbers in stream.requests:
            _serve(policy, stream.keys, numbers, cached, capacity)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / cached.count(1)
    finally:
        tracemalloc.stop()


def _serve(
    policy: Policy, keys: list[bytes], numbers: list[int], cached: bytearray, capacity: int
) -> None:
    """Cache the chunks of a request, of which `cached` has a flag for each number."""
    names = tuple((REALM_ID, bytes(bytearray(keys[number]))) for number in numbers)
    policy.use(names, CHUNK_TOKENS * len(numbers))
    free = capacity - cached.count(1)
    parent: CacheKey | None = None
    for number in numbers:
        key: CacheKey = (REALM_ID, keys[number])
        if not cached[number]:
            fits = free > 0
            free -= fits
            if fits or _evict_for(policy, key, parent, cached):
                policy.add(key, parent)
                cached[number] = 1
        parent = key


def _evict_for(policy: Policy, key: CacheKey, parent: CacheKey | None, cached: bytearray) -> bool:
    if not policy.admits(key, parent):
        return False
    victim = next(policy.victims(), None)
    if victim is None:
        return False
    policy.remove(victim)
    cached[int.from_bytes(victim[1][-NUMBER_BYTES:], "big")] = 0
    return True
