"""Entry point `vllm.general_plugins`: makes `KVLakeConnector` known to vLLM by name.

vLLM calls it first in each of its processes, so it does not import the connector itself.
"""

from __future__ import annotations

NAME = "KVLakeConnector"


def register() -> None:
    """Register the connector with vLLM's factory. May be called again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, "connector.vllm", NAME)
    except ValueError:
        # Registered already: vLLM may load plugins twice.
        return
