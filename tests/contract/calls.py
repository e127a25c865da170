"""The order in which vLLM calls a connector's hooks, as kvlake relies on it.

Regular expressions over the names of the hooks, for calls that `recording.py` wrote down. Hooks
that may come at any time are left out first.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

FOLDER: Final = "KVLAKE_RECORD_CALLS"
"""An environment variable: the folder for a file of each process and role."""


class Order(NamedTuple):
    """What may come at any time, and the order of all else."""

    at_any_time: frozenset[str]
    pattern: re.Pattern[str]


SCHEDULER: Final = Order(
    frozenset({"on_new_request", "request_finished_all_groups"}),
    re.compile(
        r"bind_gpu_block_pool (?:"
        # One call of schedule(): a request that was looked up is allocated, or asked again.
        # (Once its load has ended it is allocated again, without being looked up.)
        r"(?:get_num_new_matched_tokens "
        r"(?:update_state_after_alloc (?:get_external_cache_hit_sources )?)?"
        r"|update_state_after_alloc )*"
        r"build_connector_meta "
        # What came of it: the connector is told before anything is asked of it.
        r"|(?:update_connector_output )?(?:get_kv_connector_stats )?take_events "
        r")*"
    ),
)
WORKER: Final = Order(
    frozenset({"wait_for_layer_load", "save_kv_layer"}),
    re.compile(
        r"(?:get_mem_pool_context )?register_kv_caches "
        r"(?:(?:start_load_kv )?wait_for_save get_transfer_results "
        r"(?:get_kv_connector_stats )?build_connector_worker_meta )*"
    ),
)


def departure(calls: str, order: Order) -> str:
    """Where calls leave the order, with what came before it; nothing where they keep it."""
    names = [name for name in calls.split() if name not in order.at_any_time]
    text = "".join(f"{name} " for name in names)
    found = order.pattern.match(text)
    end = 0 if found is None else found.end()
    if end == len(text):
        return ""
    kept = text[:end].count(" ")
    return " ".join([*names[max(0, kept - 4) : kept], "<here>", *names[kept : kept + 6]])
