"""What the KV of each token is, what a query reads of it, and what the model says next."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

from tests.connector.configurations import BLOCK_TOKENS
from tests.releases import has_vllm

Slot = bytes
Block = list[Slot]


def next_token(tokens: Sequence[int]) -> int:
    """What the model says next."""
    return (sum(tokens) + len(tokens)) % 50


def content_of(
    tokens: Iterable[int], salt: str, weights: int, rank: int, group: int = 0
) -> list[Slot]:
    """What KV of each token is: a function of all tokens up to it, who asks, and the layers."""
    nothing = f"{salt}/{weights}/{rank}/{group}".encode()
    return list(itertools.accumulate(tokens, _content_after, initial=nothing))[1:]


@functools.lru_cache(1 << 18)
def _content_after(before: Slot, token: int) -> Slot:
    return hashlib.blake2b(before + token.to_bytes(4, "little"), digest_size=8).digest()


def first_read(spec: Any, position: int) -> int:
    """The first token that the query at `position` reads."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, position - int(spec.sliding_window) + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        chunk = int(spec.attention_chunk_size)
        return position // chunk * chunk
    return 0


def entries_of(spec: Any) -> int:
    """What a block of a group holds: something of each token, or one state."""
    return 1 if isinstance(spec, MambaSpec) else int(spec.block_size)


def recur(
    memory: list[Block],
    spec: MambaSpec,
    table: Sequence[int],
    start: int,
    end: int,
    states: Sequence[Slot],
) -> None:
    """What recurrent layers do in a step from `start` to `end`, as vLLM's workers do it.

    `preprocess_mamba` copies the state to the block of the step's last token, where kernels go on
    with it; some kinds also leave it where the last whole block before that ends.
    """
    size = spec.block_size
    if start:
        block_id = table[(start - 1) // size]
        assert block_id, f"the state behind {start} tokens is read from the null block"
        assert memory[block_id][0] == states[start - 1], f"a wrong state behind {start} tokens"
    # Earlier releases take it to be that of the hashes.
    aligned = {"cache_hit_alignment_tokens": size} if has_vllm("0.32") else {}
    (offset,), (column,) = compute_mamba_prefill_checkpoints(
        [end], [end - start], BLOCK_TOKENS, size, spec.prefill_checkpoint_alignment,
        drop_eagle_block=False, **aligned,
    )  # fmt: skip
    if offset and table[column]:
        memory[table[column]][0] = states[start + offset - 1]
    block_id = table[(end - 1) // size]
    assert block_id, f"the state behind {end} tokens is written to the null block"
    memory[block_id][0] = states[end - 1]
