"""`KVLakeTier`: kvlake as a tier below vLLM's own host tier (`SecondaryTierManager`).

vLLM brings chunks from such a tier into its host tier before it reports a hit to its scheduler. So
everything here may fail, be late or be gone, and is a miss then.

Owns which chunks the sidecar has, and what to ask it for. Keys are in `keys.py`; `staging.py`
carries rows. No method raises for a fault of the cache, and none waits for the sidecar.
"""

import os
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

import connector.ownership  # noqa: F401 # pyright: ignore[reportUnusedImport] (checks at import)
from connector.client import Attempt, Client, SidecarSession
from connector.events import TierEvents
from connector.export import ExportedMemory
from connector.identity.namespace import served_as
from connector.identity.reading import Identity
from connector.offloading.keys import ChunkKeys, row_namespace_of
from connector.offloading.staging import BLOCK_TOKENS, StagedRow, Staging
from connector.offloading.workarounds import OffloadedRequests
from connector.options import option
from connector.request_params import CONNECTOR_ONLY, NOTHING, RequestParams, RequestParamsReader
from connector.worker import WorkerRole
from sidecar.protocol import (
    KEYS_PER_MESSAGE_MAX,
    OFFLOADING,
    PROTOCOL_VERSION,
    Attach,
    Lookup,
    LookupDone,
    Release,
    Role,
    Use,
    sockets_of,
)
from tiers.kv.index import FLAG_HOST, FLAG_STORE
from tiers.kv.keys import NO_PARENT

STAGING_BYTES: Final = 256 * 1024 * 1024
STAGING_ROWS_MIN: Final = 8
CARRIED_MAX: Final = 3
"""How often a chunk is carried to vLLM's host tier for a request that does not run yet."""


@dataclass(slots=True)
class _Request:
    """One request. Chunks are named by their keys."""

    request_params: RequestParams
    """`NOTHING` from when it is excluded, or has KV from before a reset; always if it came before
    the weights were identified."""
    places: dict[tuple[int, int], bytes] = field(default_factory=dict[tuple[int, int], bytes])
    """Group and last token to key."""
    wanted: dict[bytes, None] = field(default_factory=dict[bytes, None])
    """To be read from the object store, in order; asked for at the end of the step."""
    reading: set[bytes] = field(default_factory=set[bytes])
    lookups: dict[int, SidecarSession] = field(default_factory=dict[int, "SidecarSession"])
    """Released when the request runs or has finished."""
    brought: set[bytes] = field(default_factory=set[bytes])
    """Read from the object store for it, and in host memory since."""
    missed: set[bytes] = field(default_factory=set[bytes])
    """Not available for it, and not tried again."""
    used: set[bytes] = field(default_factory=set[bytes])
    """Chunks that the sidecar knows to be in its prompt."""
    uses: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """Others, and where each ends."""
    carried: Counter[bytes] = field(default_factory=Counter[bytes])
    """How often each was carried to vLLM's host tier since the request last ran."""


@dataclass(slots=True)
class _Read:
    """Chunks that the sidecar reads from the object store."""

    request: _Request
    keys: list[bytes]
    deadline: float
    session: SidecarSession


def _hit_source() -> Any:
    """As what vLLM counts hits of this tier; None for vLLM 0.31, which does not ask."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST


class KVLakeTier(SecondaryTierManager):
    """A tier that is shared with other engines, and outlives this one.

    Args:
        primary_kv_view: vLLM's host tier, a row for each chunk.
        namespace: what the bytes depend on beyond what vLLM tells a tier: model, weights, dtype,
            attention backend. Engines with the same one share chunks. With an `Identity` that is
            not complete, requests that come before it is are not served.
        events_endpoint, events_replay: from `connector.events.events_endpoints`.
        preempted_are_new: as in `OffloadedRequests`.
    """

    medium = None
    """It has several: host memory and the object store."""
    cache_hit_source: ClassVar[Any] = _hit_source()

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        namespace: Any = "",
        socket: str = "",
        attach_seconds: float = 2.0,
        backpressure_detector: Any = None,
        events_endpoint: str = "",
        events_replay: str = "",
        *,
        preempted_are_new: bool = False,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if not namespace:
            raise ValueError(
                f"secondary_tiers: namespace={namespace!r}: must name the model, its weights and "
                "whatever else its KV cache depends on; vLLM does not tell a tier"
            )
        config = offloading_spec.config
        region = np.asarray(primary_kv_view).view(np.uint8)
        self._num_rows, self._row_bytes = (int(size) for size in region.shape)
        self._chunk_tokens = {
            group.group_id: group.tokens_per_block * config.cache.blocks_per_chunk
            for group in config.groups
        }
        wants_events = bool(config.enable_kv_cache_events)
        self.keys = ChunkKeys(remembers=wants_events)
        known = isinstance(namespace, Identity)
        identity = self._identity = namespace if known else Identity([namespace], logs=False)

        def identified() -> None:
            (given,) = identity.descriptions
            self.keys.identify(row_namespace_of(config, given, self._row_bytes))

        identity.when_complete(identified)
        self._request_params = RequestParamsReader(unsupported=CONNECTOR_ONLY)
        self._requests: dict[str, _Request] = {}
        self._offloaded = OffloadedRequests(preempted_are_new=preempted_are_new)
        self._jobs: dict[int, tuple[_Request | None, dict[bytes, OffloadKey]]] = {}
        """The request of each of vLLM's jobs, and vLLM's name for each key."""
        self._reads: dict[int, _Read] = {}
        self._tiers = TierEvents()
        self._next_id = 1
        attach = partial(
            Attach,
            version=PROTOCOL_VERSION,
            engine_id=str(config.engine_id),
            rank=0,
            world_size=1,
            topology=OFFLOADING,
            block_tokens=BLOCK_TOKENS,
            blocks_per_chunk=1,
            pid=os.getpid(),
            model=served_as(config.model.name, config.model.name),
        )

        def attempt() -> Attempt:
            return Attempt(
                attach(
                    role=Role.SCHEDULER,
                    namespace=self.keys.namespace,
                    want_events=wants_events,
                    events_endpoint=events_endpoint,
                    events_replay=events_replay,
                )
            )

        sockets = sockets_of(socket)
        # Before the first request, so that a running sidecar serves that too.
        wait_seconds = option({"attach_seconds": attach_seconds}, "attach_seconds", 2.0)
        when = identity.when_complete
        self.client = Client(sockets, attempt, attach_seconds=wait_seconds, when=when)
        if self.client.session is None:
            wait_seconds = 0.0
        connect = partial(Client, sockets, attach_seconds=wait_seconds, when=when)

        def describe(memory: ExportedMemory) -> Attach:
            layout = memory.layouts[0]
            return attach(
                role=Role.WORKER,
                namespace=self.keys.namespace,
                segment=layout.segment,
                layout=layout,
                memory=memory.shared,
            )

        num_rows = max(STAGING_ROWS_MIN, min(len(region), STAGING_BYTES // self._row_bytes))
        self._staging = Staging(
            region, num_rows, lambda memory: WorkerRole(lambda: memory, connect, describe)
        )

    # --- lookup --------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Read the request's parameters."""
        identified = bool(self.keys.digest)
        request_params = self._request_params.read(req_context) if identified else NOTHING
        self._requests[req_context.req_id] = _Request(request_params)
        self._offloaded.added(req_context)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT: it is in the sidecar's host memory. RETRY: it is being read from the store."""
        request = self._requests.get(req_context.req_id)
        if self.client.session is None or request is None or not request.request_params.reads:
            return LookupResult.MISS
        own = self._own_key(key, request, req_context)
        if own in request.missed:
            return LookupResult.MISS
        carried = request.carried[own]
        if carried >= CARRIED_MAX or (not carried and len(request.carried) >= self._num_rows):
            # A hit is no longer than vLLM's host tier. A chunk that was carried there and is looked
            # up again was evicted for others. If those are of the same prompt, they would evict
            # each other forever.
            return LookupResult.MISS
        flags = int(self._flags([own])[0])
        allows = req_context.load_tier_filter.allows
        # A chunk read from the object store for it counts as one, though it is in host memory.
        if flags & FLAG_HOST and (own in request.brought or allows(Medium.CPU, Locality.LOCAL)):
            return LookupResult.HIT
        if own in request.reading:
            return LookupResult.RETRY
        in_store = flags & FLAG_STORE and request.request_params.asks_store
        if in_store and allows(Medium.STORAGE, Locality.REMOTE):
            request.wanted[own] = None
            return LookupResult.RETRY
        return LookupResult.MISS

    def _flags(self, keys: list[bytes]) -> npt.NDArray[np.uint8]:
        """Which tiers of the sidecar hold each chunk; none without a sidecar."""
        session = self.client.session
        return np.zeros(len(keys), dtype=np.uint8) if session is None else session.holds(keys)

    def _own_key(self, key: OffloadKey, request: _Request | None, context: ReqContext) -> bytes:
        own = self.keys.key_of(key)
        end = context.get_offload_key_position(key)
        if request is not None and end is not None:
            request.places[get_offload_group_idx(key), end] = own
            if own not in request.used and request.request_params is not NOTHING:
                request.uses[own] = end
        return own

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note chunks that were found in vLLM's own host tier."""
        for key in keys:
            self._own_key(key, self._requests.get(req_context.req_id), req_context)

    def _ask(self, request: _Request, session: SidecarSession) -> None:
        """Have the sidecar read chunks that only the object store holds."""
        keys = list(request.wanted)[:KEYS_PER_MESSAGE_MAX]
        request.wanted.clear()
        wait_ms = session.limits.lookup_wait_ms_max
        lookup_id = self._next_id = self._next_id + 1
        if not self.client.send(session, Lookup(session.epoch, lookup_id, keys, wait_ms)):
            request.missed.update(keys)
            return
        request.reading.update(keys)
        request.lookups[lookup_id] = session
        deadline = time.monotonic() + wait_ms / 1000
        self._reads[lookup_id] = _Read(request, keys, deadline, session)

    def _read_ended(self, lookup_id: int) -> None:
        read = self._reads.pop(lookup_id, None)
        if read is None:
            return
        request = read.request
        request.reading.difference_update(read.keys)
        for key, flags in zip(read.keys, self._flags(read.keys), strict=True):
            (request.brought if flags & FLAG_HOST else request.missed).add(key)

    # --- transfers -----------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Carry chunks to the sidecar that it does not have."""
        context = job_metadata.req_context
        request = self._requests.get(context.req_id)
        names = self._begin(job_metadata, request)
        rows: list[StagedRow] = []
        if request is not None and (params := request.request_params).writes:
            ttl_ms, stays = params.ttl_ms, params.stays
            found = zip(names.items(), job_metadata.chunk_ids, self._flags([*names]), strict=True)
            rows = [
                StagedRow(own, int(chunk_id), self._parent(key, request, context), ttl_ms, stays)
                for (own, key), chunk_id, flags in found
                if not flags & FLAG_HOST
            ]
            # The head of a chain first: if time runs out, its end is missing.
            rows.sort(key=lambda row: context.get_offload_key_position(names[row.key]) or 0)
        self._carry(job_metadata.job_id, rows, is_load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Carry chunks from the sidecar."""
        request = self._requests.get(job_metadata.req_context.req_id)
        names = self._begin(job_metadata, request)
        if request is not None:
            request.carried.update(names.keys())
        rows = [
            StagedRow(own, int(chunk_id))
            for own, chunk_id in zip(names, job_metadata.chunk_ids, strict=True)
        ]
        self._carry(job_metadata.job_id, rows, is_load=True)

    def _begin(self, job: TransferJob, request: _Request | None) -> dict[bytes, OffloadKey]:
        names = {self._own_key(key, request, job.req_context): key for key in job.keys}
        self._jobs[job.job_id] = (request, names)
        return names

    def _parent(self, key: OffloadKey, request: _Request, context: ReqContext) -> bytes:
        group = get_offload_group_idx(key)
        end = context.get_offload_key_position(key) or 0
        before = (group, end - self._chunk_tokens.get(group, 0))
        return request.places.get(before, NO_PARENT)

    def _carry(self, job_id: int, rows: list[StagedRow], *, is_load: bool) -> None:
        seconds = 0.0
        if (session := self.client.session) is not None:
            limits = session.limits
            longest_ms = limits.load_deadline_ms_max if is_load else limits.store_deadline_ms_max
            seconds = longest_ms / 1000
        self._staging.begin(job_id, rows, is_load=is_load, seconds_max=seconds)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Take the sidecar's answers, and continue transfers."""
        for message in self._tiers.poll(self.client):
            if isinstance(message, LookupDone):
                self._read_ended(message.lookup_id)
        now, session = time.monotonic(), self.client.session
        for lookup_id, read in list(self._reads.items()):
            if now >= read.deadline or read.session is not session:
                self._read_ended(lookup_id)
        self._staging.pump(session)
        results: list[JobResult] = []
        for batch in self._staging.finished():
            request, names = self._jobs.pop(batch.batch_id)
            if batch.is_load and request is not None:
                request.missed.update(batch.failed)
            done = [names[key] for key in batch.done]
            results.append(
                JobResult(
                    batch.batch_id,
                    success=not batch.failed,
                    successful_keys=done if batch.failed else None,
                    transfer_time=batch.seconds,
                    transfer_bytes=len(done) * self._row_bytes,
                )
            )
        return results

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send the lookups and jobs of this step."""
        self._offloaded.step(context)
        session = self.client.session
        for request_id in (*context.new_req_ids, *context.preempted_req_ids):
            if (request := self._requests.get(request_id)) is not None:
                request.carried.clear()
                # What was read for it is in vLLM's host tier by now, or is not needed.
                self._release(session, request)
        for request in self._requests.values():
            self._use(session, request)
        for request_id, request in self._requests.items():
            if self._offloaded.excluded(request_id):
                request.request_params = NOTHING
            if not request.wanted:
                continue
            if session is None:
                request.missed.update(request.wanted)
                request.wanted.clear()
            else:
                self._ask(request, session)
        self._staging.pump(session)

    def _use(self, session: SidecarSession | None, request: _Request) -> None:
        """Name the chunks of a request to the sidecar, each once, before they are stored."""
        if not request.uses:
            return
        keys = sorted(request.uses, key=request.uses.__getitem__)[:KEYS_PER_MESSAGE_MAX]
        request.used.update(keys)
        request.uses.clear()
        if session is not None:
            num_tokens = len(keys) * max(self._chunk_tokens.values())
            self.client.send(session, Use(session.epoch, keys, num_tokens))

    def has_pending_work(self) -> bool:
        """Whether an answer is awaited."""
        return bool(self._reads)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Release what was read for it."""
        self._offloaded.finished(req_context)
        request = self._requests.pop(req_context.req_id, None)
        session = self.client.session
        if request is None or session is None:
            return
        self._use(session, request)
        for lookup_id in request.lookups:
            self._reads.pop(lookup_id, None)
        self._release(session, request)

    def _release(self, session: SidecarSession | None, request: _Request) -> None:
        """End the lookups of a request that were answered, and so their pins."""
        over = [one for one in request.lookups if one not in self._reads]
        asked = [one for one in over if request.lookups.pop(one) is session]
        if session is not None and asked:
            self.client.send(session, Release(session.epoch, [], asked))

    def drain_jobs(self) -> None:
        """End all jobs, because vLLM resets its cache; nothing from before is found here either.

        Waits at most for a copy in this process. Requests that may have KV from before are neither
        served nor stored from now on.
        """
        self._staging.drain()
        self.keys.forget()
        self._reads.clear()
        for request_id, request in self._requests.items():
            if request.places or self._offloaded.has_kv(request_id):
                request.request_params = NOTHING
            request.wanted.clear()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What the sidecar's tiers gained and lost of chunks whose names are known here."""
        return self.keys.take(self._tiers.take())

    def shutdown(self) -> None:
        """Detach."""
        self._identity.close()
        self._staging.close()
        self.client.close()
