"""KV caches in every order that vLLM has, as `KVLayout`s, without vLLM."""

from __future__ import annotations

from tiers.kv.layout import KVLayout, Segment

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def layout_in(
    order: str,
    *,
    layers: int = 3,
    blocks: int = 24,
    heads: int = 2,
    first_head: int = 0,
    tokens: int = 16,
    content_bytes: int = 64,
    lead_bytes: int = 4096,
    size_multiple: int = 1 << 16,
    padding_bytes: int = 0,
    dtype: str = "float16",
) -> KVLayout:
    """A cache whose axes lie in `order`, outermost first, `lead_bytes` into its allocation.

    `padding_bytes` follow each block, as where groups of several sizes share pages.
    """
    counts = {"L": layers, "B": blocks, "H": heads, "N": tokens}
    strides: dict[str, int] = {}
    step = content_bytes
    for axis in reversed(order[:-1]):
        step += padding_bytes if axis == "B" else 0
        strides[axis] = step
        step *= counts[axis]
    return KVLayout(
        segment=Segment(0, layers, first_head, heads),
        num_blocks=blocks,
        block_tokens=tokens,
        content_bytes=content_bytes,
        dtype=dtype,
        encoding="double",
        size_bytes=-(-(lead_bytes + step) // size_multiple) * size_multiple,
        layer_offsets_bytes=tuple(lead_bytes + layer * strides["L"] for layer in range(layers)),
        block_stride_bytes=strides["B"],
        head_stride_bytes=strides["H"],
        token_stride_bytes=strides["N"],
    )
