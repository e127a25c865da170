"""Entry point `vllm.general_plugins`: makes `KVLakeConnector` known to vLLM by name.

vLLM calls it first in each of its processes, so it does not import the connector itself.
"""

import contextlib


def register() -> None:
    """Register the connector with vLLM's factory. May be called again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = "KVLakeConnector"
    # It is registered already where vLLM loads plugins twice.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(name, "connector.vllm", name)
