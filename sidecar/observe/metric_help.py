"""What each counter counts, in the words that Prometheus shows beside it.

Owns these sentences, for every record of counts that is exported field by field. Does not own the
counts, nor the names of metrics (`metrics.py`).

Invariant: a field has one sentence and a sentence has a field; a test compares them. A *part* is
one rank's segment of a chunk, so an engine of two ranks stores and loads two parts of each chunk.
"""

from __future__ import annotations

from typing import Final

COUNTERS: Final = {
    "chunks_stored": "Chunks that became whole in host memory when an engine stored their last"
    " part",
    "chunks_loaded": "Parts of chunks copied from host memory to engines, each rank counted",
    "chunks_evicted": "Chunks, whole or not, that made room in host memory",
    "chunks_expired": "Chunks that host memory forgot at the time that their request set"
    " (ttl_seconds)",
    "chunks_pinned": "Chunks pinned for requests that asked for it (pin_seconds)",
    "chunks_written": "Chunks that became whole in the object store when their last part was"
    " written",
    "chunks_read": "Chunks that became whole in host memory when their last part was read from"
    " the object store",
    "chunks_restored": "Chunks of an earlier run that became whole again when their engine came",
    "bytes_stored": "Bytes copied from engines to host memory, all ranks",
    "bytes_loaded": "Bytes copied from host memory to engines, all ranks",
    "bytes_written": "Bytes of objects written to the object store",
    "bytes_read": "Bytes of objects read from the object store and found intact",
    "stores_duplicate": "Parts that an engine stored and host memory had, or was getting",
    "stores_dropped_full": "Parts not stored because no slot could be freed",
    "stores_dropped_quota": "Parts not stored because their tenant was at its limit",
    "stores_dropped_share": "Parts not stored because too much waited (refused_total says what)",
    "stores_dropped_draining": "Parts not stored because the sidecar was stopping",
    "stores_failed": "Parts not stored because their copy failed or their message made no sense",
    "stores_revoked": "Parts not stored because the worker had taken their blocks back",
    "stores_expired": "Parts not stored because their copy had not begun within"
    " limits.store_deadline",
    "loads_served": "Loads that brought all they asked for; a request has one for each rank",
    "loads_dropped_full": "Loads refused because too much waited (refused_total says what)",
    "loads_unverified": "Parts whose copy to an engine began without comparing the checksum"
    " (integrity.verify_loads)",
    "loads_missing": "Loads of which a chunk had left host memory since it was looked up",
    "loads_corrupt": "Loads of which a chunk did not match its checksum",
    "loads_failed": "Loads of which a copy failed, or whose message made no sense",
    "loads_revoked": "Loads whose blocks the worker had taken back",
    "loads_expired": "Loads of which a copy had not begun within limits.load_deadline",
    "lookups": "Requests for which an engine asked for chunks of the object store",
    "lookups_refused": "Lookups refused because too much waited, or while stopping",
    "lookups_expired": "Lookups answered with what there was: reading took longer than"
    " limits.lookup_wait, or than computing would have",
    "lookups_recomputed": "Lookups for which nothing was read because computing was sooner",
    "reads_paused": "Lookups and chunks not read because reading pauses (store.breaker)",
    "reads_unreadable": "Objects read that could not be used here; they stay where they are",
    "leases_refused": "Loads that began without a pin on their chunks",
    "leases_expired": "Pins of loads and lookups that nobody had let go of in time",
    "pins_refused": "Chunks that were to be pinned (pin_seconds) and did not fit",
    "reads_dropped_full": "Parts not read because no slot could be freed",
    "reads_dropped_quota": "Parts not read because their tenant was at its limit",
    "reads_missing": "Objects that were to be read and were not there",
    "reads_corrupt": "Objects that were damaged or foreign",
    "reads_unavailable": "Reads of objects that the store did not answer, or answered differently"
    " twice",
    "reads_garbled": "Of these, reads that differed when they were tried again",
    "reads_expired": "Reads of objects that took longer than store.deadline_seconds_max",
    "writes_dropped": "Chunks not written: the queue was full and they stay in host memory, or"
    " host memory gave them up first",
    "writes_refused_bound": "Chunks not written because the store was at its bound",
    "writes_refused_quota": "Chunks not written because their tenant was at its limit in the store",
    "writes_failed": "Writes of objects that failed, each try counted",
    "writes_unverified": "Objects written without comparing the checksum first"
    " (integrity.verify_writes)",
    "writes_expired": "Writes of objects that took longer than store.deadline_seconds_max, each"
    " try counted",
    "slots_restored": "Slots that an earlier run had left in host memory",
    "slots_unclaimed_dropped": "Of these, slots given up before they were of use: for room, past"
    " their time, or beyond their tenant's limit",
    "quarantined_host": "Chunks dropped from host memory because a part was damaged",
    "quarantined_store": "Objects found damaged or foreign, to be moved to quarantine/",
    "stale_messages": "Messages of engines, and rows of the catalog, that came after their session"
    " or namespace had ended",
}

TENANT_COUNTERS: Final = {
    "chunks_stored": "As kvlake_chunks_stored_total, of one tenant",
    "chunks_loaded": "As kvlake_chunks_loaded_total, of one tenant",
    "chunks_evicted": "As kvlake_chunks_evicted_total, of one tenant",
    "bytes_stored": "As kvlake_bytes_stored_total, of one tenant",
    "bytes_loaded": "As kvlake_bytes_loaded_total, of one tenant",
    "bytes_written": "As kvlake_bytes_written_total, of one tenant",
    "bytes_read": "As kvlake_bytes_read_total, of one tenant",
    "leases": "Loads of a tenant whose chunks were pinned",
    "lookups": "As kvlake_lookups_total, of one tenant",
    "dropped_quota": "Parts of a tenant not stored or read because it was at its limit",
    "writes_refused": "As kvlake_writes_refused_quota_total, of one tenant",
}

CATALOG: Final = {
    "files_read": "Files of catalogs read, for each namespace and way of cutting the model",
    "bytes_read": "Bytes of these files",
    "rows_read": "Rows of these files",
    "files_corrupt": "Files of catalogs ignored because they were damaged or foreign",
    "reloads": "Times that all snapshots were read again because files were missing or damaged",
}

COLLECTION: Final = {
    "rounds": "Rounds of collection, each namespace counted",
    "rounds_failed": "Looks that ended with an error of the store",
    "rounds_left": "Looks at which another sidecar collected, or just had",
    "logs_merged": "Log files merged into snapshots",
    "withdrawn": "Objects withdrawn, to be deleted after store.gc.grace",
    "withdrawn_bytes": "Bytes of these objects",
    "deleted": "Objects deleted",
    "files_removed": "Files of catalogs deleted because others replace them",
    "leftovers_removed": "Damaged objects and left probes deleted",
}
