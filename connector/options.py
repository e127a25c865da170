"""Options of the connector: `kv_connector_extra_config` of vLLM's configuration.

An invalid value raises `ValueError` with the field, the value and what it must be, so it ends the
engine at its start. An unknown option is only logged: a later release of vLLM may know it.
"""

import logging
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal

import msgspec

logger = logging.getLogger("vllm.kvlake")

_ATTACHING: Final = ("socket", "attach_seconds", "weights_digest")
CONNECTOR_OPTIONS: Final = (*_ATTACHING, "chunk_tokens", "load_tokens_min")
"""Options of `KVLakeConnector`."""
CHUNK_TOKENS_FROM: Final = "chunk_tokens_from"
"""Set by `kvlake run` alone: the setting of the sidecar that `chunk_tokens` is from, for errors."""
VLLM_OFFLOADING_OPTIONS: Final = (
    *("spec_name", "spec_module_path", "cpu_bytes_to_use", "block_size", "blocks_per_chunk"),
    *("canonical_layout", "offload_prompt_only", "self_describing_kv_events", "eviction_policy"),
    *("cache_policy_module_path", "store_threshold", "max_tracker_size", "secondary_tiers"),
    "backpressure",
    # From vLLM 0.33 on.
    *("tier_poll_interval_s", "sync_load_budget_bytes"),
)
"""Options of vLLM's own offloading, in the same configuration."""
OFFLOADING_OPTIONS: Final = (*VLLM_OFFLOADING_OPTIONS, *_ATTACHING, "adapters_by_path")
"""Options of an engine with `KVLakeOffloadingSpec`."""

_COUNT: Final = (Annotated[int, msgspec.Meta(gt=0)], "a positive integer")
_TYPES: Final[dict[str, tuple[Any, str]]] = {
    "chunk_tokens": _COUNT,
    "load_tokens_min": _COUNT,
    "attach_seconds": (Annotated[float, msgspec.Meta(ge=0)], "seconds, 0 or more"),
    "adapters_by_path": (bool, "true or false"),
    "weights_digest": (Literal["full", "sampled"], "'full' or 'sampled'"),
}


def option(extra: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of an option. Raises `ValueError` if it is invalid."""
    value = extra.get(name, default)
    kind, allowed = _TYPES[name]
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        message = f"kv_connector_extra_config[{name!r}]={value!r}: must be {allowed}"
        raise ValueError(message) from None


def log_unknown_options(extra: Mapping[str, Any], known: Collection[str]) -> None:
    """Log options that have no effect, which are most often misspelt."""
    for name, value in extra.items():
        if name in known or name == CHUNK_TOKENS_FROM:
            continue
        near = get_close_matches(str(name), known, n=1)
        logger.warning(
            "kvlake: kv_connector_extra_config[%r]=%r is unknown and has no effect; %s",
            name,
            value,
            f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}",
        )


def chunk_tokens_source(extra: Mapping[str, Any]) -> str:
    """`chunk_tokens` and its value, as the operator configured it."""
    value = extra.get("chunk_tokens")
    if setting := extra.get(CHUNK_TOKENS_FROM):
        return f"{setting}={value} of the sidecar's configuration"
    return f"kv_connector_extra_config['chunk_tokens']={value}"


def samples_weights(vllm_config: Any) -> bool:
    """Whether weights are identified by samples instead of full digests."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    return bool(option(extra, "weights_digest", "full") == "sampled")
