"""By density: the chunk goes first whose next use is least likely for the memory and time it takes.

How likely that is, is learned from earlier uses, by two things that are known of each chunk: how
many requests have used it before (none, one, more), and how many tokens of the last of them were
new. The first says nearly everything: what a second request used is part of a conversation or of
a shared beginning. For each such kind and each age the policy knows which part was used again and
when. Its worth is the highest ratio of uses to the time of waiting for them, over all times after
which to give up (the Gittins index). A chunk of one minute may be worth more than a fresh one:
people read an answer before they go on.

Ages are counted in uses of chunks, not in seconds: the policy needs no clock, and learns nothing
from a pause.

Invariants:

* The victim is the one of least worth among the keys without cached children: of a chain, the tail
  goes first, so that what stays is a prefix.
* Each of those keys but the newest has a place in the queue of its kind. Places of keys that
  changed since are dropped when they are met.
* A pinned key keeps its kind. One that is evicted or refused is remembered, with its kind, until
  enough others came after it: between half and all of `REMEMBERED_MIN` and `REMEMBERED_SPAN` more
  for each key that is cached, up to `REMEMBERED_MAX`.
* Worth is learned from `LEARNED_MIN` uses on. Until then, and while an LRU of the sample has more
  hits than this policy, the order is LRU.
"""

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from tiers.policy.chains import REMOVED, Entry, Naming, Queue, stands
from tiers.policy.key import CacheKey, Left
from tiers.policy.reuse import (
    AGE_ENDS,
    KIND_BITS,
    KIND_MASK,
    KINDS,
    USES,
    ReuseSample,
    age_of,
    without_gaps,
)

NEW_TOKENS: Final = (1_000, 3_000, 8_000, 24_000)
"""Where the kinds by new tokens of a request begin, except the first."""
REFUSED: Final = KINDS
"""The queue that goes before all others."""
LEARNED_MIN: Final = 4_096
REMEMBERED_SPAN: Final = 4
"""Keys that are remembered beyond `REMEMBERED_MIN`, for each key that is cached."""
REMEMBERED_MIN: Final = 8_192
REMEMBERED_MAX: Final = 400_000
ADMITS_RATIO: Final = 1.25
"""A new chunk is refused if the first victim is worth more than this many times as much."""
TRIED_EVERY: Final = 32
"""One request of this many is admitted in any case, to learn of its kind."""
NAME_MASK: Final = (1 << 30) - 1
"""The part of a key's hash that names it: larger numbers take 8 bytes more."""
PINNED_MAX: Final = 65_536
QUEUE_MIN: Final = 1_024
CHOSEN_FOR: Final = 12
"""Victims at most that come from one queue before their worth is compared again."""

_TRIED: Final = 1 << KIND_BITS
_WAS_REFUSED: Final = _TRIED << 1
_IN_NO_PROMPT: Final = _WAS_REFUSED << 1
"""No request had it in its prompt: it is of an answer, or of windows before the prompt's end."""
_FLAG_BITS: Final = KIND_BITS + 3
# A member of an enumeration takes three times as long to find.
_PINNED: Final = Left.PINNED
_GONE: Final = Left.GONE
_Worth: TypeAlias = tuple[int, int, float]
_UNKNOWN: Final[_Worth] = (0, 0, 0.0)
_USED_AGAIN: Final = [min(kind % USES + 1, USES - 1) for kind in range(KINDS)] + [1]
"""By kind, how a chunk counts after one more use."""


class DensityPolicy:
    """Evicts what is least likely to be used soon, by the kind of its uses."""

    by_last_use: bool = False

    def __init__(self) -> None:
        self._entries: dict[CacheKey, Entry] = {}
        self._queues: list[Queue] = [[] for _ in range(KINDS + 1)]
        """Heaps of the entries without children, and of some that changed since."""
        self._orphans: dict[CacheKey, int] = {}
        """Cached children of a key that is not cached."""
        self._numbers = itertools.count()
        self._young: dict[int, int] = {}
        """Name of a key that is not cached to time of use, flags and kind."""
        self._old: dict[int, int] = {}
        self._young_max = REMEMBERED_MIN // 2
        self._pinned: dict[CacheKey, int] = {}
        """Kinds of keys that are pinned."""
        self._sample = ReuseSample()
        self._worth: list[list[float]] | None = None
        self._learned = 0
        self._now = 0
        self._removed_words = list(range(KINDS))
        """By kind, what is remembered of a key that is removed now: one number, to save memory."""
        self._requests = 0
        self._namings: list[Naming] = []
        self._newest: Entry | None = None
        """Added last, if it is in no queue yet: its child may follow."""
        self._victim: Entry | None = None
        """The first one, until something changes."""
        self._ranks: list[list[float]] | None = None
        """Worth by kind and age; None: the order is LRU."""
        self._latest: list[_Worth] = [_UNKNOWN] * KINDS
        """By kind, the age that was last asked for: its first and last use, and its worth."""
        self._admitted: CacheKey | None = None
        """The last key that was admitted, until a request or a refusal."""
        self._chosen = REFUSED
        """The queue of the next victims."""
        self._chosen_left = 0
        """Victims until it is chosen again."""

    def __len__(self) -> int:
        return len(self._entries)

    # --- uses ----------------------------------------------------------------------------------

    def use(self, keys: Sequence[CacheKey], num_tokens: int) -> None:
        """Note the prompt of one request, head first, with the tokens of these chunks."""
        if not keys:
            return
        entries, sample, now = self._entries, self._sample, self._now
        young, old, pinned, mask = self._young, self._old, self._pinned, sample.mask
        cached = [entries.get(key) for key in keys]
        for naming in self._namings:
            naming.over.update(entry for entry in cached if entry is not None)
        left = [key for key, entry in zip(keys, cached, strict=True) if entry is None]
        names = [hash(key) & NAME_MASK for key in left]
        words = [young.get(name, -1) for name in names]
        if pinned:
            words = [pinned.get(key, word) for key, word in zip(left, words, strict=True)]
        if old:
            words = [
                old.pop(name, -1) if word < 0 else word
                for name, word in zip(names, words, strict=True)
            ]
        new_tokens = num_tokens * words.count(-1) // len(keys)
        base = USES * bisect_right(NEW_TOKENS, new_tokens)
        self._requests += 1
        flags = now << _FLAG_BITS | _TRIED * (self._requests % TRIED_EVERY == 0)
        words_of = [flags | kind for kind in range(base, base + USES)]
        self._place_newest()
        # The head is used last, so that the tail is older.
        for key, entry in zip(reversed(keys), reversed(cached), strict=True):
            now += 1
            held = entry is not None
            if entry is None:
                word = words.pop()
                kind = base if word < 0 else base + _USED_AGAIN[word & KIND_MASK]
                name = names.pop()
                if pinned and key in pinned:
                    held, pinned[key] = True, kind
                else:
                    young[name] = words_of[kind - base]
            else:
                kind = entry.kind = base + _USED_AGAIN[entry.kind]
                entry.last = now
                entry.in_prompt = True
                if not entry.children:
                    self._push(entry)
            if not key[1][0] & mask:
                sample.use(key, kind, now, cached=held)
        self._now = now
        self._removed_words = [now << _FLAG_BITS | kind for kind in range(KINDS)]
        capacity = len(entries)
        remembered_max = min(REMEMBERED_MIN + REMEMBERED_SPAN * capacity, REMEMBERED_MAX)
        self._young_max = remembered_max // 2
        if len(young) > self._young_max:
            self._forget()
        sample.trim(now, capacity)
        if now - self._learned >= max(LEARNED_MIN, capacity // 2):
            self._learned = now
            self._worth = sample.worth(now)
        ranks = None if sample.prefers_lru(now) else self._worth
        if ranks is not self._ranks:
            self._ranks = ranks
            self._latest = [_UNKNOWN] * KINDS
        self._chosen_left = 0
        self._victim = self._admitted = None

    def _forget(self) -> None:
        """Forget the older half of the remembered keys, as the other half is full."""
        self._old, self._young = without_gaps(self._young), {}

    # --- entries -------------------------------------------------------------------------------

    def add(
        self, key: CacheKey, parent: CacheKey | None, uses: int = 0, *, first: bool = False
    ) -> None:
        """Add a key; its kind is that of its last use. Raises `KeyError` if it is there already."""
        above = None if parent is None else self._entries.get(parent)
        if above is None and parent == key:
            parent = None
        entry = Entry(key, parent if above is None else above.key, above, 0, self._now)
        if self._entries.setdefault(key, entry) is not entry:
            raise KeyError(f"{key!r} was added twice")
        name = hash(key) & NAME_MASK
        word = self._young.pop(name, None)
        if word is None:
            word = self._old.pop(name, None)
        if self._pinned:
            word = self._pinned.pop(key, word)
        if word is None:
            # As new as the prompt before it.
            base = 0 if above is None or above.kind == REFUSED else above.kind // USES * USES
            word = base + min(uses, USES - 1) | _IN_NO_PROMPT
        entry.in_prompt = not word & _IN_NO_PROMPT
        kind = entry.kind = REFUSED if first or word & _WAS_REFUSED else word & KIND_MASK
        if self._orphans:
            entry.children = self._orphans.pop(key, 0)
        if above is not None:
            above.children += 1
        elif parent is not None:
            self._orphans[parent] = self._orphans.get(parent, 0) + 1
        if self._newest is not above:
            self._place_newest()
        self._newest = entry
        if kind == REFUSED:
            self._place_newest()
        for naming in self._namings:
            naming.over.add(entry)
        self._victim = None

    def remove(self, key: CacheKey, why: Left = Left.EVICTED) -> None:
        """Remove a key, and remember its kind. Raises `KeyError` if it is not there."""
        entry = self._entries.pop(key)
        if entry.children:
            self._orphans[key] = entry.children
        above = entry.parent
        if above is None or above.kind == REMOVED:
            above = self._parent_of(entry)
        if above is not None and entry.last > above.last:
            # A use of what follows is one of this, too.
            above.last = entry.last
        for naming in self._namings:
            naming.removed(entry, above, next(self._numbers))
        if above is not None:
            above.children -= 1
            if not above.children:
                self._push(above, entry)
        elif entry.parent_key is not None:
            self._orphans[entry.parent_key] -= 1
            if not self._orphans[entry.parent_key]:
                del self._orphans[entry.parent_key]
        refused = entry.kind == REFUSED
        kind = 0 if refused else entry.kind
        entry.kind, entry.parent = REMOVED, None
        self._chosen_left -= 1
        self._victim = None
        if entry is self._newest:
            self._newest = None
        if why is _PINNED:
            self._pinned[key] = kind
            if len(self._pinned) > PINNED_MAX:
                # It may have left the cache while it was pinned.
                del self._pinned[next(iter(self._pinned))]
        elif why is not _GONE:
            word = self._removed_words[kind] | _WAS_REFUSED * refused
            self._young[hash(key) & NAME_MASK] = word | _IN_NO_PROMPT * (not entry.in_prompt)
            if len(self._young) > self._young_max:
                self._forget()

    def _parent_of(self, entry: Entry) -> Entry | None:
        """The parent of an entry, if that is cached."""
        parent, name = entry.parent, entry.parent_key
        if name is None or (parent is not None and parent.kind != REMOVED):
            return parent
        return self._entries.get(name)

    def _place_newest(self) -> None:
        """Put the entry that was added last into its queue."""
        if self._newest is not None and not self._newest.children:
            self._push(self._newest)
        self._newest = None

    def _push(self, entry: Entry, instead: Entry | None = None) -> None:
        """Put an entry without children into its queue, maybe instead of one that was removed."""
        queue = self._queues[entry.kind]
        place = (entry.last, next(self._numbers), entry)
        if queue and queue[0][2] is instead:
            # Mostly its chain goes on; `heapreplace` would look for its place.
            if len(queue) > 2 and place < queue[1] and place < queue[2]:
                queue[0] = place
            else:
                heapq.heapreplace(queue, place)
            return
        heapq.heappush(queue, place)
        if len(queue) > 2 * len(self._entries) + QUEUE_MIN:
            queue[:] = [place for place in queue if stands(place, entry.kind)]
            heapq.heapify(queue)

    # --- victims -------------------------------------------------------------------------------

    def admits(self, key: CacheKey, parent: CacheKey | None) -> bool:
        """Whether a key is worth more than the first victim, and its parent was not refused."""
        name, young, old = hash(key) & NAME_MASK, self._young, self._old
        word = young.get(name)
        if word is None:
            word = old.get(name, _IN_NO_PROMPT)
        in_prompt = not word & _IN_NO_PROMPT
        if not in_prompt:
            word = self._now << _FLAG_BITS | word & (_WAS_REFUSED | _IN_NO_PROMPT)
        if not word & _WAS_REFUSED and (
            # Mostly the parent was asked for just before, and admitted.
            (parent is not None and parent == self._admitted)
            or not self._was_refused(parent, in_prompt=in_prompt)
        ):
            victim = self._victim or self._first()
            if victim is None or self._beats(victim, word):
                self._admitted = key
                return True
        self._admitted = None
        old.pop(name, None)
        young[name] = word | _WAS_REFUSED
        if len(young) > self._young_max:
            self._forget()
        return False

    def _was_refused(self, key: CacheKey | None, *, in_prompt: bool) -> bool:
        """Whether a parent was refused since it was used last.

        Of what is in a prompt, only a parent in a prompt counts: of windows, a hit needs the last
        alone, and no use would end the refusal of the others.
        """
        name = hash(key) & NAME_MASK
        word = self._young.get(name)
        if word is None:
            entry = None if key is None else self._entries.get(key)
            if entry is not None:
                return entry.kind == REFUSED and (entry.in_prompt or not in_prompt)
            word = self._old.get(name, 0)
        return bool(word & _WAS_REFUSED) and not (in_prompt and word & _IN_NO_PROMPT)

    def _beats(self, victim: Entry, word: int) -> bool:
        """Whether what is remembered of a key makes it worth more than the first victim."""
        last, kind, worth = victim.last, victim.kind, self._ranks
        if kind != REFUSED and last > word >> _FLAG_BITS:
            # The victim is of the same request, or of a later one.
            return False
        if kind == REFUSED or worth is None or word & _TRIED:
            return True
        uses = self._now + 1 - last
        begin, end, value = self._latest[kind]
        if not begin <= uses <= end:
            value = self._worth_of(kind, uses)
        return value <= ADMITS_RATIO * worth[word & KIND_MASK][0]

    def _worth_of(self, kind: int, uses: int) -> float:
        """What a key of a kind is worth, `uses` uses after its last one, counted from 1."""
        assert self._ranks is not None
        age = age_of(uses - 1)
        value = self._ranks[kind][age]
        self._latest[kind] = (AGE_ENDS[age - 1] + 1 if age else 0, AGE_ENDS[age], value)
        return value

    def victims(self) -> Iterator[CacheKey]:
        """Keys from the least worth on, children before their parents.

        Without keys that are added or used later, so that it ends.
        """
        if (first := self._victim or self._first()) is None:
            return
        yield first.key
        yield from self._others(first)

    def _others(self, first: Entry) -> Iterator[CacheKey]:
        """All victims but the first."""
        self._place_newest()
        naming = Naming(self._queues)
        self._namings.append(naming)
        try:
            entry: Entry | None = first
            while entry is not None:
                if entry.kind != REMOVED:
                    naming.leaves(entry, self._parent_of(entry), next(self._numbers))
                if entry is not first:
                    yield entry.key
                entry = self._next(naming)
            # Parents in a circle, which no chain of hashes has.
            for entry in list(self._entries.values()):
                if entry not in naming.over and entry.kind != REMOVED:
                    yield entry.key
        finally:
            self._namings.remove(naming)

    def _first(self) -> Entry | None:
        """The first victim. Which queue has it, is compared now and then."""
        if not self._entries:
            return None
        if self._chosen_left > 0 and not self._queues[REFUSED]:
            kind = self._chosen
            queue = self._queues[kind]
            while queue:
                # As `stands`, which would take twice the time.
                last, _, entry = queue[0]
                if entry.last == last and not entry.children and entry.kind == kind:
                    self._victim = entry
                    return entry
                heapq.heappop(queue)
        victim = self._oldest()
        if victim is None:
            # The newest has no place yet, or parents are in a circle, as no chain of hashes is.
            return self._newest or next(iter(self._entries.values()))
        self._victim, self._chosen = victim, victim.kind
        self._chosen_left = CHOSEN_FOR if self._ranks is not None else 0
        return victim

    def _oldest(self) -> Entry | None:
        """The one of least worth among the first of each queue."""
        now, worth, latest, found, least = self._now + 1, self._ranks, self._latest, None, 0.0
        for kind, queue in enumerate(self._queues):
            while queue:
                last, _, entry = queue[0]
                if entry.last == last and not entry.children and entry.kind == kind:
                    break
                heapq.heappop(queue)
            else:
                continue
            if kind == REFUSED:
                return entry
            if worth is None:
                value = float(last)
            else:
                begin, end, value = latest[kind]
                if not begin <= now - last <= end:
                    value = self._worth_of(kind, now - last)
            if found is None or value < least or (value == least and last < found.last):
                found, least = entry, value
        return found

    def _next(self, naming: Naming) -> Entry | None:
        """The same for an iteration that has named some."""
        now, worth, found, least = self._now, self._ranks, None, 0.0
        for kind, queue in enumerate(naming.queues):
            while queue and not stands(queue[0], kind, naming):
                heapq.heappop(queue)
            if not queue:
                continue
            last, _, entry = queue[0]
            if kind == REFUSED:
                return entry
            value = float(last) if worth is None else worth[kind][age_of(now - last)]
            if found is None or value < least or (value == least and last < found.last):
                found, least = entry, value
        return found
