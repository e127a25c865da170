"""The scenarios by name, in the order in which they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from benchmarks.compare.peers import faults, one_by_one, under_load

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.compare.peers.rows import Row
    from benchmarks.compare.peers.turns import Comparison

SCENARIOS: Final[dict[str, Callable[[Comparison], list[Row]]]] = {
    "documents": one_by_one.documents,
    "conversations": one_by_one.conversations,
    "prefixes": under_load.prefixes,
    "no-hits": under_load.no_hits,
    "turns-with-delays": under_load.turns_with_delays,
    "trace": under_load.trace,
    "trace-by-guidellm": under_load.trace_by_guidellm,
    "restart-engine": faults.restart_engine,
    "second-node": faults.second_node,
    "restart-cache": faults.restart_cache,
    "kill-cache": faults.kill_cache,
}
"""What ends caches comes last: an arm may not survive it."""

QUICK: Final = (
    "documents",
    "prefixes",
    "no-hits",
    "turns-with-delays",
    "second-node",
    "kill-cache",
)
"""What a quick run has, if no scenario is named."""

ABOUT: Final = {
    "documents-first": "Documents of 4,096 tokens that nobody has read, one request after the "
    "other. Own client.",
    "documents": "Questions about these documents, which together are larger than the engine's own "
    "cache, one after the other. Own client.",
    "conversations": "Conversations with a shared system prompt of 1,024 tokens, 480 tokens more "
    "in each turn, one request after the other. Own client.",
    "prefixes": "`vllm bench serve`, prefix_repetition: prefixes of 3,000 tokens, together larger "
    "than the engine's own cache, four requests at a time.",
    "no-hits": "`vllm bench serve`, random: prompts of about 588 tokens (512 words) that share "
    "next to nothing, eight at a time.",
    "turns-with-delays": "guidellm: conversations of four turns with half a second between two, "
    "prefixes of 1,024 and 2,048 tokens in two buckets, four conversations at a time.",
    "trace": "`vllm bench serve`, timed_trace: the head of a trace, squeezed into a minute (20 "
    "seconds in a quick run), with blocks of 64 tokens in place of 512.",
    "trace-by-guidellm": "guidellm, mooncake: the same slice, with texts of its own.",
    "restart-engine": "The engine was restarted, and gets prompts of 2,048 tokens that it had "
    "before. That of `limit` was not. Own client.",
    "second-node": "A second engine with an empty cache gets prompts of 2,048 tokens that only a "
    "folder (in memory, so without a disk) has, which a first node wrote. Own client.",
    "restart-cache": "The cache's process ended in order and started again, while its engine ran. "
    "Silence for 30 seconds is a failure. The host tier of `kvlake-offloading` is in the engine, "
    "and stays. Own client.",
    "kill-cache": "`vllm bench serve`, prefix_repetition as above; the cache's process gets "
    "SIGKILL after eight prompts and is not started again.",
}
"""A row's scenario -> what its load is."""
