"""A model that mixes gated delta nets and full attention (Qwen3-Next), on a real engine.

A net keeps the inputs of a short convolution and a matrix of each head, in vLLM's cache mode
`align`: one KV cache group of attention and three of states. All that is asked of short
convolutions (`test_recurrent.py`) is asked of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from sidecar.demo.model import WORDS
from tests.e2e import test_recurrent
from tests.e2e.group_suite import engine_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.promise("connector", "qwen3-next", "recurrent", "suite-gated-deltas"),
]


def write_qwen3_next(folder: Path) -> None:
    """Eight layers, two of them of full attention, with random weights fixed by a seed."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config: Any = Qwen3NextConfig(
        vocab_size=WORDS + 3,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        # A page of attention has room for a state, so that blocks stay as small as they are asked.
        head_dim=256,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        # All of them for each token: where it takes the best of them, rounding may take another.
        num_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        max_position_embeddings=32_768,
        initializer_range=0.1,
    )
    make: Any = Qwen3NextForCausalLM
    model = make(config)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            # As it is drawn, most heads forget within a few tokens; so within dozens to hundreds,
            # and a wrong state would be heard.
            torch.nn.init.uniform_(layer.linear_attn.A_log, -7, -4)
    model.to(torch.bfloat16).save_pretrained(folder)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    model = tmp_path_factory.mktemp("qwen3-next")
    write_qwen3_next(model)
    with engine_of(model, folder) as engine:
        yield engine


class TestQwen3Next(test_recurrent.TestLfm2):
    groups: ClassVar = 4
    preempted_tokens: ClassVar = 330
