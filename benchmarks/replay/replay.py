"""Replays: what a cache serves of each request, and what its policy's code costs.

A cache here is anything with `serve`. kvlake's own policies are replayed twice: by `PolicyCache`, a
set of keys and the policy, and by the real engine of the sidecar (`in_sidecar.py`).

Invariant of `PolicyCache`: its keys are those that the policy orders, at most `capacity`.
"""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tiers.policy.key import Left

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from benchmarks.replay.traces import PromptRequest
    from tiers.policy import Policy
    from tiers.policy.key import CacheKey

PARTS: Final = ("first", "second", "all")
"""Halves of a trace, by number of requests, and all of it."""
TIMED: Final = 3
"""How often the calls of a policy are timed."""


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


class RecordedPolicy:
    """Passes each call on to a policy, and records it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.by_last_use = policy.by_last_use
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        """Name of a method, and what it was called with."""

    def use(self, keys: Sequence[CacheKey], num_tokens: int) -> None:
        """As `Policy.use`."""
        self.calls.append(("use", (keys, num_tokens)))
        self._policy.use(keys, num_tokens)

    def add(
        self, key: CacheKey, parent: CacheKey | None, uses: int = 0, *, first: bool = False
    ) -> None:
        """As `Policy.add`; a replay adds no key as `first`."""
        self.calls.append(("add", (key, parent, uses)))
        self._policy.add(key, parent, uses, first=first)

    def remove(self, key: CacheKey, why: Left = Left.EVICTED) -> None:
        """As `Policy.remove`."""
        self.calls.append(("remove", (key, why)))
        self._policy.remove(key, why)

    def admits(self, key: CacheKey, parent: CacheKey | None) -> bool:
        """As `Policy.admits`."""
        self.calls.append(("admits", (key, parent)))
        return self._policy.admits(key, parent)

    def victims(self) -> Iterator[CacheKey]:
        """As `Policy.victims`, of which the caller takes the first."""
        self.calls.append(("victims", ()))
        return self._policy.victims()


def seconds_of(
    calls: Sequence[tuple[str, tuple[Any, ...]]], make_policy: Callable[[], Policy]
) -> float:
    """Processor time of these calls to a new policy, without the cache: the fastest of `TIMED`."""
    found: list[float] = []
    for _ in range(TIMED):
        policy = make_policy()
        methods: dict[str, Callable[..., Any]] = {
            name: getattr(policy, name) for name in ("use", "add", "remove", "admits")
        }
        methods["victims"] = partial(_first_victim, policy)
        bound = [(methods[name], arguments) for name, arguments in calls]
        # As the sidecar does once it is ready: what is there already is not examined again.
        gc.collect()
        gc.freeze()
        started = time.thread_time()
        for call, arguments in bound:
            call(*arguments)
        found.append(time.thread_time() - started)
        gc.unfreeze()
    return min(found)


def _first_victim(policy: Policy) -> CacheKey | None:
    return next(policy.victims(), None)


class PolicyCache:
    """A set of `capacity` keys, ordered by one of kvlake's policies.

    As in the sidecar, a request first takes room for all of its chunks that are missing, and these
    enter the order afterwards. There is no store: what is not admitted is not cached.
    """

    def __init__(self, policy: Policy, capacity: int) -> None:
        self._policy = policy
        self._capacity = capacity
        self._cached: set[CacheKey] = set()

    def serve(self, request: PromptRequest) -> int:
        """Serve and cache a prompt. Returns how many of its first chunks were cached before."""
        policy, cached = self._policy, self._cached
        hits = leading(request.keys, cached)
        policy.use(request.keys, request.num_tokens)
        parents: list[CacheKey | None] = [None, *request.keys]
        missing = [
            (key, parent)
            for key, parent in zip(request.keys, parents, strict=False)
            if key not in cached
        ]
        # As the sidecar has it: an LRU gives up nothing of the same prompt.
        kept = frozenset(request.keys if policy.by_last_use else ())
        free = max(0, self._capacity - len(cached))
        coming = missing[:free]
        coming += [one for one in missing[free:] if self._make_room(*one, kept)]
        for key, parent in coming:
            policy.add(key, parent)
            cached.add(key)
        return hits

    def _make_room(self, key: CacheKey, parent: CacheKey | None, kept: frozenset[CacheKey]) -> bool:
        """Evict the first victim for a key; False if it stays, the key is worth less, or none is.

        None of `kept` goes.
        """
        if not self._policy.admits(key, parent):
            return False
        victim = next(self._policy.victims(), None)
        if victim is None or victim in kept:
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
