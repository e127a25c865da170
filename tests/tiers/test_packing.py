"""The table of encodings against vLLM's own kernels: what they write is what the table says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm import _custom_ops as ops

from tests.tiers.packed import packed
from tiers.kv.layout import planes_of, regroups

HEADS = 2


def written(keys: torch.Tensor, values: torch.Tensor, block_tokens: int, isa: str) -> Any:
    """What the kernel makes of `[tokens, heads, dimensions]`: `[blocks, heads, bytes]`."""
    num_tokens, heads, dimensions = keys.shape
    shape = (num_tokens // block_tokens, heads, block_tokens, 2 * dimensions)
    cache = torch.zeros(shape, dtype=keys.dtype)
    halves = cache.view(shape[0], heads, 2 * block_tokens, dimensions).chunk(2, dim=2)
    slots = torch.arange(num_tokens)
    ops.cpu_attn_reshape_and_cache(keys, values, halves[0], halves[1], slots, isa)
    return cache.view(torch.uint8).numpy().reshape(shape[0], heads, -1)


@pytest.mark.promise("other-block-sizes")
@pytest.mark.parametrize("block_tokens", [32, 64, 96])
@pytest.mark.parametrize(
    ("isa", "dtype", "dimensions"),
    [
        ("amx", "bfloat16", 64),
        ("amx", "bfloat16", 96),
        ("vec", "bfloat16", 64),
        ("vec", "float32", 96),
        ("vec", "float16", 64),
        ("vec16", "bfloat16", 80),
        ("vec16", "float32", 80),
    ],
)
def test_kernels_pack_as_the_table_says(
    isa: str, dtype: str, dimensions: int, block_tokens: int
) -> None:
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():  # noqa: SLF001 (of torch)
        pytest.skip("this CPU has no AMX: its kernels cannot run")
    torch.manual_seed(1)
    num_tokens = 2 * block_tokens
    shape = (num_tokens, HEADS, dimensions)
    kind = getattr(torch, dtype)
    keys, values = torch.randn(shape).to(kind), torch.randn(shape).to(kind)
    found = written(keys, values, block_tokens, isa)
    content = torch.cat([keys, values], dim=2).contiguous().view(torch.uint8).numpy()
    for block in range(num_tokens // block_tokens):
        for head in range(HEADS):
            part = content[block * block_tokens : (block + 1) * block_tokens, head]
            expected = packed(part, f"cpu-x86-{isa}", kind.itemsize)
            np.testing.assert_array_equal(found[block, head], expected)


def test_planes_hold_all_of_a_token_or_are_not_known() -> None:
    for encoding, dtype in [
        ("cpu-x86-amx", "bfloat16"),
        ("cpu-x86-vec", "float32"),
        ("cpu-x86-vec16", "float16"),
        ("cuda-9.0-auto+token", "uint8"),
    ]:
        assert regroups(encoding, dtype)
        planes = planes_of(encoding, dtype, 512)
        assert planes is not None
        assert sum(plane.token_bytes for plane in planes) == 512
    for encoding, dtype in [
        ("cpu-x86-amx", "float16"),
        ("cpu-x86-vec", "uint8"),
        ("cpu-arm-neon", "bfloat16"),
        ("cuda-9.0-auto", "bfloat16"),
    ]:
        assert not regroups(encoding, dtype)
        assert planes_of(encoding, dtype, 512) is None
    assert planes_of("cpu-x86-amx", "bfloat16", 2 * 2 * 24) is None, "24 dimensions are no tiles"
