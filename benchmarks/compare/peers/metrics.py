"""What the arms say of themselves: counters of vLLM and of kvlake, in the format of Prometheus."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.compare.peers.client import get

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.compare.peers.arms import Arm

SAMPLE: Final = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
OWN_KINDS: Final = ("stored", "loaded", "written", "read")
TIER_KINDS: Final = ("read", "write")

Samples = dict[str, list[tuple[dict[str, str], float]]]
"""Name of a metric to labels and values."""


def parse(text: str) -> Samples:
    """The samples of a page. Lines that are none are skipped."""
    samples: Samples = {}
    for line in text.splitlines():
        if found := SAMPLE.match(line):
            name, labels, value = found.groups()
            samples.setdefault(name, []).append((dict(LABEL.findall(labels or "")), float(value)))
    return samples


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum of a metric over all labels that are not given; 0 if it has no samples."""
    return sum(
        value
        for found, value in samples.get(name, [])
        if all(found.get(label) == one for label, one in labels.items())
    )


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of one arm at one moment."""

    computed: float = 0.0
    own: float = 0.0
    loaded: float = 0.0
    """Prompt tokens that a connector loaded, from wherever."""
    store: float = 0.0
    """How many of them vLLM counts as read from a disk or a bucket."""
    engine_bytes: float | None = None
    """Bytes that its cache moved in the engine's process; None where the arm does not say."""
    cache_bytes: float | None = None
    """The same of the cache's process, which may be restarted."""
    cache_seconds: float = 0.0
    engine_seconds: float = 0.0

    def since(self, before: Counts) -> Counts:
        """The difference. A process that was restarted in between counts from its start."""
        return Counts(
            difference(self.computed, before.computed),
            difference(self.own, before.own),
            difference(self.loaded, before.loaded),
            difference(self.store, before.store),
            self.engine_bytes and difference(self.engine_bytes, before.engine_bytes or 0.0),
            self.cache_bytes and difference(self.cache_bytes, before.cache_bytes or 0.0),
            difference(self.cache_seconds, before.cache_seconds),
            difference(self.engine_seconds, before.engine_seconds),
        )

    @property
    def bytes_moved(self) -> float | None:
        """Bytes that the cache moved, in whatever process; None where the arm does not say."""
        known = [one for one in (self.engine_bytes, self.cache_bytes) if one is not None]
        return sum(known) if known else None


def difference(now: float, before: float) -> float:
    """How much a counter grew; one that shrank began again at 0."""
    return now - before if now >= before else now


def counts_of(arm: Arm) -> Counts:
    """Counters of an arm whose turn it is."""
    engine = parse(get(f"{arm.url}/metrics"))
    cache = {}
    if arm.cache is not None and arm.cache.metrics_url and arm.cache.server.alive:
        cache = parse(get(arm.cache.metrics_url))
    seconds = arm.cache.server.cpu_seconds() if arm.cache is not None else 0.0
    return counts_from(engine, cache, seconds, arm.engine.cpu_seconds())


def counts_from(
    engine: Samples, cache: Mapping[str, list[tuple[dict[str, str], float]]], *seconds: float
) -> Counts:
    """Counters from both pages, and the processor seconds of cache and engine."""
    by_source = "vllm:prompt_tokens_by_source_total"
    from_tier = "vllm:prompt_tokens_cached_by_source_total"
    own = [f"kvlake_bytes_{kind}_total" for kind in OWN_KINDS]
    tiers = [f"vllm:kv_offload_tiering_{kind}_bytes_total" for kind in TIER_KINDS]
    offloads = "vllm:kv_offload_total_bytes_total" in engine
    tiers.append("vllm:kv_offload_total_bytes_total")
    return Counts(
        total(engine, by_source, source="local_compute"),
        total(engine, by_source, source="local_cache_hit"),
        total(engine, by_source, source="external_kv_transfer"),
        total(engine, from_tier, source="disk"),
        sum(total(engine, name) for name in tiers) if offloads else None,
        sum(total(dict(cache), name) for name in own) if cache else None,
        *seconds,
    )
