"""A small llama with random weights and a tokenizer made on the spot, saved in a folder.

Nothing is downloaded. The weights are random but fixed by a seed, so that two machines make the
same model; they are not the "dummy" weights of vLLM, whose uniform logits hide every error.
"""

from pathlib import Path
from typing import Any, Final

WORDS: Final = 4096
"""Tokens of the vocabulary, the few special ones apart: `w0`, `w1` and so on, then the bytes."""
_BYTES: Final = 256
_SPECIAL: Final = ("<unk>", "<s>", "</s>")
SIZES: Final[dict[str, Any]] = {
    "vocab_size": WORDS + len(_SPECIAL),
    "bos_token_id": WORDS + 1,
    "eos_token_id": WORDS + 2,
    "max_position_embeddings": 32_768,
}
"""What the configuration of any model with this tokenizer has."""


def write_model(
    folder: Path,
    *,
    layers: int = 8,
    hidden: int = 512,
    heads: int = 8,
    kv_heads: int = 4,
    seed: int = 0,
) -> Path:
    """Save the model and its tokenizer in `folder`; returns the folder.

    The vocabulary is the words `w0` to `w3839`, 256 bytes and a few special tokens. So a prompt of
    known length can be written as text, `" ".join(f"w{i}" for i in ids)`, and other words are
    different prompts, too: each of their bytes is a token. Spaces are ignored.
    """
    write_tokenizer(folder)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **SIZES,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )
    return save_random(LlamaForCausalLM, config, folder, seed)


def save_random(architecture: Any, config: Any, folder: Path, seed: int) -> Path:
    """Save a model with random weights; returns the folder."""
    import torch

    torch.manual_seed(seed)
    # initializer_range at its default of 0.02 gives logits so flat that a wrong cache could
    # still yield the same ranking; five times that spreads them.
    config.initializer_range = 0.1
    architecture(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Save the tokenizer in `folder`, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
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
