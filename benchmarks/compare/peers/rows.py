"""One row of the result: the figures of an arm in a scenario."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.compare.peers.client import Answer
    from benchmarks.compare.peers.metrics import Counts


@dataclass
class Row:
    """Figures of one arm in one scenario; None is "not measured", and `note` may say why.

    Times in milliseconds, rates in generated tokens per second.
    """

    scenario: str
    arm: str
    requests: int = 0
    failures: int = 0
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    tpot_p99: float | None = None
    rate: float | None = None
    computed: int | None = None
    own: int | None = None
    loaded: int | None = None
    store: int | None = None
    cache_seconds: float | None = None
    engine_seconds: float | None = None
    bytes_moved: int | None = None
    differ: int | None = None
    """Answers that are not those of vLLM alone. It computed more of a prompt, in other steps, and
    sums in bfloat16 depend on the steps."""
    differ_equal_hit: int | None = None
    """Answers that are not those of vLLM alone with as many tokens in its own cache."""
    note: str = ""

    def count(self, counts: Counts, *, has_process: bool) -> Row:
        """Take in what the counters grew by; `has_process`: its cache has a process of its own."""
        self.computed, self.own = round(counts.computed), round(counts.own)
        self.loaded, self.store = round(counts.loaded), round(counts.store)
        self.engine_seconds = round(counts.engine_seconds, 2)
        if has_process:
            self.cache_seconds = round(counts.cache_seconds, 2)
        if counts.bytes_moved is not None:
            self.bytes_moved = round(counts.bytes_moved)
        return self

    def as_dict(self) -> dict[str, Any]:
        """For the report."""
        return asdict(self)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of all are not above; None if there are none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def milliseconds(seconds: float | None) -> float | None:
    """Rounded to a tenth."""
    return None if seconds is None else round(1000 * seconds, 1)


def row_of(scenario: str, arm: str, answers: Sequence[Answer]) -> Row:
    """The figures of requests one by one."""
    good = [answer for answer in answers if not answer.failure]
    failed = [answer for answer in answers if answer.failure]
    busy = sum(answer.total for answer in good)
    return Row(
        scenario,
        arm,
        requests=len(answers),
        failures=len(failed),
        ttft_p50=milliseconds(percentile([answer.ttft for answer in good], 0.5)),
        ttft_p99=milliseconds(percentile([answer.ttft for answer in good], 0.99)),
        tpot_p99=milliseconds(
            percentile([answer.tpot for answer in good if answer.tpot is not None], 0.99)
        ),
        rate=round(sum(answer.tokens for answer in good) / busy, 1) if busy else None,
        note=failed[0].failure[:120] if failed else "",
    )


def differing(texts: Sequence[str], reference: Sequence[str]) -> int:
    """How many answers are not those of the reference, request by request."""
    return sum(one != other for one, other in zip(texts, reference, strict=False))
