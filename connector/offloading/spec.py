"""`KVLakeOffloadingSpec`: kvlake below the host tier of vLLM's own `OffloadingConnector`.

The spec is vLLM's tiering spec with `KVLakeTier` as its last tier, and with a worker for the CPU
platform, for which vLLM has none.

Owns the note by which the two halves of an engine agree on a namespace and on where vLLM publishes
its KV events: only workers see vLLM's configuration, so the first of them leaves a note in /dev/shm
that the scheduler's half takes. Weights that must be read to identify them are read by that half,
in the versions that the worker noted.

Invariants: an engine whose identity is not known is served by vLLM's host tier alone, and one that
cannot continue from a cached prefix, or whose workers' rows do not fit, by no tier. No file name
outlives the start of an engine.
"""

import hashlib
import json
import logging
import os
import stat
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import connector.ownership  # noqa: F401 # pyright: ignore[reportUnusedImport] (checks at import)
from connector.client import UncachedNotice, UncachedReason
from connector.events import events_endpoints
from connector.identity import eligibility
from connector.identity.namespace import offloading_identity
from connector.identity.reading import Identity
from connector.identity.speculative import speculation_of, speculation_unsupported_reason
from connector.identity.weights import UnreadFiles, WeightsUnknown
from connector.offloading.cpu_worker import HostCopyWorker
from connector.offloading.workarounds import (
    call_before,
    disown_region,
    guard_tiers,
    unlink_region,
)
from connector.options import OFFLOADING_OPTIONS, log_unknown_options, option
from connector.vllm_workarounds import watch_engine_weights
from sidecar.protocol import Role, sockets_of

logger = logging.getLogger("vllm.kvlake")

TIER: Final = "KVLakeTier"
OWN_SETTINGS: Final = ("socket", "attach_seconds")
HOST_TIER_ALONE: Final = "kvlake: this engine is served by vLLM's host tier alone, because %s"
_UNREAD: Final = "kvlake_unread_files"
"""The key of `UnreadFiles` in a note."""


class NoTiers(OffloadingManager):
    """Has nothing and takes nothing."""

    def lookup(self, *_: Any, **_options: Any) -> LookupResult:
        """Always a miss."""
        return LookupResult.MISS

    def prepare_load(self, *_: Any, **_options: Any) -> LoadStoreSpec:
        """Never called: there are no hits."""
        raise NotImplementedError

    def prepare_store(self, *_: Any, **_options: Any) -> PrepareStoreOutput:
        """Stores nothing and evicts nothing."""
        return PrepareStoreOutput([], LoadStoreSpec(), [])

    def on_new_request(self, *_: Any, **_options: Any) -> RequestOffloadingContext:
        """No request is special."""
        return RequestOffloadingContext()


class NoCopies(OffloadingWorker):
    """The worker of an engine with `NoTiers`. It does not make vLLM's host tier."""

    def submit_store(self, *_: Any, **_options: Any) -> bool:
        """Never called: nothing is stored, and there are no hits."""
        raise NotImplementedError

    submit_load = submit_store

    def get_finished(self) -> list[TransferResult]:
        """There are no jobs."""
        return []

    def wait(self, job_ids: set[int]) -> None:
        """There are no jobs."""


class KVLakeOffloadingSpec(TieringOffloadingSpec):
    """vLLM's host tier with kvlake below it; settings are in `docs/how-to/vllm-offloading.md`."""

    _manager: OffloadingManager | None

    def __init__(self, config: OffloadingConfig) -> None:
        extra = dict(config.extra_config)
        tier = {"type": TIER, "module_path": "connector.secondary"}
        tier |= {name: extra[name] for name in OWN_SETTINGS if name in extra}
        tiers: list[dict[str, Any]] = [*extra.get("secondary_tiers", []), tier]
        super().__init__(replace(config, extra_config={**extra, "secondary_tiers": tiers}))
        self.secondary_tier_configs = tiers
        # Generated tokens begin the next turn's prompt. vLLM leaves them out by default.
        self.offload_prompt_only = bool(extra.get("offload_prompt_only", False))

    def get_manager(self) -> OffloadingManager:
        """Make vLLM's manager of tiers, with kvlake's as the last one."""
        if self._manager is None:
            log_unknown_options(self.config.extra_config, OFFLOADING_OPTIONS)
            note = take_note(self.config.engine_id)
            identity: Identity | None = None
            if "identity" in note:
                try:
                    identity = note["identity"] = Identity([note["identity"]], logs=True)
                except OSError as error:
                    note |= {"refusal": str(error), "reason": "weights"}
            manager = self._manager = self._make_manager(note)
            if refusal := note.get("refusal"):
                self._notify_uncached(manager, note.get("reason", "unsupported"), refusal)
            elif identity is not None:
                identity.then(partial(self._report_refusal, manager, identity))
        return self._manager

    def _report_refusal(self, manager: OffloadingManager, identity: Identity) -> None:
        if identity.refusal:
            logger.warning(HOST_TIER_ALONE, identity.refusal)
            self._notify_uncached(manager, "weights", identity.refusal)

    def _notify_uncached(
        self, manager: OffloadingManager, reason: UncachedReason, refusal: str
    ) -> None:
        sockets = sockets_of(self.config.extra_config.get("socket"))
        engine_id = str(self.config.engine_id)
        notice = UncachedNotice(sockets, Role.SCHEDULER, engine_id, reason, refusal)
        # vLLM closes neither, and drops the spec at once.
        weakref.finalize(manager, notice.close)

    def _make_manager(self, note: dict[str, Any]) -> OffloadingManager:
        refusal = note.get("refusal", "")
        if note.get("tiers") is False:
            logger.warning("kvlake: this engine is served by no tier, because %s", refusal)
            return NoTiers()
        preempted_are_new = note.get("preempted_are_new") is True
        if refusal:
            logger.warning(HOST_TIER_ALONE, refusal)
            self.secondary_tier_configs = self.secondary_tier_configs[:-1]
        else:
            self.secondary_tier_configs[-1] |= {
                "namespace": note["identity"],
                "preempted_are_new": preempted_are_new,
                **note.get("events", {}),
            }
        manager = super().get_manager()
        # Workers report no weight updates here, so those that bypass the engine core go unnoticed.
        watch_engine_weights(guard_tiers(manager, preempted_are_new=preempted_are_new))
        unlink_region(self.config.engine_id)
        disown_region(self._scheduler_mmap)
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make vLLM's worker, or kvlake's on the CPU platform."""
        from vllm.config import get_current_vllm_config
        from vllm.platforms import current_platform

        vllm_config = get_current_vllm_config()
        per_chunk = self.blocks_per_chunk
        reason = no_tier_reason(vllm_config, len(self.config.groups), per_chunk)
        if self.config.parallel.rank == 0:
            tokens = self.config.groups[0].tokens_per_block
            refused: dict[str, Any] = {"refusal": reason, "tiers": False}
            num_blocks = len(kv_caches.tensors[0].tensor) if kv_caches.tensors else None
            note = refused if reason else identity_note(vllm_config, tokens, num_blocks)
            index = vllm_config.parallel_config.data_parallel_index
            endpoint, replay = events_endpoints(vllm_config.kv_events_config, index)
            note["events"] = {"events_endpoint": endpoint, "events_replay": replay}
            note["preempted_are_new"] = bool(vllm_config.use_v2_model_runner)
            leave_note(self.config.engine_id, note)
        if reason:
            return NoCopies()
        if not current_platform.is_cpu():
            worker: Any = super().get_worker(kv_caches)
            disown_region(getattr(worker, "_mmap_region", None))
            self._remove_files_with(worker)
            return worker
        if self.config.canonical_layout:
            self._validate_canonical_refs(kv_caches)
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        disown_region(region)
        copier = HostCopyWorker(
            kv_caches,
            region,
            per_chunk,
            canonical=self.config.canonical_layout,
            several=self.config.parallel.world_size > 1,
        )
        self._remove_files_with(copier)
        return copier

    def _remove_files_with(self, worker: OffloadingWorker) -> None:
        """Remove note and region when a worker ends: a start that fails makes no manager."""
        engine_id = self.config.engine_id

        def remove() -> None:
            unlink_region(engine_id)
            note_path(engine_id).unlink(missing_ok=True)

        call_before(worker, "shutdown", remove)


def no_tier_reason(vllm_config: Any, num_groups: int, blocks_per_chunk: int) -> str:
    """Why not even vLLM's host tier can serve an engine, or nothing."""
    specs = layer_specs_of(vllm_config)
    return (
        # vLLM's host tier is a file of each node, and its scheduler knows one of them.
        eligibility.nodes_unsupported_reason(vllm_config)
        or eligibility.prefix_unsupported_reason(vllm_config, specs)
        or eligibility.host_tier_rows_unsupported_reason(vllm_config, num_groups)
        or eligibility.host_tier_chunks_unsupported_reason(vllm_config, specs, blocks_per_chunk)
    )


def identity_note(
    vllm_config: Any, block_tokens: int, num_blocks: int | None = None
) -> dict[str, Any]:
    """The first worker's note for the scheduler: an identity, or a refusal and its reason.

    The identity is still to be `completed`. `num_blocks` are those of the worker's caches.
    """
    specs = layer_specs_of(vllm_config)
    if reason := (
        eligibility.continuation_unsupported_reason(vllm_config)
        or speculation_unsupported_reason(vllm_config)
        or eligibility.prefix_match_unsupported_reason(vllm_config, specs, block_tokens)
    ):
        return {"refusal": reason}
    if reason := eligibility.media_unsupported_reason(vllm_config):
        # A tier sees only a request's blocks, and not which of them hold an image.
        return {"refusal": f"it takes images, audio or video, and {reason}"}
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    if vllm_config.lora_config is not None and not option(extra, "adapters_by_path", False):
        return {
            "refusal": "it serves LoRA adapters, which vLLM's block hashes know by name and path "
            "only; if a path never comes to mean another adapter, set adapters_by_path to true"
        }
    try:
        drafter = speculation_of(vllm_config).drafter
        identity = offloading_identity(vllm_config, block_tokens)
    except (WeightsUnknown, OSError) as error:
        return {"refusal": str(error), "reason": "weights"}
    if drafter:
        # The drafter's layers are in the same blocks, and vLLM's hashes do not cover it.
        identity["drafter"] = drafter
    if parts := kernel_blocks_of(_layers_of(vllm_config), num_blocks):
        # A row has the bytes of whole blocks. They lie otherwise in a block that is split.
        identity["kernel_blocks"] = parts
    return {"identity": identity}


def _layers_of(vllm_config: Any) -> list[Any]:
    """The layers of this worker's model, which vLLM does not show an offloading spec."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    kind: Any = AttentionLayerBase
    layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, kind)
    return list(layers.values())


def layer_specs_of(vllm_config: Any) -> list[Any]:
    """Specs of these layers."""
    return [layer.get_kv_cache_spec(vllm_config) for layer in _layers_of(vllm_config)]


def kernel_blocks_of(layers: Sequence[Any], num_blocks: int | None) -> list[int]:
    """Into how many blocks of its kernels vLLM splits a block, where it splits any.

    Which kernels there are may depend on what is installed, and on what a start can download.
    """
    if not num_blocks:
        return []
    caches: list[Any] = [vars(layer).get("kv_cache") for layer in layers]
    caches = [one[0] if isinstance(one, (list, tuple)) and one else one for one in caches]
    parts = {len(one) // num_blocks for one in caches if isinstance(one, torch.Tensor) and one.ndim}
    return sorted(part for part in parts if part > 1)


def note_path(engine_id: str) -> Path:
    """The file of `leave_note`, beside vLLM's own region."""
    name = hashlib.sha256(engine_id.encode()).hexdigest()[:32]
    return Path(f"/dev/shm/kvlake-offloading-{os.getuid()}-{name}.json")  # noqa: S108


def leave_note(engine_id: str, note: dict[str, Any]) -> None:
    """Leave a note for the scheduler of this engine, in a file that only this user can read."""
    path = note_path(engine_id)
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "w") as file:
        json.dump(note, file, default=_unread_to_json)


def _unread_to_json(unread: Any) -> dict[str, Any]:
    assert isinstance(unread, UnreadFiles), "a description has nothing else beside JSON"
    return {_UNREAD: unread.files, "single": unread.single}


def _unread_from_json(found: dict[str, Any]) -> Any:
    if _UNREAD not in found:
        return found
    files = [(name, digest, stamp) for name, digest, stamp in found[_UNREAD]]
    return UnreadFiles(files, single=found["single"])


def take_note(engine_id: str) -> dict[str, Any]:
    """The note of the first worker; a refusal if this user left none."""
    path = note_path(engine_id)
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags)) as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
                return {"refusal": f"{path} belongs to another user or is no file; remove it"}
            note: dict[str, Any] = json.load(file, object_hook=_unread_from_json)
        path.unlink()
    except (OSError, ValueError) as error:
        return {"refusal": f"its first worker is not on this machine ({error})"}
    return note
