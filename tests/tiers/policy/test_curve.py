"""The hit ratio of other sizes, against that of LRU itself."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter, OrderedDict
from collections.abc import Sequence

import pytest

from tests import places
from tiers.policy.curve import HitCurve

TRACES = places.ROOT.parent / "shared" / "traces"
BLOCK_TOKENS = 512
SIZES = (0.5, 1.0, 2.0, 4.0)
KEYS_MAX = 8192


def key(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def measured(requests: Sequence[Sequence[bytes]], size: int) -> float:
    """The hit ratio of an LRU of chains: a request finds the head that is there, all of it."""
    held = OrderedDict[bytes, None]()
    hits = total = 0
    for keys in requests:
        hits += next((n for n, one in enumerate(keys) if one not in held), len(keys))
        total += len(keys)
        for one in reversed(keys):
            held.pop(one, None)
            held[one] = None
        while len(held) > size:
            held.popitem(last=False)
    return hits / total


def estimated(requests: Sequence[Sequence[bytes]], capacity: int) -> list[float]:
    curve, uses = HitCurve(capacity, KEYS_MAX, half_life=1 << 40), Counter[bytes]()
    for keys in requests:
        curve.use(keys, [uses[one] for one in keys])
        uses.update(keys)
    found = curve.ratios([size * capacity for size in SIZES])
    assert found is not None
    return found


def documents(seed: int, *, requests: int) -> list[list[bytes]]:
    """Questions about documents, some of which are asked about far more often than others."""
    chooser = random.Random(seed)
    names = range(300)
    weights = [1 / (1 + number) for number in names]
    lengths = [chooser.randrange(2, 20) for _ in names]
    return [
        [key("system")]
        + [key(name, n) for n in range(lengths[name])]
        + [key("question", seed, number)]
        for number, name in enumerate(chooser.choices(names, weights, k=requests))
    ]


@pytest.mark.parametrize("seed", range(3))
def test_documents(seed: int) -> None:
    requests = documents(seed, requests=4000)
    for capacity in (200, 800):
        expected = [measured(requests, int(size * capacity)) for size in SIZES]
        assert estimated(requests, capacity) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
@pytest.mark.parametrize("tokens", [1_000_000, 10_000_000])
def test_recorded_requests(name: str, tokens: int) -> None:
    path = TRACES / f"mooncake_{name}_trace.jsonl"
    if not path.exists():
        pytest.skip("there is no trace")
    requests = [
        [key(one) for one in json.loads(line)["hash_ids"]] for line in path.read_text().splitlines()
    ]
    capacity = tokens // BLOCK_TOKENS
    expected = [measured(requests, int(size * capacity)) for size in SIZES]
    assert estimated(requests, capacity) == pytest.approx(expected, abs=0.025)


def test_nothing_is_known_at_first() -> None:
    assert HitCurve(100, KEYS_MAX).ratios([100]) is None


def test_prompts_that_never_repeat() -> None:
    curve = HitCurve(100, KEYS_MAX)
    for number in range(1000):
        curve.use([key(number)], [0])
    assert curve.ratios([50, 1000]) == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize("uses", [0, 9])
def test_a_use_that_names_a_key_twice(uses: int) -> None:
    """No connector sends one, and any client could."""
    curve = HitCurve(4, KEYS_MAX)
    curve.use([key(1), key(2), key(1), key(1)], [uses] * 4)
    found = curve.ratios([1.0, 100.0])
    assert found is not None
    assert all(0 <= ratio <= 1 for ratio in found)


def test_what_it_remembers_is_bounded() -> None:
    curve = HitCurve(10, 500)
    for number in range(1500):
        curve.use([key("hot", number), key("other", number)], [9, 0])
    assert len(list(curve)) == 1000


def test_a_large_cache_is_sampled() -> None:
    curve = HitCurve(10 * KEYS_MAX, KEYS_MAX)
    keys = [key(number) for number in range(8000)]
    curve.use(keys, [0] * len(keys))
    assert len(list(curve)) == pytest.approx(8000 / 40, rel=0.3)


def test_it_forgets() -> None:
    """After a change of the traffic, what was before counts less and less."""
    curve = HitCurve(100, KEYS_MAX)
    for _ in range(3000):
        curve.use([key(number) for number in range(40)], [0] * 40)
    before = curve.ratios([100])
    for number in range(300_000):
        curve.use([key("new", number)], [0])
    after = curve.ratios([100])
    assert before is not None
    assert after is not None
    assert before[0] > 0.95
    assert after[0] < 0.1
