"""Promises about the object store: lookups and reads, and writes."""

from __future__ import annotations

from tests.simulation.mutation import Mutation

STORE = (
    # Lookups and reads.
    Mutation(
        "a lookup is not answered at its deadline",
        "Lookups.expire",
        "elif lookup.deadline <= now:",
        "elif False:",
        seed=6,
    ),
    Mutation(
        "a lookup is not answered when all is there",
        "Lookups.chunk_loaded",
        "self._answer_if_done(lookup)",
        "pass",
    ),
    Mutation(
        "a lookup is not answered when a read fails",
        "Reads.ended",
        "return chunk, reason",
        "return None",
        ("store fails", "object vanishes", "another cluster writes"),
        seed=1,
    ),
    Mutation(
        "a lookup calls ready what is not there",
        "Lookups._answer",
        "ready = _leading(lookup.chunks, 0)",
        "ready = len(lookup.chunks)",
    ),
    Mutation(
        "a lookup waits longer than it pays",
        "ReadPlan.patience_seconds",
        "min(limit_seconds, self.saved_seconds(ready, limit_seconds) + self.compute_seconds)",
        "limit_seconds",
        ("store slow", "another cluster writes"),
        seed=4,
    ),
    Mutation(
        "a lookup outlives its session",
        "Engine._close",
        "self.lookups.close_session(session.session_id)",
        "pass",
        ("session cut", "store slow", "another cluster writes"),
        seed=26,
    ),
    Mutation(
        "a lookup outlives its release",
        "Lookups.release",
        "if lookup is not None:",
        "if False:",
        ("abort", "store slow", "another cluster writes"),
    ),
    Mutation(
        "pins of an answered lookup stay for ever",
        "Lookups.expire",
        "if lookup.expires <= now:",
        "if False:",
        seed=63,
    ),
    Mutation(
        "reads are not bounded",
        "Reads.pump",
        "while len(self._running) < self._limits.reads_inflight_max:",
        "while True:",
    ),
    Mutation(
        "a store that fails is read from all the same",
        "Reads.pump",
        "if not self.breaker.passes(now):",
        "if False:",
        ("flood of lookups", "store fails", "store slow"),
        seed=29,
    ),
    Mutation(
        "a read starts for which nobody waits",
        "Reads.cancel",
        "self.queue.discard(segment)",
        "pass",
        ("store slow", "another cluster writes"),
        seed=4,
    ),
    Mutation(
        "an object that is gone is called stored",
        "Reads._failed",
        "self._store.missing(realm, key, bit)",
        "pass",
        ("object vanishes", "another cluster writes"),
        seed=13,
    ),
    # Writes.
    Mutation(
        "a slot is not held while it is written",
        "Writes._start",
        "self._host.hold(segment)",
        "pass",
    ),
    Mutation(
        "a write that failed is called stored",
        "Writes.ended",
        "if event.outcome is StoreOutcome.OK:",
        "if event.outcome is not StoreOutcome.CORRUPT:",
        ("store fails", "store full", "store goes down"),
    ),
    Mutation(
        "the queue of writes is not bounded",
        "Writes._put",
        "self.pending_bytes > self._queue_bytes_max",
        "False",
        seed=3,
    ),
    Mutation(
        "writes are not bounded",
        "Writes.pump",
        "len(self._running) < self._limits.writes_inflight_max and ",
        "",
        seed=3,
    ),
    Mutation(
        "a store that fails is written to all the same",
        "Writes.pump",
        " and self.breaker.passes(now)",
        "",
        ("store goes down", "store fails"),
    ),
    Mutation(
        "a drain does not wait for writes",
        "Dispatcher.feed",
        "if self.engine.draining and self.engine.pending_work().idle:",
        "if self.engine.draining:",
        ("sidecar terminated", "store slow"),
        seed=24,
    ),
)
