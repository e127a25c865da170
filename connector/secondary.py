"""The import path of `KVLakeTier` that vLLM's options name (`module_path`)."""

from connector.offloading.tier import KVLakeTier

__all__ = ["KVLakeTier"]
