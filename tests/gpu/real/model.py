"""A small decoder in torch whose KV cache is the paged cache of a `TorchCache`.

For child processes. It computes keys and values as an engine does, layer by layer into blocks that
need not follow on each other, and answers from them: so that a cache that was loaded can be asked
whether the model gives the same logits, bit for bit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCABULARY: Final = 1000
_SEED: Final = 7


class Decoder:
    """Random weights, the same in every process. `views`: a layer's bytes each, as registered."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        # [blocks, heads, tokens, K and V of a head]
        self._layers = [view.view(torch.bfloat16) for view in views]
        _, self._heads, self._block_tokens, content = self._layers[0].shape
        self._size = content // 2
        width = self._heads * self._size
        device = self._layers[0].device
        generator = torch.Generator(device).manual_seed(_SEED)

        def weights(*shape: int) -> torch.Tensor:
            drawn = torch.randn(*shape, generator=generator, device=device)
            return (drawn / math.sqrt(width)).to(torch.bfloat16)

        self._embeddings = weights(VOCABULARY, width)
        self._weights = [[weights(width, width) for _ in range(4)] for _ in self._layers]

    def run(self, tokens: list[int], first: int, blocks: list[int]) -> torch.Tensor:
        """Logits [vocabulary] behind `tokens`, the first of which has position `first`.

        Their keys and values are written to `blocks`, and those before them are read from there.
        """
        device = self._embeddings.device
        table = torch.tensor(blocks, device=device)
        position = torch.arange(first, first + len(tokens), device=device)
        block, inside = table[position // self._block_tokens], position % self._block_tokens
        state = self._embeddings[torch.tensor(tokens, device=device)]
        known = first + len(tokens)
        hidden = torch.arange(known, device=device)[None, :] > position[:, None]
        for cache, (wq, wk, wv, wo) in zip(self._layers, self._weights, strict=True):
            query, key, value = (
                (state @ weight).view(len(tokens), self._heads, self._size)
                for weight in (wq, wk, wv)
            )
            cache[block, :, inside] = torch.cat((key, value), dim=-1)
            paged = cache[table].transpose(0, 1).reshape(self._heads, -1, 2 * self._size)
            keys, values = paged[:, :known].split(self._size, dim=-1)
            scores = query.transpose(0, 1) @ keys.transpose(1, 2) / math.sqrt(self._size)
            share = scores.float().masked_fill(hidden, -math.inf).softmax(-1).to(values.dtype)
            seen = (share @ values).transpose(0, 1).reshape(len(tokens), -1)
            state = torch.nn.functional.rms_norm(state + seen @ wo, state.shape[-1:])
        return state[-1].float() @ self._embeddings.float().T
