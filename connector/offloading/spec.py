"""`KVLakeOffloadingSpec`: kvlake behind vLLM's own `OffloadingConnector`.

vLLM's offloading interface knows no failed load: what was said to be there when a request was
scheduled must come (its worker asserts it). No cache that another process holds can promise that.
So chunks are brought into vLLM's own host tier before vLLM is told of a hit. This spec is vLLM's
tiering spec with `KVLakeTier` below its host tier (`tier.py`), and with a worker for engines
on the CPU platform, which vLLM has none for (`cpu_worker.py`).

Owns how the two halves of an engine agree on a namespace, and on where vLLM publishes its KV
events: the workers see vLLM's configuration, the scheduler's half is not shown it, so the first
worker leaves a note that the scheduler takes.

Invariants: an engine that cannot be told from others is served by vLLM's host tier alone. By none
is one that cannot go on from a cached prefix, or whose workers' rows of that tier do not fit. No
name of a file outlives the start of an engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import connector.ownership  # noqa: F401 # pyright: ignore[reportUnusedImport] (looks first)
from connector.client import UncachedNotice
from connector.events import events_endpoints
from connector.identity.eligibility import (
    chunks_refusal,
    faults_refusal,
    media_refusal,
    prefix_refusal,
    rows_refusal,
    tails_refusal,
)
from connector.identity.namespace import offloading_identity
from connector.identity.speculative import speculation_of, speculation_unsupported_reason
from connector.identity.weights import WeightsUnknown
from connector.offloading.cpu_worker import HostCopyWorker
from connector.offloading.workarounds import disown_region, guard_tiers, unlink_region
from connector.options import OFFLOADING_OPTIONS, log_unknown_options, option
from connector.vllm_workarounds import watch_engine_weights
from sidecar.protocol import Role, sockets_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        GPULoadStoreSpec,
        OffloadKey,
        ReqContext,
        TransferResult,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig

    from connector.client import UncachedReason

logger = logging.getLogger("vllm.kvlake")

TIER: Final = "KVLakeTier"
OWN_SETTINGS: Final = ("socket", "attach_seconds")
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 (vLLM's region is there as well)


class NoTiers(OffloadingManager):
    """Has nothing and takes nothing."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:  # noqa: ARG002
        """It is not there."""
        return LookupResult.MISS

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Never asked for: nothing was said to be there."""
        raise NotImplementedError

    def prepare_store(
        self,
        keys: Collection[OffloadKey],  # noqa: ARG002
        req_context: ReqContext,  # noqa: ARG002
    ) -> PrepareStoreOutput:
        """None of them is to be stored, and none was given up for that."""
        return PrepareStoreOutput([], LoadStoreSpec(), [])

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        """As of any other."""
        return RequestOffloadingContext()


class NoCopies(OffloadingWorker):
    """The worker of an engine with `NoTiers`, where vLLM's host tier must not even be made."""

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Never asked for: nothing was said to be stored."""
        raise NotImplementedError

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Never asked for: nothing was said to be there."""
        raise NotImplementedError

    def get_finished(self) -> list[TransferResult]:
        """There are none."""
        return []

    def wait(self, job_ids: set[int]) -> None:
        """There are none."""


class KVLakeOffloadingSpec(TieringOffloadingSpec):
    """The host tier of vLLM with kvlake below it (docs/how-to/vllm-offloading.md)."""

    _manager: OffloadingManager | None

    def __init__(self, config: OffloadingConfig) -> None:
        extra = dict(config.extra_config)
        tier = {"type": TIER, "module_path": "connector.secondary"}
        tier |= {name: extra[name] for name in OWN_SETTINGS if name in extra}
        tiers: list[dict[str, Any]] = [*extra.get("secondary_tiers", []), tier]
        super().__init__(replace(config, extra_config={**extra, "secondary_tiers": tiers}))
        self.secondary_tier_configs = tiers
        # What was generated is the start of the next turn. vLLM leaves it out unless told.
        self.offload_prompt_only = bool(extra.get("offload_prompt_only", False))

    def get_manager(self) -> OffloadingManager:
        """The manager of tiers, which is vLLM's, with ours as the last."""
        if self._manager is None:
            log_unknown_options(self.config.extra_config, OFFLOADING_OPTIONS)
            note = take_note(self.config.engine_id)
            self._manager = self._make_manager(note)
            if refusal := note.get("refusal"):
                self._decline(self._manager, note.get("reason", "unsupported"), refusal)
        return self._manager

    def _make_manager(self, note: dict[str, Any]) -> OffloadingManager:
        refusal = note.get("refusal", "")
        preempted_are_new = note.get("preempted_are_new") is True
        if note.get("rows") is False:
            logger.warning("kvlake: this engine is served by no tier, because %s", refusal)
            return NoTiers()
        if note.get("prefixes") is False:
            # Of vLLM's host tier, too, it would load them.
            logger.warning(
                "kvlake: this engine is served by no tier, because %s; its workers have taken "
                "cpu_bytes_to_use of host memory all the same; start it without the connector",
                refusal,
            )
            unlink_region(self.config.engine_id)
            return NoTiers()
        if refusal:
            logger.warning(
                "kvlake: this engine is served by vLLM's host tier alone, because %s", refusal
            )
            self.secondary_tier_configs = self.secondary_tier_configs[:-1]
        else:
            self.secondary_tier_configs[-1] |= {
                "namespace": note["identity"],
                "preempted_are_new": preempted_are_new,
                **note.get("events", {}),
            }
        manager = super().get_manager()
        requests = guard_tiers(manager, preempted_are_new=preempted_are_new)
        # Of changes that go round the engine core nothing is heard: a worker here tells none.
        watch_engine_weights(requests)
        unlink_region(self.config.engine_id)
        disown_region(self._scheduler_mmap)
        return manager

    def _decline(self, manager: OffloadingManager, reason: UncachedReason, refusal: str) -> None:
        """Have the sidecar tell that it is not used, for as long as the manager is there."""
        sockets = sockets_of(self.config.extra_config.get("socket"))
        engine_id = str(self.config.engine_id)
        declining = UncachedNotice(sockets, Role.SCHEDULER, engine_id, reason, refusal)
        # vLLM ends neither, and forgets the spec at once.
        weakref.finalize(manager, declining.close)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker, which is vLLM's, or ours on the CPU platform."""
        from vllm.config import get_current_vllm_config
        from vllm.platforms import current_platform

        vllm_config = get_current_vllm_config()
        reason = rows_refusal(vllm_config, len(self.config.groups)) or chunks_refusal(
            vllm_config, layer_specs_of(vllm_config), self.blocks_per_chunk
        )
        if self.config.parallel.rank == 0:
            tokens = self.config.groups[0].tokens_per_block
            note: dict[str, Any] = (
                {"refusal": reason, "rows": False} if reason else identity_note(vllm_config, tokens)
            )
            note["events"] = _events(vllm_config)
            note["preempted_are_new"] = bool(vllm_config.use_v2_model_runner)
            leave_note(self.config.engine_id, note)
        if reason:
            return NoCopies()
        if not current_platform.is_cpu():
            worker: Any = super().get_worker(kv_caches)
            disown_region(getattr(worker, "_mmap_region", None))
            return worker
        canonical = self.config.canonical_layout
        if canonical:
            self._validate_canonical_refs(kv_caches)
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        disown_region(region)
        return HostCopyWorker(
            kv_caches,
            region,
            self.blocks_per_chunk,
            canonical=canonical,
            several=self.config.parallel.world_size > 1,
        )


def identity_note(vllm_config: Any, block_tokens: int) -> dict[str, Any]:
    """What the first worker notes for the scheduler: an identity, or a refusal and its reason."""
    specs = layer_specs_of(vllm_config)
    if reason := prefix_refusal(vllm_config, specs):
        return {"refusal": reason, "prefixes": False}
    if reason := (
        faults_refusal(vllm_config)
        or speculation_unsupported_reason(vllm_config)
        or tails_refusal(vllm_config, specs, block_tokens)
    ):
        return {"refusal": reason}
    if reason := media_refusal(vllm_config):
        # A request's blocks are all that is seen here, and not which of them hold an image.
        return {"refusal": f"it takes images, audio or video, and {reason}"}
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    if vllm_config.lora_config is not None and not option(extra, "adapters_by_path", False):
        return {
            "refusal": "it serves LoRA adapters, which vLLM's block hashes know by name and path "
            "only; where a path never comes to mean another adapter, set adapters_by_path to true"
        }
    try:
        drafter = speculation_of(vllm_config).drafter
        identity = offloading_identity(vllm_config, block_tokens)
    except (WeightsUnknown, OSError) as error:
        return {"refusal": str(error), "reason": "weights"}
    # Its layers are in the same blocks, and vLLM's hashes know nothing of it.
    return {"identity": identity | ({"drafter": drafter} if drafter else {})}


def _events(vllm_config: Any) -> dict[str, str]:
    """Where the engine publishes its own KV events, as `KVLakeTier` takes it."""
    index = vllm_config.parallel_config.data_parallel_index
    endpoint, replay = events_endpoints(vllm_config.kv_events_config, index)
    return {"events_endpoint": endpoint, "events_replay": replay}


def layer_specs_of(vllm_config: Any) -> list[Any]:
    """Of the layers of this worker's model: vLLM shows a spec less than that."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    kind: Any = AttentionLayerBase
    layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, kind)
    return [layer.get_kv_cache_spec(vllm_config) for layer in layers.values()]


def note_path(engine_id: str) -> Path:
    """The file of `leave_note`."""
    name = hashlib.sha256(engine_id.encode()).hexdigest()[:32]
    return _SHARED_MEMORY / f"kvlake-offloading-{os.getuid()}-{name}.json"


def leave_note(engine_id: str, note: dict[str, Any]) -> None:
    """What the scheduler of this engine is to know, in a file that only this user can read."""
    path = note_path(engine_id)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "w") as file:
        json.dump(note, file)


def take_note(engine_id: str) -> dict[str, Any]:
    """What the first worker left; a refusal where there is nothing of this user's."""
    path = note_path(engine_id)
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags)) as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
                return {"refusal": f"{path} is somebody else's; remove it"}
            note: dict[str, Any] = json.load(file)
        path.unlink()
    except (OSError, ValueError) as error:
        return {"refusal": f"its first worker is not on this machine ({error})"}
    return note
