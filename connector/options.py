"""The connector's extra configuration: how its values are read, and what is taken without them.

Raises `ValueError` with the field, the value and what it must be, so a wrong option ends the
engine at its start and not its cache later. An option that nobody here knows is told of only: a
later release of vLLM may know it.
"""

from __future__ import annotations

import logging
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

logger = logging.getLogger("vllm.kvlake")

CONNECTOR_OPTIONS: Final = (
    "socket",
    "chunk_tokens",
    "load_tokens_min",
    "attach_seconds",
    "weights_digest",
)
"""What `KVLakeConnector` takes."""

CHUNK_TOKENS_FROM: Final = "chunk_tokens_from"
"""Given by `kvlake run`, and by nobody else: the setting of the sidecar's configuration that it
took `chunk_tokens` from. Messages name that."""

VLLM_OFFLOADING_OPTIONS: Final = (
    "spec_name",
    "spec_module_path",
    "cpu_bytes_to_use",
    "block_size",
    "blocks_per_chunk",
    "canonical_layout",
    "offload_prompt_only",
    "self_describing_kv_events",
    "eviction_policy",
    "cache_policy_module_path",
    "store_threshold",
    "max_tracker_size",
    "secondary_tiers",
    "backpressure",
    # From vLLM 0.33 on.
    "tier_poll_interval_s",
    "sync_load_budget_bytes",
)
"""What vLLM's own offloading takes, of the same configuration as ours."""

OFFLOADING_OPTIONS: Final = (
    *VLLM_OFFLOADING_OPTIONS,
    "socket",
    "attach_seconds",
    "weights_digest",
    "adapters_by_path",
)
"""What an engine of `KVLakeOffloadingSpec` takes."""


def complain_of_unknown(extra: Mapping[str, Any], known: Collection[str]) -> None:
    """Tell of options that do nothing, which are most often another's name misspelt."""
    for name, value in extra.items():
        if name in known or name == CHUNK_TOKENS_FROM:
            continue
        near = get_close_matches(str(name), known, n=1)
        logger.warning(
            "kvlake: kv_connector_extra_config[%r]=%r is not known and does nothing; %s",
            name,
            value,
            f"did you mean {near[0]!r}?" if near else f"it may hold {', '.join(sorted(known))}",
        )


def count_of(extra: dict[str, Any], name: str, default: int) -> int:
    """A positive integer of the extra configuration."""
    value = extra.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(
            f"kv_connector_extra_config[{name!r}]={value!r}: must be a positive integer"
        )
    return value


def chunk_tokens_told(extra: Mapping[str, Any]) -> str:
    """`chunk_tokens` and its value, as the operator gave it."""
    value = extra.get("chunk_tokens")
    if setting := extra.get(CHUNK_TOKENS_FROM):
        return f"{setting}={value} of the sidecar's configuration"
    return f"kv_connector_extra_config['chunk_tokens']={value}"


def flag_of(extra: dict[str, Any], name: str) -> bool:
    """A switch of the extra configuration, which is off where it is left out."""
    value = extra.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"kv_connector_extra_config[{name!r}]={value!r}: must be true or false")  # noqa: TRY004 (as of all options)
    return value


def samples_weights(vllm_config: Any) -> bool:
    """Whether the operator has weights told apart by samples of them: `weights_digest`."""
    value = vllm_config.kv_transfer_config.kv_connector_extra_config.get("weights_digest", "full")
    if value not in ("full", "sampled"):
        raise ValueError(
            f"kv_connector_extra_config['weights_digest']={value!r}: must be 'full' or 'sampled'"
        )
    return bool(value == "sampled")


def seconds_of(extra: dict[str, Any], name: str, default: float) -> float:
    """Seconds, 0 or more, of the extra configuration."""
    value = extra.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise ValueError(
            f"kv_connector_extra_config[{name!r}]={value!r}: must be seconds, 0 or more"
        )
    return float(value)
