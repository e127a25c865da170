"""Reads and poisons a worker's KV cache from inside, for the end-to-end tests.

vLLM mixes this class into its worker (`worker_extension_cls`). It lets a check compare bytes
rather than tokens: blocks are overwritten before a load, and what they hold after it is digested.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

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
        blocks = [one.reshape(one.shape[0], -1) for one in self._bytes()[:layers]]
        return {block: _digest(layer[block] for layer in blocks) for block in _clean(blocks[0])}

    def kvlake_head_digests(self) -> dict[int, list[str]]:
        """Block id to a digest of each KV head over all layers, of blocks that are not all poison.

        For attention whose blocks have the heads as their first axis.
        """
        layers = self._bytes()
        assert all(one.ndim == 4 for one in layers)
        num_heads = layers[0].shape[1]
        return {
            block: [_digest(layer[block, head] for layer in layers) for head in range(num_heads)]
            for block in _clean(layers[0].reshape(layers[0].shape[0], -1))
        }

    def kvlake_load_no_weights(self) -> None:
        """Call the model's own `load_weights`, as extensions for reinforcement learning do."""
        self.model_runner.model.load_weights([])

    def _bytes(self) -> list[Any]:
        return [one.contiguous().view(_uint8()).cpu().numpy() for one in self._layers()]

    def _layers(self) -> list[Any]:
        # Groups lie over each other, and a state of recurrent layers fills a part of its page.
        seen: dict[int, Any] = {}
        for tensor in sorted(self.model_runner.kv_caches, key=_block_bytes, reverse=True):
            seen.setdefault(tensor.data_ptr(), tensor)
        return list(seen.values())


def _clean(blocks: Any) -> list[int]:
    import numpy as np

    return [int(block) for block in np.flatnonzero((blocks != POISON).any(axis=1))]


def _digest(pieces: Iterable[Any]) -> str:
    return hashlib.sha256(b"".join(piece.tobytes() for piece in pieces)).hexdigest()


def _block_bytes(tensor: Any) -> int:
    return int(tensor[0].numel() * tensor.element_size())


def _uint8() -> Any:
    import torch

    return torch.uint8
