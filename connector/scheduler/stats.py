"""Counters of the scheduler role. `connector/metrics.py` exports them as `vllm:kvlake_*_total`.

`role.py` counts hits, misses and loads, `pending.py` lookups, `stores.py` stores.
"""

from dataclasses import dataclass, field, fields
from typing import Final


def _counter(help_text: str) -> int:
    count: int = field(default=0, metadata={"help": help_text})
    return count


@dataclass(slots=True)
class Stats:
    """Counters since the last `take`. A field's metadata has the help text of its metric."""

    requests_hit: int = _counter("Requests whose first load brought all its tokens")
    requests_missed: int = _counter(
        "Requests that began without a load and lacked load_tokens_min tokens or more behind vLLM's"
        " own prefix cache hit. Other requests without a load are neither hit nor missed"
    )
    tokens_loaded_host: int = _counter("Prompt tokens loaded that host memory had at the lookup")
    tokens_loaded_store: int = _counter("Prompt tokens loaded that the object store had to send")
    loads_failed: int = _counter("Loads of requests that failed; their tokens were computed")
    loads_expired: int = _counter("Failed loads whose deadline passed, each rank counted")
    lookups_sent: int = _counter("Requests for which the sidecar was to read the object store")
    lookups_expired: int = _counter("Lookups that were not answered within limits.lookup_wait")
    chunks_stored: int = _counter(
        "Chunks that the engine set out to store. The sidecar counts those that were stored as"
        " kvlake_chunks_stored_total"
    )
    stores_skipped: int = _counter("Chunks that were not stored because of too many open stores")
    stores_failed: int = _counter("Store jobs of some chunks that failed, each rank counted")
    stores_expired: int = _counter("Failed store jobs whose deadline passed, each rank counted")
    answers_stale: int = _counter("Messages of an earlier run of the sidecar that were dropped")
    pins_skipped: int = _counter("Chunks that pin_seconds could not pin without a sidecar")
    expected_late: int = _counter("Requests whose expect_tokens of another engine were late")
    requests_uncached: int = _counter("Requests of an engine that had no sidecar or was refused")

    def take(self) -> dict[str, int]:
        """The counters that are not 0, by name. They start again at 0."""
        taken = {name: count for name in _NAMES if (count := getattr(self, name))}
        for name in taken:
            setattr(self, name, 0)
        return taken


# vLLM asks after every step, and to collect the fields takes longer than all else.
_NAMES: Final = tuple(one.name for one in fields(Stats))
