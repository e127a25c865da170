"""What kvlake stands on in the order in which vLLM calls, as its source has it."""

from __future__ import annotations

from typing import Final

from tests.contract.used import OFFLOAD

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
    f"{OFFLOAD}.tiering.manager:TieringOffloadingManager.on_schedule_end": (
        "_maybe_process_finished_jobs",
        "_flush_pending_promotions",
        "on_schedule_end",
    ),
    # A reset ends the tiers' transfers first.
    f"{OFFLOAD}.tiering.manager:TieringOffloadingManager.reset_cache": (
        "drain_jobs",
        "_process_finished_jobs",
        "reset_cache",
    ),
    # An idle engine steps on while stores are outstanding.
    f"{_SCHEDULER}.has_requests": ("has_pending_push_work",),
}
"""Functions of vLLM, and calls that must come in this order in their source (the first of each
that leaves a way through: a name may be called earlier too)."""
