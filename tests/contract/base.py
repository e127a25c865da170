"""Whether kvlake overrides each method of `KVConnectorBase_V1`, or why it leaves it alone.

A release that adds a method is noticed by its name standing in neither table (`surface.py`).
"""

from __future__ import annotations

from typing import Final

from tests.contract.used import CONNECTOR, PROPERTY

BASE_CLASS: Final = f"{CONNECTOR}.v1.base:KVConnectorBase_V1"

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
    "supports_divergent_local_hybrid_hits": "False: what ends with vLLM's own attention is a hit",
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
