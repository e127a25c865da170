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
) -> Path:
    """Save the model and its tokenizer in `folder`; a folder that has them is left as it is.

    The vocabulary is the words `w0` to `w4095` and a few special tokens, so that any prompt of
    known length can be written as text: `" ".join(f"w{i}" for i in ids)`.
    """
    recipe: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "positions": positions,
        "seed": seed,
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
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{i}": i for i in range(WORDS)}
    vocabulary |= {token: WORDS + i for i, token in enumerate(_SPECIAL)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(zip(("unk_token", "bos_token", "eos_token"), _SPECIAL, strict=True))
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, **special)
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


def _write_weights(folder: Path, recipe: dict[str, Any]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(recipe["seed"])
    config = LlamaConfig(
        vocab_size=WORDS + 3,
        hidden_size=recipe["hidden"],
        intermediate_size=recipe["hidden"] * 2,
        num_hidden_layers=recipe["layers"],
        num_attention_heads=recipe["heads"],
        num_key_value_heads=recipe["kv_heads"],
        max_position_embeddings=recipe["positions"],
        bos_token_id=WORDS + 1,
        eos_token_id=WORDS + 2,
    )
    # initializer_range at its default of 0.02 gives logits so flat that a wrong cache could
    # still yield the same ranking; five times that spreads them.
    config.initializer_range = 0.1
    make: Any = LlamaForCausalLM
    make(config).to(torch.bfloat16).save_pretrained(folder)
