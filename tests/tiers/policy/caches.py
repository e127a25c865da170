"""A cache that evicts and refuses what a policy says, the recorded requests, and two references."""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final

import pytest

from tests import places
from tiers.policy.key import CacheKey, Left

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tiers.policy import Policy

TRACES: Final = places.ROOT.parent / "shared" / "traces"
BLOCK_TOKENS: Final = 512


def key(*parts: object) -> CacheKey:
    """A key that looks as chance made it, so that one of eight is sampled."""
    return 1, hashlib.sha256(repr(parts).encode()).digest()


def sampled_key(*parts: object, sampled: bool = True) -> CacheKey:
    """A key that is in every sample, or in none."""
    realm, name = key(*parts)
    return realm, bytes([0 if sampled else 255]) + name[1:]


def chain(*parts: object, length: int) -> list[CacheKey]:
    """The keys of a chain, head first."""
    return [key(*parts, number) for number in range(length)]


def use(policy: Policy, keys: Sequence[CacheKey]) -> None:
    """Note a request."""
    policy.use(keys, BLOCK_TOKENS * len(keys))


def store(policy: Policy, keys: Sequence[CacheKey]) -> None:
    """A request whose chunks are all added."""
    use(policy, keys)
    for number, one in enumerate(keys):
        policy.add(one, keys[number - 1] if number else None)


def remembered(policy: Policy) -> int:
    """Keys that are not cached and whose kind is known."""
    state = vars(policy)
    return len(state["_young"]) + len(state["_old"])


class Cache:
    """The keys that a policy lets in, and pinned ones beside. `capacity` may be changed."""

    def __init__(self, policy: Policy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.held: set[CacheKey] = set()
        self.pinned: set[CacheKey] = set()
        self.refused: list[CacheKey] = []

    def request(self, keys: Sequence[CacheKey]) -> int:
        """Use the chunks of a prompt and store those that are missing; returns how many hit."""
        there = self.held | self.pinned if self.pinned else self.held
        hits = next((n for n, one in enumerate(keys) if one not in there), len(keys))
        self.policy.use(keys, BLOCK_TOKENS * len(keys))
        self.store(keys)
        return hits

    def store(self, keys: Sequence[CacheKey]) -> None:
        """Add the chunks of a chain that are missing, where the policy admits them."""
        for number, one in enumerate(keys):
            if one in self.held or one in self.pinned:
                continue
            parent = keys[number - 1] if number else None
            if len(self.held) >= self.capacity:
                if not self.policy.admits(one, parent):
                    self.refused.append(one)
                    continue
                self.evict()
            self.add(one, parent)

    def add(self, one: CacheKey, parent: CacheKey | None) -> None:
        self.policy.add(one, parent)
        self.held.add(one)

    def pin(self, one: CacheKey) -> None:
        """Take a key out of the policy, and out of the capacity."""
        self.policy.remove(one, Left.PINNED)
        self.held.remove(one)
        self.pinned.add(one)

    def evict(self) -> CacheKey:
        victim = next(self.policy.victims())
        self.policy.remove(victim)
        self.held.remove(victim)
        return victim


def hit_ratio(policy: Policy, capacity: int, requests: Iterable[Sequence[CacheKey]]) -> float:
    """The part of the chunks of all prompts that a cache of this size has."""
    cache = Cache(policy, capacity)
    hits = total = 0
    for keys in requests:
        hits += cache.request(keys)
        total += len(keys)
    return hits / total


def lru_hit_ratio(capacity: int, requests: Iterable[Sequence[CacheKey]]) -> float:
    """The same of an LRU that knows no chains: a request uses its chunks from tail to head."""
    held = OrderedDict[CacheKey, None]()
    hits = total = 0
    for keys in requests:
        hits += next((n for n, one in enumerate(keys) if one not in held), len(keys))
        total += len(keys)
        for one in reversed(keys):
            held[one] = None
            held.move_to_end(one)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits / total


def fifo_hit_ratio(capacity: int, requests: Iterable[Sequence[CacheKey]]) -> float:
    """The same of a queue, to which a request adds what is missing from head to tail."""
    held: set[CacheKey] = set()
    queue = deque[CacheKey]()
    hits = total = 0
    for keys in requests:
        hits += next((n for n, one in enumerate(keys) if one not in held), len(keys))
        total += len(keys)
        for one in keys:
            if one in held:
                continue
            if len(queue) == capacity:
                held.remove(queue.popleft())
            queue.append(one)
            held.add(one)
    return hits / total


@functools.cache
def recorded(name: str) -> list[list[CacheKey]]:
    """The prompts of a trace, as keys of blocks; skips the test where there is none."""
    path = TRACES / f"mooncake_{name}_trace.jsonl"
    if not path.exists():
        pytest.skip("there is no trace")
    keys: dict[int, CacheKey] = {}
    prompts: list[list[CacheKey]] = []
    for line in path.read_text().splitlines():
        prompt: list[int] = json.loads(line)["hash_ids"]
        for one in prompt:
            if one not in keys:
                keys[one] = key(one)
        prompts.append([keys[one] for one in prompt])
    return prompts


def documents(
    count: int, *, seed: int, documents: int = 40, length: int = 4
) -> Iterator[list[CacheKey]]:
    """Prompts, of which one in four is of a document that comes again, and the others are not."""
    chooser = random.Random(seed)
    for number in range(count):
        if chooser.random() < 0.25:
            yield chain("document", chooser.randrange(documents), length=length)
        else:
            yield chain("once", seed, number, length=length)
