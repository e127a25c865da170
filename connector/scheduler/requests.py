"""What the scheduler role knows of each request, and of vLLM's own prefix cache.

Owns which requests are cached at all, how a request's keys follow from what vLLM says of it, and
which blocks of vLLM's cache are stale: vLLM tells them apart by tokens, salt, and the name and path
of an adapter. So it may go on from KV of earlier weights, or of earlier files of an adapter, which
our keys do not describe. Does not own any decision about loading or storing.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from connector.client import SidecarSession
from connector.identity.adapters import Adapters
from connector.identity.groups import CachedGroup, Geometry, State
from connector.identity.speculative import NO_DRAFTS, Speculation
from connector.plan import Load
from connector.request_params import RequestParams, RequestParamsReader
from sidecar.protocol import tenant_id
from sidecar.protocol.prompts import PromptOutcome, TokenRun
from tiers.kv.keys import KeyChain, MediaItem, root_key

logger = logging.getLogger("vllm.kvlake")

_Name: TypeAlias = tuple[str, str]

_SEVERAL: Final = "several"
"""Instead of the digest of an adapter's files."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an engine, from vLLM's configuration."""

    reads: bool
    writes: bool
    world_size: int
    """Ranks that report each store."""
    steps_with_others: bool = False
    """Whether other data-parallel ranks wait for this one in each step."""
    separate_worker: bool = False
    """Whether workers have processes of their own."""
    num_blocks: int = 0
    """Blocks in the engine's pool; used with drafts only."""
    speculation: Speculation = NO_DRAFTS
    load_tokens_min: int = 64
    """A shorter load is not worth its extra scheduler step."""
    caches_media: bool = True
    """Whether vLLM's identifier of an image stands for its content."""
    beside_others: bool = False
    """Other connectors may load, too."""
    adapters: str = ""
    """How LoRA adapters are applied, unless by vLLM's defaults."""
    adapts_media: bool = False
    """Whether adapters change the embeddings of images."""


@dataclass(slots=True)
class SentLookup:
    """A lookup that was sent to the sidecar, which pins what it finds until the release."""

    lookup_id: int
    sent: float
    deadline: float
    session: SidecarSession


@dataclass(slots=True)
class GroupState:
    """One request in one KV cache group."""

    group: int
    geometry: Geometry
    chain: KeyChain
    tags: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty((0, 2), dtype=np.uint64))
    """Index tags of the chain's keys, for sessions with `tags_salt`."""
    tags_salt: bytes = b""
    partial_tags: dict[int, npt.NDArray[np.uint64]] = field(
        default_factory=dict[int, npt.NDArray[np.uint64]]
    )
    """Chunk index to the tags of its pieces, longest first."""
    next_chunk: int = 0
    """Chunks before this one were considered for storing."""

    def end_tokens(self, chunk: int, blocks: int) -> int:
        """Where the first `blocks` blocks of a chunk end."""
        return chunk * self.geometry.chunk_tokens + blocks * self.geometry.block_tokens


@dataclass(slots=True)
class RequestState:
    """One request, from its arrival to its end."""

    request: Any
    groups: list[GroupState]
    tenant: bytes
    """A digest of the cache salt; the salt itself is in no message."""
    adapter: str = ""
    """The files of its adapter, as workers report them."""
    request_params: RequestParams = field(default_factory=RequestParams)
    local_tokens: int = 0
    """vLLM's own hit."""
    begins_tokens: int = 0
    """The same, until the step that starts from it is planned."""
    known_tokens: int = 0
    """The same, and the end of our load. What vLLM counts beyond is another connector's load."""
    scheduled_tokens: int = 0
    """Since its blocks were last allocated."""
    lookup: SentLookup | None = None
    lookups_over: list[SentLookup] = field(default_factory=list[SentLookup])
    """To be released once the load is known."""
    asked: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """By the token of a session, vLLM's own hit when its sidecar was last asked to read."""
    from_store_keys: set[bytes] = field(default_factory=set[bytes])
    load: Load | None = None
    load_failed: bool = False
    void: bool = False
    """Its KV may be of other weights than its keys say, so it is neither loaded nor stored. Also of
    a request that came before the weights were identified."""
    prompt_tail_done: bool = False
    next_store_tokens: int = 0
    """With fewer computed tokens there is nothing more to store, unless states are handed over."""
    undrafted: bool = False
    """A step left out the drafter, whose layers lack KV from there on."""
    expects_until: float | None = None
    """The deadline for chunks of another engine."""
    expects_from: float = 0.0
    """When it began to wait for them."""
    expects_again: float = 0.0
    """When it is looked up next."""
    used: bool = False
    """The sidecar knows of its prompt."""
    counted: bool = False
    """It is a hit, a miss or neither in the statistics."""
    hit_sources: tuple[int, int] = (0, 0)
    """Tokens of the last load from host memory, and from the object store through it."""
    hit_runs: Sequence[TokenRun] = ()
    """The same tokens in their order."""
    late: tuple[float, float] = (0.0, 0.0)
    """Seconds of the last wait that was too long, and how long it might be."""
    declined: PromptOutcome | None = None
    """Why nothing was looked up for it when it was scheduled last."""
    found_tokens: int = 0
    """Where a hit ended that was too short to be loaded."""
    store_reason: PromptOutcome = PromptOutcome.NOT_ASKED
    """Why it does not load what only the object store has."""
    lookup_began: float = 0.0
    """When its first lookup began; the same of its first read and last load."""
    lookup_seconds: float = 0.0
    """Spent on lookups in the shared index."""
    read_began: float = 0.0
    read_seconds: float = 0.0
    """For which it waited for the object store."""
    load_began: float = 0.0
    load_seconds: float = 0.0
    loaded_bytes: tuple[int, int] = (0, 0)
    """Bytes of its last load, and of those that a read brought; known only if it is traced."""

    @property
    def chain(self) -> KeyChain:
        """Keys of its chunks in the first group, and all of its tokens."""
        return self.groups[0].chain

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt whose KV does not depend on what is generated."""
        return max(0, int(self.request.num_prompt_tokens) - self.chain.ahead_tokens)

    @property
    def adapter_id(self) -> int:
        """VLLM's number for its adapter; 0 without one."""
        lora = getattr(self.request, "lora_request", None)
        return 0 if lora is None else int(lora.lora_int_id)

    @property
    def in_flight_tokens(self) -> int:
        """Tokens of steps whose output vLLM has not taken yet."""
        return int(getattr(self.request, "num_in_flight_tokens", 0))

    @property
    def step_taken(self) -> bool:
        """Whether vLLM took the output of a step since the blocks were last allocated.

        That output says which loads failed. Steps are taken in the order of their tokens.
        """
        return self.scheduled_tokens > self.in_flight_tokens

    @property
    def attending(self) -> list[GroupState]:
        """Groups whose blocks hold something of each token, so they are stored by position."""
        return [group for group in self.groups if not group.geometry.attention.recurrent]

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Seconds spent on lookups, on waits for the object store, and on loads."""
        return self.lookup_seconds, self.read_seconds, self.load_seconds

    def extend(self) -> None:
        """Hash the tokens that were appended since."""
        chain = self.chain
        if self.request.num_tokens > chain.num_tokens:
            chain.extend(self.request.all_token_ids[chain.num_tokens :])
            for other in self.groups[1:]:
                other.chain.follow()


class PrefixCache:
    """The prefix cache in vLLM's block pool, and what is stale in it until its next reset."""

    def __init__(self, block_pool: Any) -> None:
        self._block_pool = block_pool
        self._planned: Any = None
        """The generation in the last step."""
        self._stale: dict[_Name | None, Any] = {}
        """A generation that has blocks of other files under this name and path, or, for None, from
        before a reset of the connector."""
        self._adapters: dict[_Name, str] = {}
        """The last files of each adapter."""

    @property
    def generation(self) -> Any:
        """VLLM's map of cached blocks, which is another object after each reset."""
        return self._block_pool.cached_block_hash_to_block

    def step(self) -> None:
        """Note that a step is planned, and forget what vLLM's last reset of its cache ended."""
        generation = self._planned = self.generation
        for name in [name for name, of in self._stale.items() if of is not generation]:
            del self._stale[name]

    def connector_reset(self) -> None:
        """Treat all blocks as stale, unless vLLM has reset its own cache as well."""
        if self.generation is self._planned:
            self._stale[None] = self.generation

    def stale(self, lora: Any) -> bool:
        """Whether a request with this adapter may share stale blocks."""
        names = (None,) if lora is None else (None, _name_of(lora))
        return any(self._stale.get(name) is self.generation for name in names)

    def distrust_adapter(self, lora: Any) -> None:
        """Treat the blocks under an adapter's name as stale: they may be of other files."""
        if lora is not None:
            self._stale[_name_of(lora)] = self.generation

    def register_adapter(self, lora: Any, files: str) -> None:
        """Note which adapter a new request has, and compare it with the last one of its name."""
        if lora is None:
            return
        name = _name_of(lora)
        if self._adapters.setdefault(name, files) != files:
            self._adapters[name] = files
            # Requests with the earlier files may still begin with what this one computes.
            self.distrust_adapter(lora)
            logger.warning(
                "kvlake: adapter %s in %s has other files than before, and vLLM's own prefix cache "
                "does not tell them apart: prompts that it holds a part of are not cached until it "
                "is reset; use a new path for new weights",
                *name,
            )

    def blocks_at(self, request: Any, end_tokens: int, groups: Sequence[int]) -> Sequence[Any]:
        """The cached block of each group that ends at `end_tokens`; empty if a group lacks it."""
        # Hashes may be of smaller blocks: a block has the hash of its last part.
        last = end_tokens // self._block_pool.hash_block_size - 1
        hashes = request.block_hashes
        if not 0 <= last < len(hashes):
            return ()
        blocks: Sequence[Any] | None = self._block_pool.get_cached_block(hashes[last], list(groups))
        return blocks or ()

    def states_at(self, request: Any, end_tokens: int, groups: Sequence[int]) -> list[State]:
        """As `states_of`, what vLLM has cached for these groups of recurrent layers."""
        blocks = self.blocks_at(request, end_tokens, groups) if groups else ()
        return [
            (group, block.block_id, end_tokens)
            for group, block in zip(groups, blocks, strict=bool(blocks))
        ]


def _name_of(lora: Any) -> _Name:
    """Name and path of an adapter, by which vLLM's prefix cache tells adapters apart."""
    return lora.lora_name, lora.lora_path


class Requests(dict[str, RequestState]):
    """Request id to state, of the requests that are cached."""

    def __init__(
        self, groups: Sequence[CachedGroup], settings: Settings, prefix_cache: PrefixCache
    ) -> None:
        super().__init__()
        self.adapters = Adapters(settings.world_size, self._void_adapter)
        self._settings = settings
        self._prefix_cache = prefix_cache
        self._groups = groups
        self.ended: list[RequestState] = []
        """Requests that ended and whose last stores were not sent yet."""
        self._reader = RequestParamsReader()
        self._files_by_name: dict[str, str] = {}
        """By the name of an adapter that may change embeddings."""
        self.generation = b""
        """Part of every new key. A new value hides everything that was stored before."""

    def track(self, request: Any) -> RequestState | None:
        """State of a request with its chain grown to all its tokens; None if it is not cached."""
        state = self.get(request.request_id)
        if state is None:
            # Before anything of the request is made, since another thread sets the digests.
            identified = all(group.namespace_digest for group in self._groups)
            if request.prompt_embeds is not None or request.resumable:
                # Embeddings have no token ids to hash. The next input of a streaming session
                # replaces tokens that were hashed already.
                return None
            if request.mm_features and not self._settings.caches_media:
                return None
            adapter = self.adapters.of(request.lora_request)
            if self._settings.adapts_media and self._has_old_embeddings(request, adapter or ""):
                return None
            if adapter is None:
                # vLLM's own prefix cache gets what it computes, under the adapter's name.
                self._prefix_cache.distrust_adapter(request.lora_request)
                return None
            state = RequestState(
                request,
                self._group_states(request, adapter + self._settings.adapters * bool(adapter)),
                tenant_id(request.cache_salt or ""),
                adapter,
                self._reader.read(request),
                # Its keys name no weights. It is tracked for the sake of adapters.
                void=not identified,
            )
            for other in self.unsent if state.adapter_id else ():
                # vLLM replaces an adapter at once, so it is unknown which files computed either.
                if other.adapter_id == state.adapter_id and other.adapter != state.adapter:
                    self.void(other)
                    if other.request.request_id in self:
                        self.void(state)
            self._prefix_cache.register_adapter(request.lora_request, adapter)
            self[request.request_id] = state
        state.extend()
        return state

    def _has_old_embeddings(self, request: Any, files: str) -> bool:
        """Whether images of a request may have embeddings of earlier files of its adapter.

        vLLM keeps embeddings by the adapter's name, whatever its path.
        """
        if request.lora_request is None:
            return False
        name: str = request.lora_request.lora_name
        if self._files_by_name.setdefault(name, files) not in (files, _SEVERAL):
            self._files_by_name[name] = _SEVERAL
            logger.warning(
                "kvlake: adapter %s has other files than before, and vLLM may keep embeddings that "
                "the earlier ones made: its requests with images are not cached until the engine "
                "is restarted; use a new name for new weights",
                name,
            )
        return bool(request.mm_features) and self._files_by_name[name] == _SEVERAL

    def end(self, request_id: str) -> RequestState | None:
        """Forget a request. Returns its state if it was cached."""
        state = self.pop(request_id, None)
        if state is not None:
            self.ended.append(state)
        return state

    @property
    def unsent(self) -> list[RequestState]:
        """Requests of which something may still be stored."""
        return [*self.values(), *self.ended]

    def void(self, state: RequestState) -> None:
        """Store nothing more of a request with an adapter."""
        state.void = True
        self._prefix_cache.distrust_adapter(state.request.lora_request)

    def _void_adapter(self, number: int, files: str) -> None:
        """Void requests with this adapter number and other files: vLLM may have loaded others."""
        for state in self.unsent:
            if state.adapter_id == number and state.adapter != files:
                self.void(state)

    def _group_states(self, request: Any, adapter: str) -> list[GroupState]:
        items = [(item.identifier, item.mm_position) for item in request.mm_features]
        media = [MediaItem(name, place.offset, place.length) for name, place in items]
        salt, generation = request.cache_salt or "", self.generation
        states: list[GroupState] = []
        for number, group in enumerate(self._groups):
            digest = group.namespace_digest
            root = root_key(digest, salt=salt, lora=adapter, generation=generation)
            chain = KeyChain(
                root,
                group.geometry.chunk_tokens,
                group.geometry.block_tokens,
                media,
                beside=states[0].chain if states else None,
                ahead_tokens=self._settings.speculation.ahead_tokens,
            )
            states.append(GroupState(number, group.geometry, chain))
        return states
