"""Layers that read a part of their past, on real engines.

Models of sliding windows alone (mistral), and of chunked local attention (llama 4). Windows beside
full attention are in `test_hybrid.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from sidecar.demo.model import WORDS
from tests.e2e.arms import BLOCK_TOKENS, CHUNK_TOKENS
from tests.e2e.group_suite import GroupSuite, engine_of
from tests.e2e.test_hybrid import WINDOW, reached
from tests.harness.engine import EngineProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.sidecars import SidecarProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.promise("connector", "suite-features"),
]


LOCAL_TOKENS: Final = 128
"""Tokens of a chunk of chunked local attention."""


def write_mistral(folder: Path) -> None:
    """Six layers of sliding windows, with random weights fixed by a seed."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config: Any = MistralConfig(
        vocab_size=WORDS + 3,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32_768,
        sliding_window=WINDOW,
    )
    config.initializer_range = 0.1
    make: Any = MistralForCausalLM
    make(config).to(torch.bfloat16).save_pretrained(folder)


@pytest.mark.promise("mistral", "windows-alone")
class TestWindowsAlone(GroupSuite):
    groups = 1

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, folder: Path) -> Path:
        """A folder of its own: the engine of the other cases may still run."""
        place = folder / "w"
        place.mkdir()
        return place

    @pytest.fixture(scope="class")
    @classmethod
    def engine(
        cls, folder: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[EngineProcess]:
        model = tmp_path_factory.mktemp("mistral")
        write_mistral(model)
        # So few that a dozen requests do not fit.
        with engine_of(model, folder, num_gpu_blocks_override=48) as engine:
            yield engine

    @pytest.mark.skip(reason="vLLM lets no more of them in than have room, and preempts none")
    def test_preemption(self, engine: EngineProcess, sidecar: SidecarProcess) -> None:
        super().test_preemption(engine, sidecar)

    def blocks_read(self, tokens: int) -> int:
        """Those that a window still reaches."""
        return reached(tokens, BLOCK_TOKENS)

    def chunks_read(self, tokens: int) -> int:
        """Those that a window still reaches."""
        return reached(tokens, WINDOW)


def write_llama4(folder: Path) -> None:
    """Six layers without experts, two of them of full attention, with random weights."""
    import torch
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(0)
    config: Any = Llama4TextConfig(
        vocab_size=WORDS + 3,
        hidden_size=256,
        intermediate_size=512,
        intermediate_size_mlp=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=32_768,
        attention_chunk_size=LOCAL_TOKENS,
        no_rope_layers=[1, 1, 0] * 2,
        moe_layers=[],
        interleave_moe_layer_step=0,
        num_local_experts=1,
        pad_token_id=0,
        bos_token_id=WORDS + 1,
        eos_token_id=WORDS + 2,
    )
    config.initializer_range = 0.1
    make: Any = Llama4ForCausalLM
    make(config).to(torch.bfloat16).save_pretrained(folder)


@pytest.mark.promise("chunked-local", "llama-4")
class TestChunkedLocal(GroupSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, folder: Path) -> Path:
        """A folder of its own: the engine of the other cases may still run."""
        place = folder / "l"
        place.mkdir()
        return place

    @pytest.fixture(scope="class")
    @classmethod
    def engine(
        cls, folder: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[EngineProcess]:
        model = tmp_path_factory.mktemp("llama4")
        write_llama4(model)
        with engine_of(model, folder) as engine:
            yield engine

    def blocks_read(self, tokens: int) -> int:
        """All of full attention, and of the others those of the chunk that is not over."""
        return tokens // BLOCK_TOKENS + (self.groups - 1) * (tokens % LOCAL_TOKENS) // BLOCK_TOKENS

    def chunks_read(self, tokens: int) -> int:
        """All of full attention, and of the others the one that is not over."""
        return -(-tokens // CHUNK_TOKENS) + (self.groups - 1) * bool(tokens % LOCAL_TOKENS)
