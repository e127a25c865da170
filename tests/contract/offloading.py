"""What kvlake stands on in vLLM's own offloading, whose tiers it can be."""

from __future__ import annotations

from typing import Final

from tests.contract.used import ATTRIBUTE, CONNECTOR, OFFLOAD, Used, attributes

_COUNTED: Final = "vLLM's manager counts what goes through a tier, and the sidecar the rest"
_NO_LABELS: Final = "nothing of the configuration is told as labels of a metric"

OFFLOADING: Final[dict[str, Used]] = {
    "vllm.forward_context:get_forward_context": Used({"": "()"}),
    "vllm.forward_context:is_forward_context_available": Used({"": "()"}),
    f"{OFFLOAD}.base:OffloadingSpec": Used(
        attributes("config extra_config offload_prompt_only blocks_per_chunk replicated_layout")
        | {
            "get_manager": "abstract ()",
            "get_worker": "abstract (kv_caches)",
            "build_metric_definitions": "class (extra_config)",
        },
        late={"config_info_keys": "0.33"},
        left={"config_info_keys": _NO_LABELS},
    ),
    f"{OFFLOAD}.base:OffloadingWorker": Used(
        {
            "submit_store": "abstract (job_id, src_spec, dst_spec)",
            # Expedited are loads that vLLM 0.33 waits for.
            "submit_load": "abstract (job_id, src_spec, dst_spec, expedited=)",
            "get_finished": "abstract ()",
            "wait": "abstract (job_ids)",
            "shutdown": "()",
        },
        left={},
    ),
    f"{OFFLOAD}.base:TransferResult": Used(
        attributes("job_id success transfer_size transfer_time")
    ),
    f"{OFFLOAD}.base:GPULoadStoreSpec": Used(attributes("block_ids group_sizes block_indices")),
    f"{OFFLOAD}.base:CanonicalKVCaches": Used(attributes("tensors group_data_refs")),
    f"{OFFLOAD}.base:CanonicalKVCacheTensor": Used(attributes("tensor page_size_bytes")),
    f"{OFFLOAD}.base:CanonicalKVCacheRef": Used(attributes("tensor_idx page_size_bytes mapping")),
    f"{OFFLOAD}.base:CanonicalPageMapping": Used(
        attributes("canonical_page_size_bytes runs num_writers writer_index")
    ),
    f"{OFFLOAD}.base:CopyRun": Used(
        attributes(
            "local_offset canonical_offset fragment_size num_fragments local_stride "
            "canonical_stride"
        )
    ),
    f"{OFFLOAD}.base:ReqContext": Used(
        attributes("req_id kv_transfer_params load_tier_filter")
        | {"get_offload_key_position": "(key)"}
    ),
    f"{OFFLOAD}.base:TierFilter": Used({"allows": "(medium, locality)"}),
    f"{OFFLOAD}.base:LookupResult": Used(attributes("MISS HIT HIT_PENDING RETRY")),
    f"{OFFLOAD}.base:Medium": Used(attributes("CPU STORAGE")),
    f"{OFFLOAD}.base:Locality": Used(attributes("LOCAL REMOTE")),
    f"{OFFLOAD}.base:OffloadingEvent": Used(attributes("keys medium removed locality ownership")),
    f"{OFFLOAD}.base:RequestOffloadingContext": Used(attributes("policy")),
    f"{OFFLOAD}.base:OffloadKey": Used({"": ATTRIBUTE}),
    f"{OFFLOAD}.base:ScheduleEndContext": Used(attributes("new_req_ids preempted_req_ids")),
    f"{OFFLOAD}.base:LoadStoreSpec": Used({}),
    f"{OFFLOAD}.base:BlockIDsLoadStoreSpec": Used(attributes("block_ids")),
    f"{OFFLOAD}.base:PrepareStoreOutput": Used(attributes("keys_to_store store_spec evicted_keys")),
    f"{OFFLOAD}.base:OffloadingManager": Used(
        {
            "lookup": "abstract (key, req_context)",
            "prepare_load": "abstract (keys, req_context)",
            "prepare_store": "abstract (keys, req_context)",
            "on_new_request": "abstract (req_context)",
            "on_request_finished": "(req_context)",
        },
        late=dict.fromkeys(("lock", "on_reset_flushed", "config_info"), "0.33")
        | {"get_load_source": "0.32"},
        left=dict.fromkeys(
            (
                "touch",
                "get_load_source",
                "complete_load",
                "complete_store",
                "take_events",
                "on_schedule_end",
                "has_pending_work",
                "reset_cache",
                "on_reset_flushed",
                "get_stats",
                "shutdown",
            ),
            "`NoTiers` has nothing, and the base class does nothing",
        )
        | {"lock": "`NoTiers` has no state to guard", "config_info": _NO_LABELS},
    ),
    f"{OFFLOAD}.base:get_offload_group_idx": Used({"": "(key)"}),
    f"{OFFLOAD}.config:OffloadingConfig": Used(
        attributes(
            "groups enable_kv_cache_events extra_config engine_id model cache parallel "
            "replicated_layout canonical_layout kv_cache_layout"
        )
    ),
    f"{OFFLOAD}.config:OffloadingGroupConfig": Used(
        attributes("tokens_per_block layer_names group_id")
    ),
    f"{OFFLOAD}.config:OffloadingModelConfig": Used(attributes("name dtype")),
    f"{OFFLOAD}.config:OffloadingCacheConfig": Used(attributes("tokens_per_hash blocks_per_chunk")),
    f"{OFFLOAD}.config:OffloadingParallelConfig": Used(
        attributes("rank tp_size pp_size pcp_size dcp_size is_parallelism_agnostic")
    ),
    f"{OFFLOAD}.cpu.spec:CPUOffloadingSpec": Used(
        attributes("num_chunks kv_bytes_per_chunk cpu_page_size_per_worker _manager")
        | {"get_worker": "(kv_caches)"},
        late={"config_info_keys": "0.33"},
        left={
            "get_manager": "that of `TieringOffloadingSpec`",
            "create_worker": "called by vLLM's `get_worker`, for GPUs",
            "build_metric_definitions": _COUNTED,
            "config_info_keys": _NO_LABELS,
        },
    ),
    f"{OFFLOAD}.cpu.shared_offload_region:SharedOffloadRegion": Used(
        {
            "__init__": "(engine_id, num_chunks, rank, kv_bytes_per_chunk, cpu_page_size)",
            "mmap_path": ATTRIBUTE,
            "_creator": ATTRIBUTE,
            "create_next_worker_view": "(tensor_page_size)",
            "create_next_canonical_view": "(tensor_page_size)",
            "cleanup": "()",
        }
    ),
    f"{OFFLOAD}.cpu.gpu_worker:CPUOffloadingWorker": Used(attributes("_mmap_region")),
    f"{OFFLOAD}.tiering.spec:TieringOffloadingSpec": Used(
        attributes("secondary_tier_configs _scheduler_mmap")
        | {
            "__init__": "(config)",
            "get_manager": "()",
            "_validate_canonical_refs": "(kv_caches)",
        },
        late={"config_info_keys": "0.33"},
        left={
            "create_worker": "called by vLLM's `get_worker`, for GPUs",
            "build_metric_definitions": _COUNTED,
            "config_info_keys": _NO_LABELS,
        },
    ),
    f"{OFFLOAD}.tiering.base:SecondaryTierManager": Used(
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
            "touch": "(keys, req_context)",
            "drain_jobs": "abstract ()",
            "shutdown": "()",
        },
        late={"cache_hit_source": "0.32", "config_info": "0.33", "config_info_keys": "0.33"},
        left={
            "block_size_bytes": "the base class knows",
            "bp_detector": "the base class keeps it, and vLLM's manager asks it",
            "serve_external_requests": "who wants these chunks asks the sidecar, not this engine",
            "build_metric_definitions": _COUNTED,
            "get_stats": _COUNTED,
            "config_info_keys": _NO_LABELS,
            "config_info": _NO_LABELS,
        },
    ),
    f"{OFFLOAD}.tiering.manager:TieringOffloadingManager": Used(
        {
            # These are what `connector.offloading.workarounds` stands before.
            "on_new_request": "(req_context, *, exclude_tier_idx=)",
            "lookup": "(key, req_context, *, exclude_tier_idx=)",
            "reset_cache": "()",
            "prepare_load": "(keys, req_context)",
            "prepare_store": "(keys, req_context)",
            "on_schedule_end": "(context)",
            "on_request_finished": "(req_context, *, exclude_tier_idx=)",
            # And this it calls.
            "touch": "(keys, req_context)",
        },
    ),
    f"{OFFLOAD}.tiering.base:TransferJob": Used(attributes("job_id keys chunk_ids req_context")),
    f"{OFFLOAD}.tiering.base:JobResult": Used(
        attributes("job_id success successful_keys transfer_time transfer_bytes")
    ),
    f"{OFFLOAD}.tiering.factory:SecondaryTierFactory": Used(
        {
            "create_secondary_tier": "class (tier_config, primary_kv_view, offloading_spec)",
            "get_tier_class": "class (tier_config)",
        }
    ),
    f"{OFFLOAD}.factory:OffloadingSpecFactory": Used(
        {"get_spec_cls": "class (extra_config)", "create_spec": "class (config)"}
    ),
    f"{CONNECTOR}.v1.offloading.canonical_mapping:canonical_format_id": Used(
        {"": "(kv_cache_layout)"}
    ),
    f"{CONNECTOR}.v1.offloading_connector:OffloadingConnector": Used(
        {"__init__": "(vllm_config, role, kv_cache_config)"}
    ),
}
