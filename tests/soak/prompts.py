"""The load of a soak: prompts that share prefixes, as those of several tenants do.

Owns which prompt comes next. Invariant: a function of the seed alone; the popularity of prefixes
does not change over time, so that the end of a run can be compared with its start.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Final

from sidecar.demo.model import WORDS

TENANTS: Final = 4
ROOTS: Final = 6
BRANCHES: Final = 4
ROOT_TOKENS: Final = 512
BRANCH_TOKENS: Final = 384
SUFFIX_TOKENS: Final = (32, 256)
ZIPF_EXPONENT: Final = 1.0


@dataclass(frozen=True)
class Ask:
    """One request: a tenant's cache salt and its prompt."""

    salt: str
    prompt: list[int]


class Prompts:
    """An endless row of requests. Not for several threads at once."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._chooser = random.Random(seed)
        self._places = list(itertools.product(range(TENANTS), range(ROOTS), range(BRANCHES)))
        self._chooser.shuffle(self._places)
        self._heads: dict[tuple[int, ...], list[int]] = {}
        self._weights = [(rank + 1) ** -ZIPF_EXPONENT for rank in range(len(self._places))]

    def next(self) -> Ask:
        """The next request: a popular prefix, and an end that nobody asked before."""
        tenant, root, branch = self._chooser.choices(self._places, self._weights)[0]
        root_words = self._words(ROOT_TOKENS, tenant, root)
        branch_words = self._words(BRANCH_TOKENS, tenant, root, branch)
        length = self._chooser.randint(*SUFFIX_TOKENS)
        suffix = [self._chooser.randrange(WORDS) for _ in range(length)]
        return Ask(f"tenant-{tenant}", [*root_words, *branch_words, *suffix])

    def _words(self, count: int, *place: int) -> list[int]:
        if place not in self._heads:
            chooser = random.Random(f"{self._seed}-{place}")
            self._heads[place] = [chooser.randrange(WORDS) for _ in range(count)]
        return self._heads[place]
