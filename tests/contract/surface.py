"""What kvlake stands on in vLLM: symbols, members, and the order of calls.

`USED` is what must be there and how it must look; `BASE` says of every method of
`KVConnectorBase_V1` whether kvlake overrides it or why it leaves it alone, so that a release that
adds one is noticed. `moved` compares both with a manifest (`manifests/*.json`), which
`python -m tests.contract` makes from vLLM's source.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.contract.reading import Sources

MANIFESTS: Final = Path(__file__).parent / "manifests"

ATTRIBUTE: Final = "attribute"
PROPERTY: Final = "property"
CONNECTOR: Final = "vllm.distributed.kv_transfer.kv_connector"
BASE_CLASS: Final = f"{CONNECTOR}.v1.base:KVConnectorBase_V1"


@dataclass(frozen=True)
class Used:
    """One symbol. `members` as in `reading.py`; `since` is the first release that has it."""

    members: dict[str, str] = field(default_factory=dict[str, str])
    since: str = "0"


def _attributes(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), ATTRIBUTE)


OVERRIDDEN: Final[dict[str, str]] = {
    "__init__": "(vllm_config, role, kv_cache_config)",
    "requires_kv_delivery": PROPERTY,
    "get_mem_pool_context": "()",
    "get_required_kvcache_layout": "class (vllm_config)",
    "register_kv_caches": "(kv_caches)",
    "start_load_kv": "abstract (forward_context, **kwargs)",
    "wait_for_layer_load": "abstract (layer_name)",
    "save_kv_layer": "abstract (layer_name, kv_layer, attn_metadata, **kwargs)",
    "wait_for_save": "abstract ()",
    "get_transfer_results": "(finished_req_ids)",
    "build_connector_worker_meta": "()",
    "bind_gpu_block_pool": "(gpu_block_pool)",
    "on_new_request": "(request)",
    "get_num_new_matched_tokens": "abstract (request, num_computed_tokens)",
    "update_state_after_alloc": "abstract (request, blocks, num_external_tokens)",
    "build_connector_meta": "abstract (scheduler_output)",
    "update_connector_output": "(connector_output)",
    "request_finished": "(request, block_ids)",
    "has_pending_block_frees": "()",
    "has_pending_push_work": "()",
    "get_external_cache_hit_sources": "(request, num_external_tokens)",
    "take_events": "()",
    "get_kv_connector_stats": "()",
    "build_kv_connector_stats": "class (data=)",
    "build_prom_metrics": "class (vllm_config, metric_types, labelnames, per_engine_labelvalues)",
    "reset_cache": "()",
    "shutdown": "()",
    "supports_sleep_mode": "class (kv_transfer_config)",
    "unregister_kv_caches": "()",
    "restore_kv_caches": "()",
}
"""Methods of the base class that `KVLakeConnector` overrides."""

LEFT_ALONE: Final[dict[str, str]] = {
    "role": "set by the base class",
    "bind_connector_metadata": "the base class keeps the step's metadata",
    "clear_connector_metadata": "the base class drops it again",
    "has_connector_metadata": "the base class knows",
    "_get_connector_metadata": "called, not overridden",
    "supports_divergent_local_hybrid_hits": "False: a hit goes on from where all groups agree",
    "set_host_xfer_buffer_ops": "no host buffer of vLLM's is used",
    "finish_forward": "what a step reads is told by its fence",
    "reset_capture_state": "nothing is captured in a CUDA graph",
    "handle_preemptions": "blocks of stores are held by references; preempting frees none of them",
    "get_finished": "get_transfer_results says the same and more",
    "get_block_ids_with_load_errors": "failed loads are told by request, in get_transfer_results",
    "get_kv_connector_kv_cache_events": "the sidecar tells a chunk once all ranks have it",
    "get_handshake_metadata": "ranks do not talk to each other",
    "set_xfer_handshake_metadata": "ranks do not talk to each other",
    "set_xfer_handshake_metadata_pp_aware": "ranks do not talk to each other",
    "bind_kv_cache_manager": "the block pool is enough",
    "get_loaded_kv_cache_group_ids": "the prefix-cacheable groups, as the base class says",
    "register_finished_partial_tail": "the tail was stored when the request finished",
    "requires_piecewise_for_cudagraph": "False: nothing is done between layers",
    "get_finished_count": "every rank reports",
}
"""Methods of the base class that kvlake does not override, and why."""

NOT_IN_EVERY_RELEASE: Final[dict[str, str]] = {
    "get_external_cache_hit_sources": "0.32",
    "get_loaded_kv_cache_group_ids": "0.32",
    "supports_sleep_mode": "0.33",
    "unregister_kv_caches": "0.33",
    "restore_kv_caches": "0.33",
}
"""Members of the base class, and the first supported release that has them."""

_EVENT: Final = "vllm.distributed.kv_events"
_OFFLOAD: Final = "vllm.v1.kv_offload"
"""vLLM's own offloading. kvlake serves it from 0.32 on."""

USED: Final[dict[str, Used]] = {
    f"{CONNECTOR}.v1.base:SupportsHMA": Used(
        {"request_finished_all_groups": "abstract (request, block_ids)"}
    ),
    f"{CONNECTOR}.v1.base:supports_hma": Used({"": "(connector)"}),
    f"{CONNECTOR}.v1.base:KVConnectorMetadata": Used(),
    f"{CONNECTOR}.v1.base:KVConnectorWorkerMetadata": Used({"aggregate": "abstract (other)"}),
    f"{CONNECTOR}.v1.base:KVConnectorTransferResults": Used(
        _attributes("finished_sending finished_recving failed_recving")
    ),
    f"{CONNECTOR}.v1.base:KVConnectorRole": Used(_attributes("SCHEDULER WORKER")),
    f"{CONNECTOR}.v1.metrics:KVConnectorStats": Used(
        {
            "data": ATTRIBUTE,
            "reset": "()",
            "aggregate": "(other)",
            "reduce": "()",
            "is_empty": "()",
        }
    ),
    f"{CONNECTOR}.v1.metrics:KVConnectorPromMetrics": Used(
        {
            "__init__": "(vllm_config, metric_types, labelnames, per_engine_labelvalues)",
            "_counter_cls": ATTRIBUTE,
            "observe": "(transfer_stats_data, engine_idx=)",
        }
    ),
    f"{CONNECTOR}.factory:KVConnectorFactory": Used(
        {
            "register_connector": "class (name, module_path, class_name)",
            "get_connector_class": "class (kv_transfer_config)",
            "create_connector": "class (config, role, kv_cache_config)",
        }
    ),
    f"{CONNECTOR}.utils:KVOutputAggregator": Used({"aggregate": "(outputs, output_rank=)"}),
    f"{_EVENT}:EventBatch": Used(_attributes("ts events data_parallel_rank")),
    f"{_EVENT}:KVEventBatch": Used(_attributes("events")),
    f"{_EVENT}:BlockStored": Used(
        _attributes(
            "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name "
            "extra_keys group_idx kv_cache_spec_kind kv_cache_spec_sliding_window locality "
            "ownership session_id"
        )
    ),
    f"{_EVENT}:BlockRemoved": Used(_attributes("block_hashes medium group_idx locality ownership")),
    f"{_EVENT}:AllBlocksCleared": Used(),
    f"{_EVENT}:MEDIUM_GPU": Used({"": ATTRIBUTE}),
    f"{_EVENT}:MEDIUM_CPU": Used({"": ATTRIBUTE}),
    f"{_EVENT}:MEDIUM_STORAGE": Used({"": ATTRIBUTE}),
    f"{_EVENT}:ZmqEventPublisher": Used(
        {
            "END_SEQ": ATTRIBUTE,
            "__init__": "(data_parallel_rank, endpoint=, replay_endpoint=, buffer_steps=, hwm=, "
            "max_queue_size=, topic=)",
            "offset_endpoint_port": "static (endpoint, data_parallel_rank)",
        }
    ),
    "vllm.config.kv_events:KVEventsConfig": Used(
        _attributes(
            "enable_kv_cache_events publisher endpoint replay_endpoint buffer_steps hwm "
            "max_queue_size topic"
        )
    ),
    "vllm.config.kv_transfer:KVTransferConfig": Used(
        _attributes(
            "kv_connector engine_id kv_role kv_connector_extra_config kv_connector_module_path "
            "kv_load_failure_policy"
        )
        | {"is_kv_producer": PROPERTY, "is_kv_consumer": PROPERTY}
    ),
    "vllm.config.vllm:VllmConfig": Used(
        _attributes(
            "attention_config cache_config kv_events_config kv_transfer_config load_config "
            "mamba_config model_config parallel_config scheduler_config speculative_config"
        )
    ),
    "vllm.config.model:ModelConfig": Used(
        _attributes(
            "model model_weights revision hf_config hf_text_config hf_overrides quantization "
            "max_model_len use_mla"
        )
        | {
            "enable_sleep_mode": ATTRIBUTE,
            "dtype": ATTRIBUTE,
            "get_head_size": "()",
            "get_total_num_kv_heads": "()",
            "get_total_num_hidden_layers": "()",
        }
    ),
    "vllm.config.parallel:ParallelConfig": Used(
        _attributes(
            "tensor_parallel_size pipeline_parallel_size decode_context_parallel_size "
            "prefill_context_parallel_size world_size"
        )
    ),
    "vllm.config.speculative:SpeculativeConfig": Used(
        _attributes(
            "method num_speculative_tokens parallel_drafting draft_model_config draft_load_config "
            "draft_parallel_config num_speculative_tokens_per_batch_size"
        )
        | {
            "use_multi_module_mtp": "()",
            "use_gemma4_mtp": "()",
            "use_step3p5_mtp": "()",
        }
    ),
    "vllm.config.cache:CacheConfig": Used(
        _attributes("cache_dtype block_size prefix_caching_hash_algo prefix_match_unit")
    ),
    "vllm.config.mamba:MambaConfig": Used(_attributes("backend enable_stochastic_rounding")),
    "vllm.config.scheduler:SchedulerConfig": Used(_attributes("enable_chunked_prefill")),
    "vllm.config.load:LoadConfig": Used(_attributes("load_format")),
    "vllm.config.attention:AttentionConfig": Used(_attributes("backend")),
    "vllm.v1.core.sched.output:SchedulerOutput": Used(
        _attributes("num_scheduled_tokens total_num_scheduled_tokens kv_connector_block_state")
    ),
    "vllm.v1.core.sched.output:KVConnectorBlockState": Used(
        {"get_block_ids": "(req_id)", "boundary_state_offloads": ATTRIBUTE}
    ),
    "vllm.v1.outputs:KVConnectorOutput": Used(
        _attributes("finished_recving failed_recving kv_connector_worker_meta kv_cache_events")
        | {"is_empty": "()"}
    ),
    "vllm.v1.kv_cache_interface:KVCacheConfig": Used(_attributes("num_blocks kv_cache_groups")),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": Used(_attributes("layer_names kv_cache_spec")),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": Used(
        _attributes("block_size num_kv_heads head_size head_size_v dtype")
    ),
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": Used(_attributes("sliding_window")),
    "vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec": Used(
        _attributes("attention_chunk_size")
    ),
    "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs": Used(_attributes("kv_cache_specs")),
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": Used(
        _attributes("block_size head_size head_size_v dtype page_size_padded tokens_per_state")
    ),
    "vllm.v1.kv_cache_interface:MambaSpec": Used(
        _attributes(
            "shapes dtypes mamba_type mamba_cache_mode num_speculative_blocks num_heads "
            "tp_replicated"
        )
    ),
    "vllm.v1.kv_cache_layout:KVCacheLayout": Used(_attributes("BLHNC LBHNC")),
    "vllm.v1.core.block_pool:BlockPool": Used(
        {
            "blocks": ATTRIBUTE,
            "hash_block_size": ATTRIBUTE,
            "touch": "(blocks)",
            "free_blocks": "(ordered_blocks)",
            "get_cached_block": "(block_hash, kv_cache_group_ids)",
        }
    ),
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": Used(_attributes("block_id ref_cnt is_null")),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": Used({"get_block_ids": "(allow_none=)"}),
    "vllm.v1.request:Request": Used(
        _attributes(
            "request_id all_token_ids block_hashes cache_salt lora_request mm_features "
            "num_computed_tokens num_in_flight_tokens num_prompt_tokens prompt_embeds resumable "
            "skip_reading_prefix_cache kv_transfer_params"
        )
        | {"num_tokens": PROPERTY}
    ),
    f"{_OFFLOAD}.base:OffloadingSpec": Used(
        _attributes("config extra_config offload_prompt_only blocks_per_chunk replicated_layout")
        | {
            "get_manager": "abstract ()",
            "get_worker": "abstract (kv_caches)",
            "build_metric_definitions": "class (extra_config)",
        },
        "0.32",
    ),
    f"{_OFFLOAD}.base:OffloadingWorker": Used(
        {
            "submit_store": "abstract (job_id, src_spec, dst_spec)",
            "submit_load": "abstract (job_id, src_spec, dst_spec)",
            "get_finished": "abstract ()",
            "wait": "abstract (job_ids)",
            "shutdown": "()",
        },
        "0.32",
    ),
    f"{_OFFLOAD}.base:TransferResult": Used(
        _attributes("job_id success transfer_size transfer_time"), "0.32"
    ),
    f"{_OFFLOAD}.base:GPULoadStoreSpec": Used(
        _attributes("block_ids group_sizes block_indices"), "0.32"
    ),
    f"{_OFFLOAD}.base:CanonicalKVCaches": Used(_attributes("tensors group_data_refs"), "0.32"),
    f"{_OFFLOAD}.base:CanonicalKVCacheTensor": Used(_attributes("tensor page_size_bytes"), "0.32"),
    f"{_OFFLOAD}.base:CanonicalKVCacheRef": Used(
        _attributes("tensor_idx page_size_bytes mapping"), "0.32"
    ),
    f"{_OFFLOAD}.base:CanonicalPageMapping": Used(
        _attributes("canonical_page_size_bytes runs num_writers writer_index"), "0.32"
    ),
    f"{_OFFLOAD}.base:CopyRun": Used(
        _attributes(
            "local_offset canonical_offset fragment_size num_fragments local_stride "
            "canonical_stride"
        ),
        "0.32",
    ),
    f"{_OFFLOAD}.base:ReqContext": Used(
        _attributes("req_id kv_transfer_params load_tier_filter")
        | {"get_offload_key_position": "(key)"},
        "0.32",
    ),
    f"{_OFFLOAD}.base:TierFilter": Used({"allows": "(medium, locality)"}, "0.32"),
    f"{_OFFLOAD}.base:LookupResult": Used(_attributes("MISS HIT HIT_PENDING RETRY"), "0.32"),
    f"{_OFFLOAD}.base:Medium": Used(_attributes("CPU STORAGE"), "0.32"),
    f"{_OFFLOAD}.base:Locality": Used(_attributes("LOCAL REMOTE"), "0.32"),
    f"{_OFFLOAD}.base:OffloadingEvent": Used(
        _attributes("keys medium removed locality ownership"), "0.32"
    ),
    f"{_OFFLOAD}.base:RequestOffloadingContext": Used(_attributes("policy"), "0.32"),
    f"{_OFFLOAD}.base:OffloadKey": Used({"": ATTRIBUTE}, "0.32"),
    f"{_OFFLOAD}.base:ScheduleEndContext": Used({}, "0.32"),
    f"{_OFFLOAD}.base:LoadStoreSpec": Used({}, "0.32"),
    f"{_OFFLOAD}.base:BlockIDsLoadStoreSpec": Used(_attributes("block_ids"), "0.32"),
    f"{_OFFLOAD}.base:OffloadingManager": Used(
        {"on_new_request": "abstract (req_context)", "on_request_finished": "(req_context)"},
        "0.32",
    ),
    f"{_OFFLOAD}.base:get_offload_group_idx": Used({"": "(key)"}, "0.32"),
    f"{_OFFLOAD}.config:OffloadingConfig": Used(
        _attributes(
            "groups enable_kv_cache_events extra_config engine_id model cache parallel "
            "replicated_layout canonical_layout kv_cache_layout"
        ),
        "0.32",
    ),
    f"{_OFFLOAD}.config:OffloadingGroupConfig": Used(
        _attributes("tokens_per_block layer_names group_id"), "0.32"
    ),
    f"{_OFFLOAD}.config:OffloadingModelConfig": Used(_attributes("name dtype"), "0.32"),
    f"{_OFFLOAD}.config:OffloadingCacheConfig": Used(
        _attributes("tokens_per_hash blocks_per_chunk"), "0.32"
    ),
    f"{_OFFLOAD}.config:OffloadingParallelConfig": Used(
        _attributes("rank tp_size pp_size pcp_size dcp_size is_parallelism_agnostic"), "0.32"
    ),
    f"{_OFFLOAD}.cpu.spec:CPUOffloadingSpec": Used(
        _attributes("num_chunks kv_bytes_per_chunk cpu_page_size_per_worker _manager")
        | {"get_worker": "(kv_caches)"},
        "0.32",
    ),
    f"{_OFFLOAD}.cpu.shared_offload_region:SharedOffloadRegion": Used(
        {
            "__init__": "(engine_id, num_chunks, rank, kv_bytes_per_chunk, cpu_page_size)",
            "mmap_path": ATTRIBUTE,
            "_creator": ATTRIBUTE,
            "create_next_worker_view": "(tensor_page_size)",
            "create_next_canonical_view": "(tensor_page_size)",
            "cleanup": "()",
        },
        "0.32",
    ),
    f"{_OFFLOAD}.cpu.gpu_worker:CPUOffloadingWorker": Used(_attributes("_mmap_region"), "0.32"),
    f"{_OFFLOAD}.tiering.spec:TieringOffloadingSpec": Used(
        _attributes("secondary_tier_configs _scheduler_mmap")
        | {
            "__init__": "(config)",
            "get_manager": "()",
            "_validate_canonical_refs": "(kv_caches)",
        },
        "0.32",
    ),
    f"{_OFFLOAD}.tiering.base:SecondaryTierManager": Used(
        {
            "__init__": "(offloading_spec, primary_kv_view, tier_type, backpressure_detector=)",
            "medium": ATTRIBUTE,
            "cache_hit_source": ATTRIBUTE,
            "lookup": "abstract (key, req_context)",
            "submit_store": "abstract (job_metadata)",
            "submit_load": "abstract (job_metadata)",
            "get_finished_jobs": "abstract ()",
            "has_pending_work": "()",
            "take_events": "()",
            "on_new_request": "abstract (req_context)",
            "on_request_finished": "(req_context)",
            "on_schedule_end": "(context)",
            "drain_jobs": "abstract ()",
            "shutdown": "()",
        },
        "0.32",
    ),
    f"{_OFFLOAD}.tiering.base:TransferJob": Used(
        _attributes("job_id keys chunk_ids req_context"), "0.32"
    ),
    f"{_OFFLOAD}.tiering.base:JobResult": Used(
        _attributes("job_id success successful_keys transfer_time transfer_bytes"), "0.32"
    ),
    f"{_OFFLOAD}.tiering.factory:SecondaryTierFactory": Used(
        {
            "create_secondary_tier": "class (tier_config, primary_kv_view, offloading_spec)",
            "get_tier_class": "class (tier_config)",
        },
        "0.32",
    ),
    f"{_OFFLOAD}.factory:OffloadingSpecFactory": Used(
        {"get_spec_cls": "class (extra_config)", "create_spec": "class (config)"}, "0.32"
    ),
    f"{CONNECTOR}.v1.offloading.canonical_mapping:canonical_format_id": Used(
        {"": "(kv_cache_layout)"}, "0.32"
    ),
    f"{CONNECTOR}.v1.offloading_connector:OffloadingConnector": Used(
        {"__init__": "(vllm_config, role, kv_cache_config)"}, "0.32"
    ),
    "vllm.config.vllm:get_current_vllm_config": Used({"": "()"}),
    "vllm.lora.request:LoRARequest": Used(
        _attributes("lora_name lora_int_id lora_path load_inplace")
    ),
    "vllm.multimodal.inputs:MultiModalFeatureSpec": Used(_attributes("identifier mm_position")),
    "vllm.multimodal.inputs:PlaceholderRange": Used(_attributes("offset length")),
    "vllm.v1.metrics.cache_hit_source:CacheHitSource": Used(_attributes("HOST DISK"), "0.32"),
    "vllm.v1.attention.backends.cpu_attn:_get_attn_isa": Used(
        {"": "(dtype, block_size, head_size=, kv_cache_dtype=)"}
    ),
    "vllm.distributed.parallel_state:get_tensor_model_parallel_rank": Used({"": "()"}),
    "vllm.distributed.parallel_state:get_pp_group": Used({"": "()"}),
    "vllm.distributed.parallel_state:GroupCoordinator": Used(_attributes("rank_in_group")),
    "vllm.distributed.utils:get_pp_indices": Used({"": "(num_hidden_layers, pp_rank, pp_size)"}),
    "vllm.platforms.interface:Platform": Used(
        {
            "device_type": ATTRIBUTE,
            "is_cpu": "()",
            "is_cuda": "()",
            "get_cpu_architecture": "class ()",
            "get_device_capability": "class (device_id=)",
        }
    ),
    "vllm.plugins:DEFAULT_PLUGINS_GROUP": Used({"": ATTRIBUTE}),
    "vllm.envs:VLLM_CPU_KVCACHE_SPACE": Used({"": ATTRIBUTE}),
    "vllm.envs:VLLM_CPU_OMP_THREADS_BIND": Used({"": ATTRIBUTE}),
    "vllm.envs:VLLM_RPC_BASE_PATH": Used({"": ATTRIBUTE}),
}
"""Everything else. A method that kvlake calls may get further parameters if they have defaults."""

_SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler"
_MIXIN: Final = "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin"

ORDER: Final[dict[str, tuple[str, ...]]] = {
    # Stores go out after the forward pass, and their ends are reported in the same step.
    f"{_MIXIN}._get_kv_connector_output": (
        "bind_connector_metadata",
        "yield",
        "wait_for_save",
        "get_transfer_results",
        "build_connector_worker_meta",
        "clear_connector_metadata",
    ),
    # A load is planned in the very call of schedule() whose metadata carries it.
    f"{_SCHEDULER}.schedule": (
        "get_num_new_matched_tokens",
        "allocate_slots",
        "update_state_after_alloc",
        "_build_kv_connector_meta",
        "_update_after_schedule",
    ),
    # Failures are taken before completions.
    f"{_SCHEDULER}.update_from_output": (
        "_handle_failed_recving",
        "_update_from_kv_xfer_finished",
        "get_kv_connector_stats",
    ),
    # Blocks of a finished request are freed after we were told.
    f"{_SCHEDULER}._free_request": ("_connector_finished", "_free_blocks"),
    # The workers of an engine have their KV cache before its scheduler is made.
    "vllm.v1.engine.core:EngineCore.__init__": ("_initialize_kv_caches", "Scheduler"),
    # What a step of vLLM's own offloading looked for is submitted before its tiers are told of
    # the step's end, and what has ended is taken before both.
    f"{_OFFLOAD}.tiering.manager:TieringOffloadingManager.on_schedule_end": (
        "_maybe_process_finished_jobs",
        "_flush_pending_promotions",
        "on_schedule_end",
    ),
    # A reset ends the tiers' transfers first.
    f"{_OFFLOAD}.tiering.manager:TieringOffloadingManager.reset_cache": (
        "drain_jobs",
        "_process_finished_jobs",
        "reset_cache",
    ),
    # An idle engine steps on while stores are outstanding.
    f"{_SCHEDULER}.has_requests": ("has_pending_push_work",),
}
"""Functions of vLLM, and calls that must come in this order in their source (the first of each
that leaves a way through: a name may be called earlier too)."""


def record(sources: Sources) -> dict[str, Any]:
    """The manifest of a release: what it says of everything that is used here."""
    symbols: dict[str, dict[str, str] | None] = {BASE_CLASS: sources.members(BASE_CLASS)}
    for symbol, used in USED.items():
        members = sources.members(symbol)
        if members is not None:
            members = {name: members[name] for name in used.members if name in members}
        symbols[symbol] = members
    calls = {symbol: sources.calls(symbol, names) for symbol, names in ORDER.items()}
    return {"version": sources.version, "symbols": symbols, "calls": calls}


def recorded(version: str) -> dict[str, Any] | None:
    """The manifest of a release in `manifests/`, or None."""
    path = MANIFESTS / f"{version}.json"
    if not path.is_file():
        return None
    manifest: dict[str, Any] = json.loads(path.read_text())
    return manifest


def dump(manifest: dict[str, Any]) -> str:
    """A manifest as the text of its file."""
    return json.dumps(manifest, indent=1, sort_keys=True) + "\n"


def moved(manifest: dict[str, Any]) -> list[str]:
    """What is not where kvlake expects it, one line each; nothing where all is well."""
    version, symbols = manifest["version"], manifest["symbols"]
    lines = _moved_base(version, symbols.get(BASE_CLASS))
    for symbol, used in USED.items():
        if _before(version, used.since):
            continue
        members = symbols.get(symbol)
        if members is None:
            lines.append(f"{symbol} is gone")
            continue
        for name, expected in used.members.items():
            given = members.get(name)
            if given is None:
                lines.append(f"{_path(symbol, name)} is gone, expected: {expected}")
            elif not _fits(expected, given):
                lines.append(f"{_path(symbol, name)} is {given}, expected: {expected}")
    for symbol, names in ORDER.items():
        given = manifest["calls"].get(symbol)
        if given is None:
            lines.append(f"{symbol} is gone")
            continue
        if missing := _out_of_order(given.removeprefix("calls ").split(", "), names):
            lines.append(f"{symbol} does not call {missing} in the order of {', '.join(names)}")
    return lines


def _moved_base(version: str, members: dict[str, str] | None) -> list[str]:
    if members is None:
        return [f"{BASE_CLASS} is gone"]
    lines = []
    for name, expected in OVERRIDDEN.items():
        given = members.get(name)
        if given is None:
            if not _before(version, NOT_IN_EVERY_RELEASE.get(name, "0")):
                lines.append(f"{BASE_CLASS}.{name} is gone, expected: {expected}")
        elif given != expected:
            lines.append(f"{BASE_CLASS}.{name} is {given}, expected: {expected}")
    lines += [
        f"{BASE_CLASS}.{name} is gone; LEFT_ALONE in surface.py names it"
        for name in LEFT_ALONE
        if name not in members and not _before(version, NOT_IN_EVERY_RELEASE.get(name, "0"))
    ]
    known = {*OVERRIDDEN, *LEFT_ALONE}
    lines += [
        f"{BASE_CLASS}.{name} is new: {given}; override it, or say in LEFT_ALONE why not"
        for name, given in members.items()
        if name not in known and given != ATTRIBUTE
    ]
    return lines


def _path(symbol: str, name: str) -> str:
    return f"{symbol}.{name}" if name else symbol


def _before(version: str, since: str) -> bool:
    return _numbers(version) < _numbers(since)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]


def _fits(expected: str, given: str) -> bool:
    """Whether what is called as `expected` says can be: more parameters, if they have defaults."""
    if expected == given or {expected, given} == {ATTRIBUTE, PROPERTY}:
        return True
    kind, _, parameters = expected.removesuffix(")").partition("(")
    given_kind, _, given_parameters = given.removesuffix(")").partition("(")
    if kind != given_kind or "(" not in expected:
        return False
    wanted = [part for part in parameters.split(", ") if part]
    have = [part for part in given_parameters.split(", ") if part]
    return have[: len(wanted)] == wanted and all(
        part.endswith("=") or part.startswith("*") for part in have[len(wanted) :]
    )


def _out_of_order(calls: list[str], names: tuple[str, ...]) -> str:
    """The first of `names` that does not come in its turn; nothing where all do."""
    place = 0
    for name in names:
        if name not in calls[place:]:
            return name
        place = calls.index(name, place)
    return ""
