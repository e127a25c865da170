"""Being one of several connectors: what the `MultiConnector` that makes ours was given.

vLLM's `MultiConnector` makes each of its children a `KVTransferConfig` of its own and hands it only
that. What decides about all of them, such as what becomes of a request whose load failed, vLLM
reads of the outer one, which no child is shown. So it is taken from the object that is making us.
"""

from __future__ import annotations

import logging
from inspect import currentframe
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

logger = logging.getLogger("vllm.kvlake")


def outer_transfer() -> Any | None:
    """`kv_transfer_config` of the `MultiConnector` whose constructor is running; None without one.

    To be called while ours is made.
    """
    frame = currentframe()
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            maker = frame.f_locals.get("self")
            config = frame.f_locals.get("vllm_config")
            if isinstance(maker, MultiConnector) and config is not None:
                return config.kv_transfer_config
        frame = frame.f_back
    return None


def asked_by_several() -> bool:
    """Whether a class method of ours is being called by a `MultiConnector`'s, for its children."""
    frame = currentframe()
    while frame is not None:
        asking = frame.f_locals.get("cls")
        if isinstance(asking, type) and issubclass(asking, MultiConnector):
            return True
        frame = frame.f_back
    return False


def recomputes(transfer: Any, outer: Any | None) -> bool:
    """Whether vLLM computes what could not be loaded; where that is ours to say, it does now.

    With "fail", a chunk that was evicted between lookup and load would fail the user's request.
    """
    if outer is None:
        if transfer.kv_load_failure_policy != "recompute":
            # vLLM reads this after it made the connector.
            logger.info("kvlake: kv_load_failure_policy is set to 'recompute'")
            transfer.kv_load_failure_policy = "recompute"
        return True
    if outer.kv_load_failure_policy == "recompute":
        return True
    logger.warning(
        "kvlake: nothing is loaded, only stored, because kv_load_failure_policy=%r of the "
        "MultiConnector would fail a request whose chunk is evicted while it is loaded; give "
        'the MultiConnector itself "kv_load_failure_policy": "recompute"',
        outer.kv_load_failure_policy,
    )
    return False
