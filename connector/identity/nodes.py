"""On how many nodes an engine's ranks are: all of them must share the node of one sidecar.

A chunk is whole when the sidecar has the parts of all ranks. Ranks on another node attach to that
node's sidecar, so that neither would ever have a whole one: all copies would be in vain.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def nodes_refusal(vllm_config: Any) -> str:
    """Why ranks of this engine would not meet at one sidecar, or nothing."""
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        return (
            "with distributed_executor_backend='external_launcher' every rank schedules for "
            "itself, and they would not find the same hits; use 'mp'"
        )
    nodes = parallel.nnodes_within_dp
    if parallel.placement_group is not None:
        nodes = max(nodes, len(_ray_nodes(parallel.placement_group)))
    if nodes > 1:
        return (
            f"its ranks are on {nodes} nodes, of which each has its own sidecar; choose "
            "tensor_parallel_size and pipeline_parallel_size so that an engine fits on one node, "
            "and run one on each (data_parallel_size)"
        )
    return ""


def _ray_nodes(placement_group: Any) -> set[str]:
    """Nodes on which Ray has placed what an engine's workers run on."""
    import vllm.envs
    from vllm.platforms import current_platform

    # There where vLLM runs on it, and not needed else.
    table = import_module("ray.util").placement_group_table(placement_group)
    bundles: dict[int, dict[str, float]] = table["bundles"]
    chosen = vllm.envs.VLLM_RAY_BUNDLE_INDICES
    if chosen:
        numbers = [int(number) for number in chosen.split(",")]
    else:
        # Others are there for processes without a device, such as the engine itself.
        numbers = [n for n, has in bundles.items() if has.get(current_platform.ray_device_key)]
    return {str(table["bundles_to_node_id"][number]) for number in numbers}
