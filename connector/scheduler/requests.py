"""What the scheduler role knows of each request, and the settings and counts it shares.

Owns the making of a request's key chain from what vLLM says of it, and the rule of which requests
are cached at all. Does not own any decision about loading or storing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from connector.identity.adapters import NO_ADAPTER, Adapter, Adapters
from connector.identity.keys import KeyChain, MediaItem, root_key
from connector.request_params import RequestParams, RequestParamsReader
from sidecar.protocol import tenant_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from connector.client import SidecarSession
    from connector.identity.groups import CachedGroup, Geometry
    from connector.plan import Load

logger = logging.getLogger("vllm.kvlake")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the operator decided in vLLM's configuration for this engine.

    `load_tokens_min`: a load shorter than this is not worth its extra scheduler step.
    `caches_media`: whether what vLLM calls an image stands for what is in it.
    `beside_others`: other connectors may load, too.
    `adapters`: how LoRA adapters are applied, where that is not as always.
    """

    reads: bool
    writes: bool
    load_tokens_min: int = 64
    caches_media: bool = True
    beside_others: bool = False
    adapters: str = ""


@dataclass(slots=True)
class Stats:
    """Counted since the last call of `take_stats`; names are those of the exported metrics.

    What each counts is said in `connector/metrics.py`, in the words that Prometheus shows.
    """

    requests_hit: int = 0
    requests_missed: int = 0
    tokens_loaded_host: int = 0
    tokens_loaded_store: int = 0
    loads_failed: int = 0
    loads_expired: int = 0
    lookups_sent: int = 0
    lookups_expired: int = 0
    chunks_stored: int = 0
    stores_skipped: int = 0
    stores_failed: int = 0
    stores_expired: int = 0
    answers_stale: int = 0
    pins_skipped: int = 0
    expected_late: int = 0
    requests_uncached: int = 0


@dataclass(slots=True)
class PendingRead:
    """A question to the sidecar, and what it keeps in host memory for it."""

    lookup_id: int
    deadline: float
    session: SidecarSession


@dataclass(slots=True)
class GroupState:
    """What is known of one request in one KV cache group."""

    group: int
    geometry: Geometry
    chain: KeyChain
    tags: npt.NDArray[np.uint64]
    tags_salt: bytes = b""
    partial_tags: dict[int, npt.NDArray[np.uint64]] = field(
        default_factory=dict[int, npt.NDArray[np.uint64]]
    )
    """Chunk index to the tags of its pieces, longest first."""
    next_chunk: int = 0
    """Chunks before this one were considered for storing."""


@dataclass(slots=True)
class RequestState:
    """One request, from its arrival to its end."""

    request: Any
    groups: list[GroupState]
    tenant: bytes
    """Whose it is, as the sidecar is told: made from the cache salt, which stays here."""
    local_tokens: int = 0
    """The engine's own hit."""
    begins_tokens: int = 0
    """The own hit that it goes on from in the step being scheduled."""
    known_tokens: int = 0
    """The own hit, with what we loaded behind it: more than that another connector loads."""
    scheduled_tokens: int = 0
    """Since its blocks were last allocated. What vLLM counts as computed before that may not be."""
    lookup: PendingRead | None = None
    """What it waits for."""
    lookups_over: list[PendingRead] = field(default_factory=list[PendingRead])
    """What it waited for: to be given back once it is known what of it is loaded."""
    asked_tokens: int = -1
    """The engine's own hit for which the store was last asked about."""
    asked_session: SidecarSession | None = None
    """The session that was asked. Another one is another sidecar, or one that knows of nothing."""
    asked_sessions: int = 0
    from_store_keys: set[bytes] = field(default_factory=set[bytes])
    load: Load | None = None
    load_failed: bool = False
    adapter: Adapter = NO_ADAPTER
    """What tells its LoRA adapter from others."""
    stale_names: Any = None
    """The engine's map of cached blocks, where it has some of another adapter that vLLM takes for
    this one."""
    void: bool = False
    """Its KV may be of other weights than its keys say: the cache was reset while it ran, or it
    began with blocks of before, or its adapter was replaced."""
    prompt_tail_done: bool = False
    request_params: RequestParams = field(default_factory=RequestParams)
    undrafted: bool = False
    """A step left out the drafter: what is computed from there on is not whole."""
    expects_until: float | None = None
    """Until when it waits for what another engine is handing over to it."""
    counted: bool = False
    """It is in the statistics as a hit or a miss, or is neither."""
    hit_sources: tuple[int, int] = (0, 0)
    """Tokens of the last load from host memory, and through it from the object store."""

    @property
    def chain(self) -> KeyChain:
        """Keys of its chunks in the first group, and all of its tokens."""
        return self.groups[0].chain

    @property
    def adapter_id(self) -> int:
        """The number that vLLM knows its adapter by; 0 without one."""
        lora = getattr(self.request, "lora_request", None)
        return 0 if lora is None else int(lora.lora_int_id)

    @property
    def in_flight_tokens(self) -> int:
        """Scheduled in steps whose output vLLM has not taken yet."""
        return int(getattr(self.request, "num_in_flight_tokens", 0))

    @property
    def step_taken(self) -> bool:
        """Whether vLLM took the output of a step since the blocks were last allocated.

        With it comes the word on loads that failed in that step, or before. Steps are taken in
        their order, so what is missing of those in flight was taken.
        """
        return self.scheduled_tokens > self.in_flight_tokens

    @property
    def attending(self) -> list[GroupState]:
        """Groups whose blocks hold something of each token, and so are stored by their place."""
        return [group for group in self.groups if not group.geometry.attention.recurrent]

    def extend(self) -> None:
        """Hash what its tokens have grown by."""
        chain = self.chain
        if self.request.num_tokens > chain.num_tokens:
            chain.extend(self.request.all_token_ids[chain.num_tokens :])
            for other in self.groups[1:]:
                other.chain.follow()


class Requests(dict[str, RequestState]):
    """Request id to state, of the requests that are cached."""

    def __init__(
        self,
        groups: Sequence[CachedGroup],
        settings: Settings,
        *,
        ahead_tokens: int = 0,
        cached_names: Callable[[], Any] = lambda: None,
        world_size: int = 1,
    ) -> None:
        super().__init__()
        self.adapters = Adapters(settings.adapters, world_size, self._void_adapter)
        self._cached_names = cached_names
        self._caches_media = settings.caches_media
        self._ahead_tokens = ahead_tokens
        self._groups = groups
        self._adapters_called: dict[tuple[str, str], str] = {}
        """Of each name and path, which is what vLLM's own prefix cache knows an adapter by."""
        self._stale_names: dict[tuple[str, str], Any] = {}
        """Of those that were another's, the engine's map of cached blocks at that time."""
        self.ended: list[RequestState] = []
        """Requests that ended and whose last stores are not sent yet."""
        self._reader = RequestParamsReader()
        self.generation = b""
        """Part of every key made from now on; a new one makes everything older unknown."""

    def track(self, request: Any) -> RequestState | None:
        """State of a request with its chain grown to all its tokens; None if it is not cached."""
        state = self.get(request.request_id)
        if state is None:
            if request.prompt_embeds is not None or request.resumable:
                # Embeddings have no token ids to make a key of; the next input of a streaming
                # session replaces tokens that were hashed already.
                return None
            if request.mm_features and not self._caches_media:
                return None
            adapter = self.adapters.of(request.lora_request)
            if adapter is None:
                # What it computes is in vLLM's own prefix cache, under the adapter's name.
                self._distrust(_called(request.lora_request))
                return None
            state = RequestState(
                request=request,
                groups=self._group_states(request, adapter.identity),
                tenant=tenant_id(request.cache_salt or ""),
                request_params=self._reader.wishes_of(request),
            )
            state.adapter = adapter
            self._void_beside(state)
            state.stale_names = self._called_before(request.lora_request, adapter.identity)
            self[request.request_id] = state
        state.extend()
        return state

    def end(self, request_id: str) -> RequestState | None:
        """Forget a request, if it is one that is cached."""
        state = self.pop(request_id, None)
        if state is not None:
            self.ended.append(state)
        return state

    def void_all(self) -> None:
        """Nothing of what is known now is to be cached any more."""
        for state in (*self.values(), *self.ended):
            state.void = True

    def _void_adapter(self, number: int, files: str) -> None:
        """Nothing that runs with this number is to be cached, unless its adapter has these files.

        VLLM has loaded others, or may have.
        """
        for state in (*self.values(), *self.ended):
            if state.adapter_id == number and state.adapter.files != files:
                self.void(state)

    def void(self, state: RequestState) -> None:
        """Nothing of a request with an adapter is to be cached any more."""
        state.void = True
        self._distrust(_called(state.request.lora_request))

    def _distrust(self, called: tuple[str, str] | None) -> None:
        """VLLM's own prefix cache may have KV of other files under this adapter's name and path."""
        if called is None:
            return
        names = self._stale_names[called] = self._cached_names()
        for state in self.values():
            if _called(state.request.lora_request) == called:
                state.stale_names = names

    def _void_beside(self, new: RequestState) -> None:
        """An adapter is replaced at once: requests of both do not know which computed them.

        Each of a batch may bring its own back, so the new ones are void as long as there are old.
        """
        if not new.adapter_id:
            return
        for state in (*self.values(), *self.ended):
            if state.adapter_id == new.adapter_id and state.adapter != new.adapter:
                self.void(state)
                if state.request.request_id in self:
                    self.void(new)

    def _called_before(self, lora: Any, adapter: str) -> Any:
        """The engine's map of cached blocks, if one of this name and path was another before.

        vLLM goes on from the KV of that one, until its cache is reset.
        """
        called = _called(lora)
        if called is None:
            return None
        names = self._cached_names()
        if self._adapters_called.setdefault(called, adapter) != adapter:
            self._adapters_called[called] = adapter
            # Those of the one before may yet begin with what this one computes.
            self._distrust(called)
            logger.warning(
                "kvlake: adapter %s is another than %s held before, and vLLM's own prefix cache "
                "does not tell them apart: prompts of which it has a part are not cached until it "
                "is reset; take a new path for new weights",
                *called,
            )
        elif self._stale_names.get(called) is not names:
            self._stale_names.pop(called, None)
        return self._stale_names.get(called)

    def _group_states(self, request: Any, adapter: str) -> list[GroupState]:
        media = [
            MediaItem(item.identifier, item.mm_position.offset, item.mm_position.length)
            for item in request.mm_features
        ]
        states: list[GroupState] = []
        for number, group in enumerate(self._groups):
            geometry = group.geometry
            root = root_key(
                group.namespace_digest,
                salt=request.cache_salt or "",
                lora=adapter,
                generation=self.generation,
            )
            chain = KeyChain(
                root,
                geometry.chunk_tokens,
                geometry.block_tokens,
                media,
                beside=states[0].chain if states else None,
                ahead_tokens=self._ahead_tokens,
            )
            tags = np.empty((0, 2), dtype=np.uint64)
            states.append(GroupState(number, geometry, chain, tags))
        return states


def _called(lora: Any) -> tuple[str, str] | None:
    """What vLLM's own prefix cache knows an adapter by."""
    return None if lora is None else (lora.lora_name, lora.lora_path)
