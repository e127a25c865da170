"""A small llama with random weights and a tokenizer made on the spot, saved in a folder.

Nothing is downloaded. The weights are random but fixed by a seed, so that two machines make the
same model; they are not the "dummy" weights of vLLM, whose uniform logits hide every error.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

WORDS: Final = 4096
"""Tokens of the vocabulary, the few special ones apart: `w0`, `w1` and so on, then the bytes."""
_BYTES: Final = 256
_SPECIAL: Final = ("<unk>", "<s>", "</s>")
_MARKER: Final = "kvlake-model.json"


def write_model(
    folder: Path,
    *,
    layers: int = 8,
    hidden: int = 512,
    heads: int = 8,
    kv_heads: int = 4,
    positions: int = 32_768,
    seed: int = 0,
    latent: int = 0,
) -> Path:
    """Save the model and its tokenizer in `folder`; a folder that has them is left as it is.

    The vocabulary is the words `w0` to `w3839`, 256 bytes and a few special tokens. So a prompt of
    known length can be written as text, `" ".join(f"w{i}" for i in ids)`, and other words are
    different prompts, too: each of their bytes is a token. Spaces count for nothing.

    With `latent` it is not a llama but a small DeepSeek-V3 without experts, whose MLA keeps so many
    values per token and layer, and 64 for the positions.
    """
    recipe: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "positions": positions,
        "seed": seed,
        "latent": latent,
    }
    marker = folder / _MARKER
    if marker.exists() and json.loads(marker.read_text()) == recipe:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    _write_weights(folder, recipe)
    marker.write_text(json.dumps(recipe))
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = WORDS - _BYTES
    vocabulary = {f"w{i}": i for i in range(words)}
    vocabulary |= {f"<0x{byte:02X}>": words + byte for byte in range(_BYTES)}
    vocabulary |= {token: WORDS + i for i, token in enumerate(_SPECIAL)}
    # No merges: a word that is in the vocabulary is one token, any other its bytes.
    model = models.BPE(
        vocabulary, [], unk_token=_SPECIAL[0], byte_fallback=True, ignore_merges=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex(r"^w(?=\d)"), " w"),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = dict(zip(("unk_token", "bos_token", "eos_token"), _SPECIAL, strict=True))
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, **special)
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


def _write_weights(folder: Path, recipe: dict[str, Any]) -> None:
    import torch
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
    )

    torch.manual_seed(recipe["seed"])
    common: dict[str, Any] = {
        "vocab_size": WORDS + 3,
        "hidden_size": recipe["hidden"],
        "intermediate_size": recipe["hidden"] * 2,
        "num_hidden_layers": recipe["layers"],
        "num_attention_heads": recipe["heads"],
        "num_key_value_heads": recipe["kv_heads"],
        "max_position_embeddings": recipe["positions"],
        "bos_token_id": WORDS + 1,
        "eos_token_id": WORDS + 2,
    }
    config: Any
    make: Any
    if recipe["latent"]:
        make = DeepseekV3ForCausalLM
        config = DeepseekV3Config(
            **common,
            kv_lora_rank=recipe["latent"],
            q_lora_rank=None,
            qk_rope_head_dim=64,
            qk_nope_head_dim=64,
            v_head_dim=64,
            first_k_dense_replace=recipe["layers"],
            n_routed_experts=8,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
        )
    else:
        make, config = LlamaForCausalLM, LlamaConfig(**common)
    # initializer_range at its default of 0.02 gives logits so flat that a wrong cache could
    # still yield the same ranking; five times that spreads them.
    config.initializer_range = 0.1
    make(config).to(torch.bfloat16).save_pretrained(folder)
