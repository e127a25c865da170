"""Entry point of the group `vllm.general_plugins`: makes `KVLakeConnector` known by name.

vLLM runs every plugin in each of its processes, before anything else, so this must stay light:
the connector itself is imported only when an engine asks for it.
"""

from __future__ import annotations

NAME = "KVLakeConnector"


def register() -> None:
    """Register the connector with vLLM's factory; calling it again changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, "connector.vllm", NAME)
    except ValueError:
        # vLLM loads plugins in every process and may do so twice; the name is ours already.
        return
