"""Replays: what a cache serves of each request, and what its policy's code costs.

A cache here is anything with `serve`. kvlake's own policies are replayed twice: by `PolicyCache`, a
set of keys and the policy, and by the real engine of the sidecar (`in_sidecar.py`).

Invariant of `PolicyCache`: its keys are those that the policy orders, at most `capacity`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from benchmarks.replay.traces import PromptRequest
    from tiers.policy import Policy
    from tiers.policy.key import CacheKey

PARTS: Final = ("first", "second", "all")
"""Halves of a trace, by number of requests, and all of it."""


def leading(keys: Sequence[CacheKey], cached: Container[CacheKey]) -> int:
    """How many of the first keys are cached."""
    return next((number for number, key in enumerate(keys) if key not in cached), len(keys))


def bounds(part: str, num_requests: int) -> tuple[int, int]:
    """Where a part of a trace begins and ends, in requests."""
    half = num_requests // 2
    return (half if part == "second" else 0, half if part == "first" else num_requests)


class PromptCache(Protocol):
    """What can be replayed."""

    def serve(self, request: PromptRequest) -> int:
        """Serve and cache a prompt. Returns how many of its first chunks were cached before."""
        ...


class PolicyCache:
    """A set of `capacity` keys, ordered by one of kvlake's policies.

    As in the sidecar, a request first takes room for all of its chunks that are missing, and these
    enter the order afterwards. There is no store: what is not admitted is not cached.
    """

    def __init__(self, policy: Policy, capacity: int) -> None:
        self._policy = policy
        self._capacity = capacity
        self._cached: set[CacheKey] = set()
        self.seconds = 0.0
        """Processor time of the policy, and of the set."""
        self.requested = 0
        """Chunks."""

    def serve(self, request: PromptRequest) -> int:
        """Serve and cache a prompt. Returns how many of its first chunks were cached before."""
        cached = self._cached
        hits = leading(request.keys, cached)
        self.requested += len(request.keys)
        started = time.thread_time()
        self._update(request)
        self.seconds += time.thread_time() - started
        return hits

    def _update(self, request: PromptRequest) -> None:
        policy, cached = self._policy, self._cached
        policy.use(request.keys, request.num_tokens)
        parents: list[CacheKey | None] = [None, *request.keys]
        missing = [
            (key, parent)
            for key, parent in zip(request.keys, parents, strict=False)
            if key not in cached
        ]
        free = max(0, self._capacity - len(cached))
        coming = missing[:free]
        coming += [(key, parent) for key, parent in missing[free:] if self._make_room(key, parent)]
        for key, parent in coming:
            policy.add(key, parent)
            cached.add(key)

    def _make_room(self, key: CacheKey, parent: CacheKey | None) -> bool:
        """Evict the first victim for a key; False if the key is worth less, or none is left."""
        if not self._policy.admits(key, parent):
            return False
        victim = next(self._policy.victims(), None)
        if victim is None:
            return False
        self._policy.remove(victim)
        self._cached.remove(victim)
        return True


class Hits(NamedTuple):
    """Cached chunks of each request, and its chunks."""

    hits: list[int]
    keys: list[int]

    def ratio(self, begin: int, end: int) -> float:
        """Part of the chunks that were cached, in requests `begin` to `end`."""
        return sum(self.hits[begin:end]) / max(1, sum(self.keys[begin:end]))


def replay(cache: PromptCache, requests: Sequence[PromptRequest]) -> Hits:
    """Serve all requests in order."""
    hits = [cache.serve(request) for request in requests]
    return Hits(hits, [len(request.keys) for request in requests])
