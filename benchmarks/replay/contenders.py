"""What is compared: kvlake's policies, others from publications, and what no policy can exceed."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from benchmarks.replay.clairvoyant import ClairvoyantCache
from benchmarks.replay.in_sidecar import SidecarCache
from benchmarks.replay.references import REFERENCES
from benchmarks.replay.replay import Hits, PolicyCache, RecordedPolicy, bounds, replay, seconds_of
from tiers.policy import POLICIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.replay.replay import PromptCache
    from benchmarks.replay.traces import PromptTrace

CLAIRVOYANT: Final = "clairvoyant"
NAMES: Final = (*POLICIES, *REFERENCES, CLAIRVOYANT)

Ratios = dict[str, float]
"""Part of a trace -> hit ratio, 0 to 1."""


def policy_ratios(
    name: str, trace: PromptTrace, capacity: int, parts: Sequence[str]
) -> tuple[Ratios, RecordedPolicy]:
    """Hit ratios of one of kvlake's policies, and the policy with the calls that it got."""
    recorded = RecordedPolicy(POLICIES[name]())
    return _ratios(PolicyCache(recorded, capacity), trace, parts), recorded


def microseconds_of(name: str, recorded: RecordedPolicy) -> float:
    """Microseconds that the recorded calls take a new policy, for each requested chunk."""
    requested = sum(len(arguments[0]) for call, arguments in recorded.calls if call == "use")
    return seconds_of(recorded.calls, POLICIES[name]) * 1e6 / max(1, requested)


def reference_ratios(name: str, trace: PromptTrace, capacity: int, parts: Sequence[str]) -> Ratios:
    """Hit ratios of a policy from a publication, or of the clairvoyant one."""
    if name != CLAIRVOYANT:
        return _ratios(REFERENCES[name](capacity), trace, parts)
    found: Ratios = {}
    for part in parts:
        # It knows nothing of what comes after the part.
        _, end = bounds(part, len(trace.requests))
        found |= _ratios(ClairvoyantCache(trace.requests[:end], capacity), trace, [part])
    return found


def sidecar_ratios(
    name: str, trace: PromptTrace, capacity: int, parts: Sequence[str], *, with_store: bool
) -> tuple[Ratios, Ratios, float]:
    """What host memory serves with one of kvlake's policies, and what is read from the store.

    Also the 99th percentile of the milliseconds that the core takes to decide on a message.
    """
    cache = SidecarCache(POLICIES[name](), capacity, with_store=with_store)
    hits = _ratios(cache, trace, parts)
    reads = Hits(cache.reads, [len(request.keys) for request in trace.requests])
    decision_ms = statistics.quantiles(cache.decision_ms, n=100)[-1]
    return (
        hits,
        {part: reads.ratio(*bounds(part, len(trace.requests))) for part in parts},
        decision_ms,
    )


def _ratios(cache: PromptCache, trace: PromptTrace, parts: Sequence[str]) -> Ratios:
    """Serve the requests up to the end of the last part, and count those of each part."""
    places = {part: bounds(part, len(trace.requests)) for part in parts}
    last = max(end for _, end in places.values())
    hits = replay(cache, trace.requests[:last])
    return {part: hits.ratio(begin, end) for part, (begin, end) in places.items()}
