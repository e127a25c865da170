"""A model that mixes short convolutions and full attention (LFM2), on a real engine.

Its convolutions keep a state, in vLLM's cache mode `align`: one KV cache group of attention and two
of states.
"""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest

from sidecar.demo.model import WORDS
from tests.e2e.arms import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    CLOSE,
    SESSIONS,
    Call,
    attach,
    close,
    counters,
    empty,
    external_hit,
    fresh_salt,
    has_host_tier,
    idle,
    own_hit,
    same_output,
    whole_blocks,
    words,
)
from tests.e2e.group_suite import GroupSuite, engine_of
from tests.e2e.setups import sidecar_in
from tests.e2e.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess
    from tests.harness.sidecars import SidecarProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.promise("connector", "lfm2", "recurrent", "suite-recurrent"),
]

HIDDEN: Final = 256


def write_lfm2(folder: Path) -> None:
    """Six layers, two of them of full attention, with random weights fixed by a seed."""
    import torch
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    config: Any = Lfm2Config(
        vocab_size=WORDS + 3,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32_768,
        layer_types=["conv", "conv", "full_attention"] * 2,
        initializer_range=0.1,
    )
    make: Any = Lfm2ForCausalLM
    make(config).to(torch.bfloat16).save_pretrained(folder)
    # vLLM reads these of a published model's configuration; transformers knows them no more.
    path = folder / "config.json"
    described = json.loads(path.read_text()) | {"conv_dim": HIDDEN, "block_dim": HIDDEN}
    path.write_text(json.dumps(described))


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    model = tmp_path_factory.mktemp("lfm2")
    write_lfm2(model)
    with engine_of(model, folder) as engine:
        yield engine


class TestLfm2(GroupSuite):
    rounding: ClassVar = CLOSE

    @pytest.mark.nightly
    def test_engine_restarted(
        self, folder: Path, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        super().test_engine_restarted(folder, engine, sidecar)

    def blocks_read(self, tokens: int) -> int:
        """All of attention, and a state of each group."""
        return tokens // BLOCK_TOKENS + self.groups - 1

    def chunks_read(self, tokens: int) -> int:
        """All of attention, and a state of each group."""
        return -(-tokens // CHUNK_TOKENS) + self.groups - 1

    @pytest.mark.parametrize("more", [20, 166])
    def test_a_prompt_that_begins_with_another(
        self, engine: EngineProcess, sidecar: SidecarProcess, more: int
    ) -> None:
        """Within the block of the other's end, and over several."""
        first = Call(words(1200, 20 + more), max_tokens=1)
        longer = Call([*first.prompt, *words(more, 21 + more)], max_tokens=1)
        oracle = own_hit(engine, longer, before=[first])
        measured = external_hit(engine, longer, before=[first])
        cached_tokens = measured.generation.cached_tokens
        assert cached_tokens == oracle.generation.cached_tokens == whole_blocks(1200)
        assert same_output(measured.generation, oracle.generation)

    @pytest.mark.nightly
    def test_a_third_branch_finds_where_two_parted(
        self, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        """vLLM stops where the second one parts, in the middle of a chunk of attention.

        The engine itself reads there what the first one computed in another step, so all is equal
        but for rounding.
        """
        head = words(1100, 7)
        first, second, third = (
            Call([*head, *words(100, seed)], max_tokens=1) for seed in (8, 9, 10)
        )
        oracle = own_hit(engine, third, before=[first, second])
        measured = external_hit(engine, third, before=[first, second])
        cached_tokens = measured.generation.cached_tokens
        assert cached_tokens == oracle.generation.cached_tokens == whole_blocks(1100)
        assert close(measured.generation, oracle.generation)

    @pytest.mark.nightly
    def test_the_next_turn_finds_the_prompt(
        self, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        """And computes the answer again: vLLM hands over no states of generated tokens by default.

        It holds the answer's attention itself, and makes another step where that ends.
        """
        first = Call(words(1200, 11), max_tokens=100)
        answer = first.generate(engine, fresh_salt()).tokens
        turn = Call([*first.prompt, *answer, *words(50, 12)], max_tokens=1)
        oracle = own_hit(engine, turn, before=[first])
        measured = external_hit(engine, turn, before=[first])
        cached_tokens = measured.generation.cached_tokens
        assert cached_tokens == oracle.generation.cached_tokens == whole_blocks(1200)
        assert close(measured.generation, oracle.generation)

    @pytest.mark.promise("recurrent")
    def test_the_next_life_of_the_sidecar(self, folder: Path, engine: EngineProcess) -> None:
        """States outlive it in host memory as attention does."""
        sidecar = sidecar_in(folder, host={"size": "256MiB", "after_stop": "keep"})
        call = Call(words(1500, 5), max_tokens=1)
        try:
            attach(engine, sidecar.start())
            expected = own_hit(engine, call, before=[call])
            empty(engine)
            sidecar.wait("everything ended", idle)
            assert sidecar.process is not None
            sidecar.process.send_signal(signal.SIGKILL)
            sidecar.process.wait(60)
            attach(engine, sidecar.start())
            self.check_same(engine, call, expected)
            empty(engine)
            sidecar.wait("everything ended", idle)
            sidecar.drain()
        finally:
            sidecar.kill()
            sidecar.remove_pool()

    @pytest.mark.promise("recurrent")
    def test_what_the_engine_holds_and_a_sidecar_lost_is_stored_again(
        self, folder: Path, engine: EngineProcess
    ) -> None:
        """The next sidecar gets the state from a request that goes on from the engine's own.

        Not from vLLM's offloading, which takes a state when it is handed over and never again, and
        what it held of attention only. So the prompt is computed, and from then on found.
        """
        call = Call(words(1200, 13), max_tokens=1)
        with sidecar_in(folder) as sidecar:
            attach(engine, sidecar)
            expected = own_hit(engine, call, before=[call])
        with sidecar_in(folder) as sidecar:
            sidecar.wait("the engine attaches", lambda now: len(now["sessions"]) == SESSIONS)
            chunks = expected_chunks = self.chunks_read(whole_blocks(1200))
            if has_host_tier(engine):
                chunks -= self.groups - 1

            def stored() -> bool:
                call.generate(engine, expected.salt)
                return counters(sidecar)["chunks_stored"] >= chunks

            # The sidecar knows a session a moment before the engine does.
            until("what the engine holds is stored", stored)
            assert counters(sidecar)["chunks_loaded"] == 0
            if has_host_tier(engine):
                empty(engine)
                assert call.generate(engine, expected.salt).cached_tokens == 0
            loaded = counters(sidecar)["chunks_loaded"]
            self.check_same(engine, call, expected)
            assert counters(sidecar)["chunks_loaded"] - loaded == expected_chunks
            empty(engine)
            sidecar.wait("everything ended", idle)
