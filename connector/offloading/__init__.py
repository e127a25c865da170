"""kvlake behind vLLM's own `OffloadingConnector`. vLLM loads `KVLakeOffloadingSpec` from here."""

from connector.offloading.spec import KVLakeOffloadingSpec

__all__ = ["KVLakeOffloadingSpec"]
