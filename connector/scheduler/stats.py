"""Counters of the scheduler role. `connector/metrics.py` exports them as `vllm:kvlake_*_total`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace


def _counter(help_text: str) -> int:
    count: int = field(default=0, metadata={"help": help_text})
    return count


@dataclass(slots=True)
class Stats:
    """Counters since the last `take`. A field's metadata has the help text of its metric."""

    requests_hit: int = _counter("Requests whose first load brought all its tokens")
    requests_missed: int = _counter(
        "Requests that began without a load though they lacked load_tokens_min tokens or more"
        " behind the hit in vLLM's own prefix cache. What that cache held, shorter requests, and"
        " those that do not read are neither hit nor missed"
    )
    tokens_loaded_host: int = _counter(
        "Prompt tokens loaded that host memory held when they were looked up"
    )
    tokens_loaded_store: int = _counter(
        "Prompt tokens loaded that were read from the object store first"
    )
    loads_failed: int = _counter("Loads of requests that failed; their tokens were computed")
    loads_expired: int = _counter("Of these, loads whose deadline passed first, each rank counted")
    lookups_sent: int = _counter(
        "Requests for which the sidecar was asked to read from the object store"
    )
    lookups_expired: int = _counter(
        "Of these, requests to which it had not answered within limits.lookup_wait"
    )
    chunks_stored: int = _counter(
        "Chunks that the engine set out to store. Which of them were stored, the sidecar counts:"
        " kvlake_chunks_stored_total"
    )
    stores_skipped: int = _counter(
        "Chunks that were not stored because too many stores had not ended"
    )
    stores_failed: int = _counter(
        "Store jobs that failed, each rank counted; a job has many chunks"
    )
    stores_expired: int = _counter("Of these, jobs whose deadline passed first")
    answers_stale: int = _counter("Messages of an earlier life of the sidecar, which were dropped")
    pins_skipped: int = _counter(
        "Chunks that were to be pinned (pin_seconds) while there was no sidecar"
    )
    expected_late: int = _counter(
        "Requests for which another engine's chunks (expect_tokens) did not come in time"
    )
    requests_uncached: int = _counter(
        "Requests that came while the engine had no sidecar, or was refused"
    )

    def take(self) -> Stats:
        """A copy of the counters, which start again at 0."""
        taken = replace(self)
        for counter in fields(self):
            setattr(self, counter.name, 0)
        return taken
