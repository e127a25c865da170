"""A small DeepSeek-V3 without experts, for its multi-head latent attention (MLA)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.demo.model import SIZES, save_random, write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path


def write_mla_model(
    folder: Path, *, layers: int, hidden: int, heads: int, latent: int, head_dim: int = 64
) -> Path:
    """Save it with random weights and the demo's tokenizer; returns the folder.

    It keeps `latent` values per token and layer, and 64 for the positions.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    write_tokenizer(folder)
    config = DeepseekV3Config(
        **SIZES,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        kv_lora_rank=latent,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=head_dim,
        v_head_dim=head_dim,
        first_k_dense_replace=layers,
        n_routed_experts=8,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    )
    return save_random(DeepseekV3ForCausalLM, config, folder, 0)
