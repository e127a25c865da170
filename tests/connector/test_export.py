"""KV memory that another process can map: born on a memfd, or moved to shared memory."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt
import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from connector.export import ExportedMemory, ExportRefused, GroupTensors, MemfdAllocation, export
from tests.mappings import flags_of, policy_at
from tests.offsets import offset_of
from tiers.errors import LayoutError
from tiers.kv.layout import Segment
from tiers.kv.memfd import check_sealed

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 5, 2, 16, 8
DTYPE = torch.bfloat16
SIZE_BYTES = LAYERS * BLOCKS * HEADS * TOKENS * CONTENT * 2
SEGMENT = Segment(first_layer=0, num_layers=LAYERS, first_head=0, num_heads=HEADS)


def caches_over(buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """[blocks, heads, tokens, content] per layer over one flat allocation, as vLLM makes them."""
    whole = buffer[:SIZE_BYTES].view(DTYPE).view(LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
    return {f"layer.{index}": whole[index] for index in range(LAYERS)}


def whole(caches: dict[str, torch.Tensor]) -> list[GroupTensors]:
    """All of them as one KV cache group."""
    return [GroupTensors(list(caches.values()), SEGMENT, "test")]


def through(memory: ExportedMemory) -> npt.NDArray[np.uint8]:
    """The memory as another process sees it."""
    return np.frombuffer(mmap.mmap(os.dup(memory.fd), memory.shared.size_bytes), dtype=np.uint8)


def check_shared(memory: ExportedMemory, caches: dict[str, torch.Tensor]) -> None:
    """Writes through the tensors are seen through the descriptor at the layout's offsets."""
    seen = through(memory)
    for layer, tensor in enumerate(caches.values()):
        for block, head, token in ((0, 0, 0), (BLOCKS - 1, HEADS - 1, TOKENS - 1), (2, 1, 7)):
            values = torch.arange(CONTENT, dtype=torch.int16) + 100 * layer + block
            tensor[block, head, token] = values.view(DTYPE)
            offset = offset_of(memory.layouts[0], layer, block, head, token)
            piece = seen[offset : offset + 2 * CONTENT].view(np.int16)
            assert piece.tolist() == values.tolist()
            # And the other way: what a load writes is what the engine reads.
            seen[offset : offset + 2] = (layer + 1, 0)
            assert int(tensor[block, head, token].view(torch.int16)[0]) == layer + 1


class TestMemfdAllocation:
    @pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
    def test_the_cache_is_born_on_a_memfd(self, dtype: torch.dtype) -> None:
        with MemfdAllocation() as allocation:
            buffer = torch.zeros(SIZE_BYTES, dtype=dtype, device=torch.device("cpu"))
        assert buffer.dtype == dtype
        assert buffer.shape == (SIZE_BYTES,)
        assert not buffer.any()
        assert allocation.size_bytes % mmap.PAGESIZE == 0
        assert os.fstat(allocation.fd).st_size == allocation.size_bytes >= SIZE_BYTES
        assert not os.get_inheritable(allocation.fd)
        assert [one for one in flags_of("memfd:kvlake-kv") if "dd" in one], "left out of core dumps"
        caches = caches_over(buffer)
        memory = export(whole(caches), allocation)
        assert memory.fd == allocation.fd
        check_shared(memory, caches)
        memory.close()
        memory.close()

    def test_its_pages_are_on_the_node_of_the_engine(self) -> None:
        """Also those that a sidecar touches first, which maps them ahead."""
        with MemfdAllocation():
            cache = torch.zeros(4096, dtype=torch.int8)
        _, nodes = policy_at(cache.data_ptr())
        assert nodes != 0

    def test_its_size_is_sealed(self) -> None:
        with MemfdAllocation() as allocation:
            buffer = torch.zeros(SIZE_BYTES, dtype=torch.int8, device="cpu")
        check_sealed("memory", allocation.fd, allocation.size_bytes)
        for size_bytes in (0, 2 * allocation.size_bytes):
            with pytest.raises(PermissionError):
                os.ftruncate(allocation.fd, size_bytes)
        buffer.fill_(1)
        os.close(allocation.fd)

    def test_the_memory_outlives_its_descriptor(self) -> None:
        with MemfdAllocation() as allocation:
            buffer = torch.zeros(SIZE_BYTES, dtype=torch.int8, device="cpu")
        os.close(allocation.fd)
        buffer.fill_(7)
        assert int(buffer.sum()) == 7 * SIZE_BYTES

    def test_other_allocations_pass_through(self) -> None:
        with MemfdAllocation() as allocation:
            others = [
                torch.zeros(16, dtype=torch.float32, device="cpu"),
                torch.zeros(16),
                torch.zeros(4, 4, dtype=torch.int8),
                torch.zeros((4, 4), dtype=torch.int8),
                torch.zeros(0, dtype=torch.int8),
                torch.zeros(16, dtype=torch.int8, device="meta"),
                torch.ones(16, dtype=torch.int8),
                torch.empty(16, dtype=torch.int8),
            ]
        assert allocation.fd == -1
        assert [tuple(other.shape) for other in others][2:4] == [(4, 4), (4, 4)]

    def test_only_the_first_is_taken(self) -> None:
        with MemfdAllocation() as allocation:
            first = torch.zeros(SIZE_BYTES, dtype=torch.int8)
            second = torch.zeros(SIZE_BYTES, dtype=torch.int8)
        assert first.data_ptr() == allocation.address
        assert second.data_ptr() != allocation.address
        os.close(allocation.fd)

    def test_vllm_allocates_its_cache_there(self) -> None:
        """The real allocator, so that a vLLM that allocates differently is noticed here."""
        from vllm.v1.kv_cache_interface import KVCacheLayout, KVCacheTensor
        from vllm.v1.worker.utils import allocate_kv_cache

        spec = FullAttentionSpec(block_size=32, num_kv_heads=HEADS, head_size=32, dtype=DTYPE)
        page = spec.page_size_bytes
        names = [f"layer.{index}" for index in range(LAYERS)]
        size = LAYERS * BLOCKS * page
        tensor = KVCacheTensor(
            size=size, layers=names, layer_stride=BLOCKS * page, block_stride=page, offset=0
        )
        config = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[tensor],
            kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        )
        with MemfdAllocation() as allocation:
            caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC)
        assert allocation.fd >= 0, "vLLM's KV cache is no longer one torch.zeros of int8"
        memory = export(whole(caches), allocation)
        assert memory.fd == allocation.fd
        assert memory.layouts[0].num_blocks == BLOCKS
        assert memory.layouts[0].block_tokens == 32
        assert memory.layouts[0].size_bytes >= size
        memory.close()


@pytest.mark.promise("padded-pages")
def test_groups_that_lie_over_each_other() -> None:
    """As in a hybrid model: other layers in the same bytes, with pages of their own."""
    with MemfdAllocation() as allocation:
        buffer = torch.zeros(SIZE_BYTES, dtype=torch.int8)
    caches = caches_over(buffer)
    # Blocks with twice the tokens and half the heads; a quarter of each page is padding.
    shape, strides = (BLOCKS, 1, 24, CONTENT), (HEADS * TOKENS * CONTENT, 0, CONTENT, 1)
    over = [torch.as_strided(buffer.view(DTYPE), shape, strides, layer * 640) for layer in (0, 2)]
    groups = [*whole(caches), GroupTensors(over, Segment(0, 2, 0, 1), "other")]
    memory = export(groups, allocation)
    assert memory.layouts[1].block_tokens == 24
    assert memory.layouts[1].size_bytes == memory.layouts[0].size_bytes
    over[1][3, 0, 23] = 1.0
    place = offset_of(memory.layouts[1], 1, 3, 0, 23)
    assert (
        through(memory)[place : place + 2 * CONTENT].view(np.int16).tolist() == [0x3F80] * CONTENT
    )
    memory.close()


class TestRefused:
    def test_several_allocations(self) -> None:
        caches = {
            f"layer.{index}": torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT, dtype=DTYPE)
            for index in range(LAYERS)
        }
        with pytest.raises(ExportRefused, match="3 allocations"):
            export(whole(caches), None)

    def test_memory_that_was_not_allocated_on_a_memfd(self) -> None:
        with MemfdAllocation() as allocation:
            torch.zeros(64, dtype=torch.int8)
            caches = caches_over(torch.zeros(SIZE_BYTES, dtype=torch.int8))
        with pytest.raises(ExportRefused, match="use a supported"):
            export(whole(caches), allocation)
        os.close(allocation.fd)

    def test_a_device(self) -> None:
        caches = {"layer.0": torch.zeros(1, 1, 1, 1, device="meta")}
        with pytest.raises(ExportRefused, match="meta"):
            export(whole(caches), None)

    def test_tensors_that_are_no_layout(self) -> None:
        with MemfdAllocation() as allocation:
            buffer = torch.zeros(SIZE_BYTES, dtype=torch.int8)
        same = caches_over(buffer)["layer.0"]
        with pytest.raises(LayoutError):
            export(whole({"a": same, "b": same[:, :1], "c": same}), allocation)
        os.close(allocation.fd)
