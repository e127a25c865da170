"""What kvlake stands on in the engine: connectors, events, configuration, scheduler, KV cache.

Its own offloading is in `offloading.py`, the connector's base class in `base.py`.
"""

from __future__ import annotations

from typing import Final

from tests.contract.used import ATTRIBUTE, CONNECTOR, PROPERTY, Used, attributes

_EVENT: Final = "vllm.distributed.kv_events"

ENGINE: Final[dict[str, Used]] = {
    f"{CONNECTOR}.v1.base:SupportsHMA": Used(
        {"request_finished_all_groups": "abstract (request, block_ids)"}, left={}
    ),
    f"{CONNECTOR}.v1.base:supports_hma": Used({"": "(connector)"}),
    f"{CONNECTOR}.v1.base:KVConnectorMetadata": Used(left={}),
    f"{CONNECTOR}.v1.base:KVConnectorWorkerMetadata": Used(
        {"aggregate": "abstract (other)"}, left={}
    ),
    f"{CONNECTOR}.v1.base:KVConnectorTransferResults": Used(
        attributes("finished_sending finished_recving failed_recving")
    ),
    f"{CONNECTOR}.v1.base:KVConnectorRole": Used(attributes("SCHEDULER WORKER")),
    f"{CONNECTOR}.v1.metrics:KVConnectorStats": Used(
        {
            "data": ATTRIBUTE,
            "reset": "()",
            "aggregate": "(other)",
            "reduce": "()",
            "is_empty": "()",
        },
        left={"to_dict": "the data as they are, which the base class gives"},
    ),
    f"{CONNECTOR}.v1.metrics:KVConnectorPromMetrics": Used(
        {
            "__init__": "(vllm_config, metric_types, labelnames, per_engine_labelvalues)",
            "_counter_cls": ATTRIBUTE,
            "observe": "(transfer_stats_data, engine_idx=)",
        },
        left={},
    ),
    f"{CONNECTOR}.factory:KVConnectorFactory": Used(
        {
            "register_connector": "class (name, module_path, class_name)",
            "get_connector_class": "class (kv_transfer_config)",
            "create_connector": "class (config, role, kv_cache_config)",
        }
    ),
    f"{CONNECTOR}.utils:KVOutputAggregator": Used({"aggregate": "(outputs, output_rank=)"}),
    f"{_EVENT}:EventBatch": Used(attributes("ts events data_parallel_rank")),
    f"{_EVENT}:KVEventBatch": Used(attributes("events")),
    f"{_EVENT}:BlockStored": Used(
        attributes(
            "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name "
            "extra_keys group_idx kv_cache_spec_kind kv_cache_spec_sliding_window locality "
            "ownership session_id"
        )
    ),
    f"{_EVENT}:BlockRemoved": Used(attributes("block_hashes medium group_idx locality ownership")),
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
        attributes(
            "enable_kv_cache_events publisher endpoint replay_endpoint buffer_steps hwm "
            "max_queue_size topic"
        )
    ),
    "vllm.config.kv_transfer:KVTransferConfig": Used(
        attributes(
            "kv_connector engine_id kv_role kv_connector_extra_config kv_connector_module_path "
            "kv_load_failure_policy"
        )
        | {"is_kv_producer": PROPERTY, "is_kv_consumer": PROPERTY}
    ),
    "vllm.config.vllm:VllmConfig": Used(
        attributes(
            "attention_config cache_config kernel_config kv_events_config kv_transfer_config "
            "load_config lora_config "
            "mamba_config model_config observability_config parallel_config scheduler_config "
            "speculative_config"
        )
        | attributes("aux_output_config use_v2_model_runner")
        | {"num_speculative_tokens": PROPERTY}
    ),
    "vllm.config.kernel:KernelConfig": Used(
        attributes("moe_backend linear_backend linear_backend_per_quant")
    ),
    "vllm.config.observability:ObservabilityConfig": Used(attributes("otlp_traces_endpoint")),
    "vllm.tracing.otel:extract_trace_context": Used({"": "(headers)"}),
    "vllm.tracing:instrument_manual": Used(
        {"": "(span_name, start_time, end_time=, attributes=, context=, kind=)"}
    ),
    "vllm.config.model:ModelConfig": Used(
        attributes(
            "model model_weights revision hf_config hf_text_config hf_overrides quantization "
            "max_model_len use_mla multimodal_config quantization_config code_revision "
            "model_class_overrides disable_sliding_window config_format "
            "hf_config_path runner_type convert_type pooler_config enforce_eager "
            "enable_cumem_allocator override_generation_config original_max_model_len"
        )
        | {
            "enable_sleep_mode": ATTRIBUTE,
            "dtype": ATTRIBUTE,
            "architecture": PROPERTY,
            "architectures": PROPERTY,
            "is_diffusion": PROPERTY,
            "is_hybrid": PROPERTY,
            "is_prefix_caching_supported": PROPERTY,
            "has_inner_state": PROPERTY,
            "get_head_size": "()",
            "get_total_num_kv_heads": "()",
            "get_total_num_hidden_layers": "()",
            "get_and_verify_max_len": "(max_model_len)",
            "try_get_generation_config": "()",
            "using_transformers_backend": "()",
        }
    ),
    "vllm.config.parallel:ParallelConfig": Used(
        attributes(
            "tensor_parallel_size pipeline_parallel_size decode_context_parallel_size "
            "prefill_context_parallel_size world_size distributed_executor_backend placement_group "
            "data_parallel_index data_parallel_size enable_expert_parallel enable_fault_tolerance "
            "enable_elastic_ep"
        )
        | {"nnodes_within_dp": PROPERTY}
    ),
    "vllm.config.speculative:SpeculativeConfig": Used(
        attributes(
            "method num_speculative_tokens parallel_drafting draft_model_config draft_load_config "
            "draft_parallel_config num_speculative_tokens_per_batch_size attention_backend "
            "kv_cache_dtype"
        )
        | {
            "use_multi_module_mtp": "()",
            "use_gemma4_mtp": "()",
            "use_step3p5_mtp": "()",
        }
    ),
    "vllm.config.cache:CacheConfig": Used(
        attributes(
            "cache_dtype block_size prefix_caching_hash_algo prefix_match_unit "
            "enable_prefix_caching "
            "kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype "
            "mamba_cache_mode"
        )
    ),
    "vllm.config.multimodal:MultiModalConfig": Used(
        attributes(
            "mm_processor_cache_gb mm_processor_kwargs media_io_kwargs video_pruning_rate "
            "mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_method"
        )
    ),
    "vllm.config.pooler:PoolerConfig": Used(attributes("seq_pooling_type tok_pooling_type")),
    "vllm.config.lora:LoRAConfig": Used(
        attributes(
            "lora_dtype target_modules enable_moe_shared_loras enable_mixed_moe_lora_format "
            "enable_tower_connector_lora"
        )
    ),
    "vllm.config.aux_output:AuxOutputConfig": Used({"enabled": PROPERTY}),
    # Asked for by name: what an adapter is applied to differs where it is there.
    "vllm.lora.model_manager:LoRAModelManager": Used(
        {"_get_text_lora_names": "(module_name)"}, late={"_get_text_lora_names": "0.33"}
    ),
    "vllm.config.mamba:MambaConfig": Used(attributes("backend enable_stochastic_rounding")),
    "vllm.config.scheduler:SchedulerConfig": Used(
        attributes("enable_chunked_prefill disable_hybrid_kv_cache_manager")
    ),
    "vllm.config.load:LoadConfig": Used(attributes("load_format model_loader_extra_config")),
    "vllm.config.attention:AttentionConfig": Used(attributes("backend backend_per_kind")),
    "vllm.v1.core.sched.output:SchedulerOutput": Used(
        attributes(
            "num_scheduled_tokens total_num_scheduled_tokens kv_connector_block_state "
            "preempted_req_ids"
        )
    ),
    "vllm.v1.core.sched.output:KVConnectorBlockState": Used(
        {"get_block_ids": "(req_id)", "boundary_state_offloads": ATTRIBUTE}
    ),
    "vllm.v1.outputs:KVConnectorOutput": Used(
        attributes(
            "finished_recving failed_recving invalid_block_ids kv_connector_worker_meta "
            "kv_cache_events"
        )
        | {"is_empty": "()"}
    ),
    "vllm.v1.kv_cache_interface:KVCacheConfig": Used(attributes("num_blocks kv_cache_groups")),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": Used(
        attributes("layer_names kv_cache_spec enable_kv_transfer")
    ),
    "vllm.v1.kv_cache_interface:KVCacheSpec": Used({"page_size_bytes": PROPERTY}),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": Used(
        attributes("block_size num_kv_heads head_size head_size_v dtype non_causal")
    ),
    "vllm.v1.kv_cache_interface:iter_layer_specs": Used({"": "(kv_cache_spec)"}),
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": Used(
        attributes("sliding_window extra_retained_tokens")
    ),
    "vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec": Used(
        attributes("attention_chunk_size")
    ),
    "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs": Used(attributes("kv_cache_specs")),
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": Used(
        attributes("block_size head_size head_size_v dtype page_size_padded tokens_per_state")
    ),
    "vllm.v1.kv_cache_interface:MambaSpec": Used(
        attributes(
            "shapes dtypes mamba_type mamba_cache_mode num_speculative_blocks num_heads "
            "tp_replicated"
        )
    ),
    "vllm.v1.kv_cache_layout:KVCacheLayout": Used(attributes("BLHNC LBHNC")),
    "vllm.v1.core.block_pool:BlockPool": Used(
        {
            "blocks": ATTRIBUTE,
            "cached_block_hash_to_block": ATTRIBUTE,
            "hash_block_size": ATTRIBUTE,
            "touch": "(blocks)",
            "free_blocks": "(ordered_blocks)",
            "get_cached_block": "(block_hash, kv_cache_group_ids)",
            "evict_blocks": "(block_ids)",
        }
    ),
    "vllm.v1.core.kv_cache_utils:ExternalBlockHash": Used({"": ATTRIBUTE}),
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": Used(
        attributes("block_id ref_cnt is_null") | {"block_hash": PROPERTY}
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": Used({"get_block_ids": "(allow_none=)"}),
    "vllm.v1.request:Request": Used(
        attributes(
            "request_id all_token_ids block_hashes cache_salt lora_request mm_features "
            "num_computed_tokens num_in_flight_tokens num_preemptions num_prompt_tokens "
            "prefill_stats prompt_embeds resumable "
            "skip_reading_prefix_cache kv_transfer_params status kv_cache_report_mode "
            "trace_headers"
        )
        | {"num_tokens": PROPERTY}
    ),
    "vllm.v1.metrics.stats:PrefillStats": Used(
        attributes("num_prompt_tokens num_local_cached_tokens num_external_cached_tokens")
    ),
    "vllm.v1.request:RequestStatus": Used(attributes("FINISHED_ERROR")),
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector": Used(
        {"__init__": "(vllm_config, role, kv_cache_config)"}
    ),
    "vllm.config.vllm:get_current_vllm_config": Used({"": "()"}),
    "vllm.config.vllm:get_layers_from_vllm_config": Used(
        {"": "(vllm_config, layer_type, layer_names=)"}
    ),
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase": Used(
        {"get_kv_cache_spec": "abstract (vllm_config)"}
    ),
    "vllm.lora.request:LoRARequest": Used(
        attributes("lora_name lora_int_id lora_path load_inplace is_3d_lora_weight")
    ),
    "vllm.v1.engine.core:EngineCore": Used(
        {
            "collective_rpc": "(method, timeout=, args=, kwargs=)",
            "set_weight_version": "(weight_version)",
        }
    ),
    "vllm.v1.worker.gpu_worker:Worker": Used(
        {
            "reload_weights": "(*args, **kwargs)",
            "start_weight_update": "()",
            "start_draft_weight_update": "()",
            "update_weights": "(update_info)",
            "finish_weight_update": "()",
        }
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": Used(
        {
            "get_model": "()",
            "reload_weights": "(weights_iterator=, weights_path=, is_checkpoint_format=)",
            "drafter": ATTRIBUTE,
        }
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": Used(
        {"get_model": "()", "speculator": ATTRIBUTE}
    ),
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator": Used({"model": ATTRIBUTE}),
    "vllm.lora.worker_manager:WorkerLoRAManager": Used({"_load_adapter": "(lora_request)"}),
    "vllm.multimodal.inputs:MultiModalFeatureSpec": Used(attributes("identifier mm_position")),
    "vllm.multimodal.inputs:PlaceholderRange": Used(attributes("offset length")),
    "vllm.v1.metrics.cache_hit_source:CacheHitSource": Used(attributes("HOST DISK"), "0.32"),
    "vllm.v1.attention.backends.cpu_attn:_get_attn_isa": Used(
        {"": "(dtype, block_size, head_size=, kv_cache_dtype=)"}
    ),
    "vllm.distributed.parallel_state:get_tensor_model_parallel_rank": Used({"": "()"}),
    "vllm.distributed.parallel_state:get_pp_group": Used({"": "()"}),
    "vllm.distributed.parallel_state:GroupCoordinator": Used(attributes("rank_in_group")),
    "vllm.distributed.utils:get_pp_indices": Used({"": "(num_hidden_layers, pp_rank, pp_size)"}),
    "vllm.platforms.interface:Platform": Used(
        {
            "device_type": ATTRIBUTE,
            "is_cpu": "()",
            "is_cuda": "()",
            "get_cpu_architecture": "class ()",
            "get_device_capability": "class (device_id=)",
            "ray_device_key": ATTRIBUTE,
        }
    ),
    "vllm.platforms.interface:CpuArchEnum": Used(attributes("RISCV")),
    "vllm.v1.kv_cache_interface:RSWASpec": Used(attributes("rswa_window")),
    "vllm.plugins:DEFAULT_PLUGINS_GROUP": Used({"": ATTRIBUTE}),
    "vllm._version:__version__": Used({"": ATTRIBUTE}),
    "vllm.envs:VLLM_BATCH_INVARIANT": Used({"": ATTRIBUTE}),
    "vllm.envs:VLLM_SSM_CONV_STATE_LAYOUT": Used({"": ATTRIBUTE}),
    "vllm.envs:VLLM_CPU_KVCACHE_SPACE": Used({"": ATTRIBUTE}),
    "vllm.envs:VLLM_RAY_BUNDLE_INDICES": Used({"": ATTRIBUTE}),
    "vllm.envs:VLLM_CPU_OMP_THREADS_BIND": Used({"": ATTRIBUTE}),
    "vllm.envs:VLLM_RPC_BASE_PATH": Used({"": ATTRIBUTE}),
}
