"""Reads and poisons a worker's KV cache from inside, for the demo and the end-to-end tests.

vLLM mixes this class into its worker (`worker_extension_cls`). It lets a check compare bytes
rather than tokens: blocks are overwritten before a load, and what they hold after it is digested.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

POISON: Final = 0x7B
"""Every byte of a poisoned block: as bfloat16 a huge number, which no attention survives unseen."""


class KVProbe:
    """Methods that `collective_rpc` can call by name on every worker."""

    model_runner: Any

    def kvlake_poison(self) -> int:
        """Overwrite every block of every layer; returns the number of blocks."""
        count = 0
        for tensor in self._layers():
            tensor.view(_uint8()).fill_(POISON)
            count = int(tensor.shape[0])
        return count

    def kvlake_digests(self, layers: int | None = None) -> dict[int, str]:
        """Block id to a digest over the first layers, or all, of blocks that are not all poison."""
        import numpy as np

        tensors = [one.contiguous().view(_uint8()).numpy() for one in self._layers()[:layers]]
        blocks = [one.reshape(one.shape[0], -1) for one in tensors]
        clean = np.flatnonzero((blocks[0] != POISON).any(axis=1))
        return {
            int(block): hashlib.sha256(
                b"".join(layer[block].tobytes() for layer in blocks)
            ).hexdigest()
            for block in clean
        }

    def _layers(self) -> list[Any]:
        # Groups lie over each other, and a state of recurrent layers fills a part of its page.
        seen: dict[int, Any] = {}
        for tensor in sorted(self.model_runner.kv_caches, key=_block_bytes, reverse=True):
            seen.setdefault(tensor.data_ptr(), tensor)
        return list(seen.values())


def _block_bytes(tensor: Any) -> int:
    return int(tensor[0].numel() * tensor.element_size())


def _uint8() -> Any:
    import torch

    return torch.uint8
