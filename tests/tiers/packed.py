"""A reference for `tiers/kv/layout.py`: where kernels put each element, written with
transposes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def packed(content: npt.NDArray[Any], encoding: str, item_bytes: int = 2) -> npt.NDArray[Any]:
    """One (block, head) from what its tokens hold: `[tokens, content bytes]`, K and then V."""
    if not encoding.startswith("cpu-x86-"):
        return content.reshape(-1)
    num_tokens, content_bytes = content.shape
    halves = content.reshape(num_tokens, 2, content_bytes // 2 // item_bytes, item_bytes)
    # [tokens, dimensions, bytes of an element]
    keys, values = halves[:, 0], halves[:, 1]
    dimensions = keys.shape[1]
    if encoding == "cpu-x86-amx":
        tiles = keys.reshape(num_tokens // 16, 16, dimensions // 2, 2, item_bytes)
        pairs = values.reshape(num_tokens // 2, 2, dimensions // 16, 16, item_bytes)
        keys, values = tiles.transpose(0, 2, 1, 3, 4), pairs.transpose(2, 0, 3, 1, 4)
    else:
        keys = keys.transpose(1, 0, 2)
    return np.concatenate([keys.reshape(-1), values.reshape(-1)])
