"""Whether the cache helps, in sentences: what every face of the figures says first.

Owns their words, and what each outcome of a token means. Does not own the figures (`history.py`,
`service/prompts.py`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from sidecar.protocol.prompts import LOADED, PromptOutcome
from tiers.sizes import approximate_size, format_duration

if TYPE_CHECKING:
    # Commands need the words, not the sidecar.
    from sidecar.config.sections import GpuSettings
    from sidecar.observe.history import Window
    from sidecar.service.prompts import Seconds

THRASHING: Final = 4
"""Host memory is too small if one token in this many was evicted too early, and hits are rare."""
RARE_HITS: Final = 0.01
"""Part of the tokens that host memory had, below which hits are rare."""
SENTENCES_OVER: Final = ("1min", "1h")
WINDOWS: Final = {"10s": (10.0, "10 seconds"), "1min": (60.0, "minute"), "1h": (3600.0, "hour")}
"""Seconds and words for each, shortest first."""
_COMPUTED: Final = "computed: "

MEANINGS: Final = {
    "local": "the engine's own prefix cache had them",
    "host": "loaded from host memory",
    "store": "loaded from the object store, through host memory",
    "other": "another connector loaded them",
    "new": "computed: no tier had them, and none is remembered to have had them",
    "evicted": "computed: they had left host memory to make room, or were not let in, or had left "
    "the object store; a larger host.size, or a store, keeps more",
    "expired": "computed: their ttl_seconds had ended",
    "quota": "computed: their tenant was at its limit, host_max",
    "too_short": "computed: they were there, but fewer than load_tokens_min in a row",
    "late": "computed: the store, or the engine that hands over, took longer than the request "
    "waits; limits.lookup_wait, or a faster store",
    "planner": "computed: faster than reading them from the store; store.recompute: never reads "
    "them in any case",
    "store_away": "computed: the store had them, but failed, or reading is paused; kvlake status "
    "has the reason",
    "being_written": "computed: the engine had just computed them, and was storing them",
    "refused": "computed: no sidecar, a request that cannot be cached, or a limit; kvlake status "
    "and the engine's log say which",
    "not_asked": "computed: the request or the engine does not read the cache, or not the store",
    "failed": "computed: their load failed; the sidecar's log has the reason",
    "tail": "computed: no chunk can hold them (the last token, and those behind the last block)",
}
"""By outcome (`protocol/prompts.py`): what it means, and what changes it."""


def meaning_of_loss(outcome: str) -> str:
    """Why a token was computed, and what changes it."""
    return MEANINGS.get(outcome, "?").removeprefix(_COMPUTED)


def sentences(
    windows: Mapping[str, "Window"], seconds: "Seconds", settings: "GpuSettings"
) -> list[str]:
    """Over the last minute, what was hit and lost, and why; then what it saved.

    Without prompts in it, over the last hour.
    """
    name = next((name for name in SENTENCES_OVER if windows[name].tokens), None)
    if name is None:
        return [f"no prompt in the last {_words('1h', windows['1h'])}"]
    tokens, share = windows[name].tokens, windows[name].hit_share
    total = tokens.total() - tokens[PromptOutcome.TAIL]
    if share is None:
        return [f"no prompt of the last {_words(name, windows[name])} was long enough to be cached"]
    over = f"of {total:,} cacheable prompt tokens in the last {_words(name, windows[name])}"
    sources = ", ".join(f"{one} {100 * tokens[one] / total:.0f}%" for one in LOADED)
    lines = [f"{100 * share:.0f}% {over} were not computed ({sources})"]
    lost = {one: n for one, n in tokens.items() if one not in (*LOADED, PromptOutcome.TAIL)}
    if lost:
        most = max(lost, key=lambda one: lost[one])
        share = 100 * lost[most] / total
        lines.append(f"{share:.0f}% were computed because of {most}: {meaning_of_loss(most)}")
    evicted, hits = windows[name].chunks_evicted, tokens[PromptOutcome.HOST] / total
    if evicted and hits < RARE_HITS and tokens[PromptOutcome.EVICTED] * THRASHING > total:
        lines.append(
            f"host hit rate {round(100 * hits, 1):g}%; {evicted:,} chunks evicted before reuse: "
            "host.size is too small"
        )
    return [*lines, _saved(seconds, settings)]


def _words(name: str, window: "Window") -> str:
    """How long a window is; a `cut` one is shorter than its name says."""
    return format_duration(round(window.seconds)) if window.cut else WINDOWS[name][1]


def what_if(ratios: Mapping[str, float], size_bytes: int) -> str:
    """What host memory of another size would bring; empty if it is not known yet."""
    if not ratios:
        return ""
    found = [
        f"{100 * ratio:.0f}% in {approximate_size(size_bytes * float(factor[:-1]))}"
        for factor, ratio in ratios.items()
    ]
    return f"chunks of prompts that an LRU would find: {', '.join(found)} of host memory"


def _saved(seconds: "Seconds", settings: "GpuSettings") -> str:
    """In seconds of all ranks: the sum over requests alone may have another sign."""
    net, hours = abs(seconds.gpu), abs(seconds.gpu) / 3600
    worth = f", {hours * settings.hour_price:,.2f} {settings.currency}"
    gpu_hours = f"{hours:,.2f} GPU-hours{worth if settings.hour_price else ''}"
    if seconds.gpu < 0:
        return (
            f"since the start lookups and loads took {net:,.1f} GPU-seconds more than they saved: "
            f"{gpu_hours}"
        )
    return (
        f"since the start {net:,.1f} GPU-seconds of computing were saved, after "
        f"{seconds.gpu_spent:,.1f} for lookups and loads: {gpu_hours}"
    )
