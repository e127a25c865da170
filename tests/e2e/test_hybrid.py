"""A model that mixes sliding windows and full attention (gemma 3), on a real engine.

vLLM puts its layers into three KV cache groups, one of full attention and two of windows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from sidecar.demo.model import WORDS
from tests.e2e.arms import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    Call,
    Measured,
    Oracle,
    empty,
    fresh_salt,
    has_host_tier,
    whole_blocks,
    words,
)
from tests.e2e.group_suite import GroupSuite, engine_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess
    from tests.harness.sidecars import SidecarProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.promise("connector", "gemma-3", "suite-windows", "windows-mixed"),
]

WINDOW: Final = 128


def write_gemma(folder: Path) -> None:
    """Six layers, two of them of full attention, with random weights fixed by a seed."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config: Any = Gemma3TextConfig(
        vocab_size=WORDS + 3,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=32_768,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )
    config.initializer_range = 0.1
    make: Any = Gemma3ForCausalLM
    make(config).to(torch.bfloat16).save_pretrained(folder)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    model = tmp_path_factory.mktemp("gemma")
    write_gemma(model)
    with engine_of(model, folder) as engine:
        yield engine


class TestGemma(GroupSuite):
    @pytest.mark.nightly
    def test_engine_restarted(
        self, folder: Path, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        super().test_engine_restarted(folder, engine, sidecar)

    @pytest.mark.nightly
    def test_two_ranks(self, folder: Path, engine: EngineProcess) -> None:
        super().test_two_ranks(folder, engine)

    def blocks_read(self, tokens: int) -> int:
        """All of full attention, and of each window those that it still reaches."""
        return tokens // BLOCK_TOKENS + (self.groups - 1) * reached(tokens, BLOCK_TOKENS)

    def chunks_read(self, tokens: int) -> int:
        """All of full attention, and of each window those that it still reaches."""
        return -(-tokens // CHUNK_TOKENS) + (self.groups - 1) * reached(tokens, WINDOW)

    @pytest.mark.nightly
    def test_next_turn(self, engine: EngineProcess, sidecar: SidecarProcess) -> None:
        first = Call(words(700, 2), max_tokens=300)
        answer = engine.generate(first.prompt, max_tokens=300, cache_salt=fresh_salt()).tokens
        salt = fresh_salt()
        empty(engine)
        engine.generate(first.prompt, max_tokens=300, cache_salt=salt)
        empty(engine)
        turn = [*first.prompt, *answer, *words(150, 3)]
        generation = engine.generate(turn, cache_salt=salt)
        # The last generated token was never computed. vLLM's host tier has windows where the engine
        # itself keeps them.
        held_tokens = 700 if has_host_tier(engine) else 1000
        assert generation.cached_tokens == whole_blocks(held_tokens)
        # With the prompt as one, its windows' ends are where the engine keeps them too.
        Oracle(engine, Call(turn)).check_close(generation)

    def test_a_shared_head_is_found_where_vllm_itself_keeps_no_windows(
        self, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        """The engine keeps windows at the ends of prompts alone; host memory has them all along.

        vLLM's host tier has those of the engine, and so has the sidecar below it.
        """
        shared = words(3 * CHUNK_TOKENS + 50, 4)
        salt = fresh_salt()
        engine.generate([*shared, *words(300, 5)], cache_salt=salt)
        empty(engine)
        second = [*shared, *words(200, 6)]
        generation = engine.generate(second, cache_salt=salt)
        assert generation.cached_tokens == (0 if has_host_tier(engine) else 3 * CHUNK_TOKENS)
        Oracle(engine, Call(second)).check_close(generation)


def reached(tokens: int, piece_tokens: int) -> int:
    """Blocks or chunks in which a window lies that a token behind this many others reads."""
    return -(-tokens // piece_tokens) - max(tokens - WINDOW + 1, 0) // piece_tokens


def check_bytes(measured: Measured, oracle: Measured) -> None:
    """Assert of any engine of this model what the suite asserts of its own."""
    TestGemma().check_bytes(measured, oracle)
