"""Images in prompts, on a real engine: a small Idefics 3, a llama with a tower of SigLIP's kind.

An image is some dozens of tokens of one id, so prompts with other images are the same tokens; what
tells their KV apart is the image's hash, in the keys of all chunks that it overlaps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from sidecar.demo.engine import Engine, EngineSpec
from sidecar.demo.model import WORDS
from sidecar.demo.sidecars import SidecarProcess
from tests.e2e.arms import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    Call,
    check_hit,
    close,
    empty,
    fresh_salt,
    same_output,
    words,
)
from tests.e2e.setups import SMALL, attached, sidecar_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.engine

IMAGE: Final = WORDS + 3
"""The token that stands for an image, behind the words and the tokenizer's special ones."""
PIXELS: Final = 64
PATCH_PIXELS: Final = 8
PATCHES: Final = (PIXELS // PATCH_PIXELS) ** 2
SPECIAL: Final = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
IMAGE_TOKENS: Final = PATCHES + 3
"""What the token becomes: one for each patch, in a frame of others."""


def write_idefics(folder: Path, tokenizer_from: str) -> None:
    """Random weights, fixed by a seed. Pillow prepares the images: there is no torchvision."""
    import torch
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3Processor,
        LlamaConfig,
    )
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )

    make_tokenizer: Any = AutoTokenizer
    tokenizer = make_tokenizer.from_pretrained(tokenizer_from)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE
    make_images: Any = Idefics3ImageProcessorPil
    edge = {"longest_edge": PIXELS}
    images = make_images(size=edge, max_image_size=edge, do_image_splitting=False)
    make_processor: Any = Idefics3Processor
    make_processor(images, tokenizer, image_seq_len=PATCHES).save_pretrained(folder)
    torch.manual_seed(0)
    text: Any = LlamaConfig(
        vocab_size=IMAGE + len(SPECIAL),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32_768,
        bos_token_id=WORDS + 1,
        eos_token_id=WORDS + 2,
        pad_token_id=WORDS + 2,
    )
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": PIXELS,
        "patch_size": PATCH_PIXELS,
    }
    config: Any = Idefics3Config(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE,
        scale_factor=1,
        tie_word_embeddings=False,
        pad_token_id=WORDS + 2,
    )
    for part in (config, config.text_config, config.vision_config):
        part.initializer_range = 0.1
    make: Any = Idefics3ForConditionalGeneration
    make(config).to(torch.bfloat16).save_pretrained(folder)


@pytest.fixture(scope="module")
def engine(folder: Path, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    idefics = tmp_path_factory.mktemp("idefics")
    write_idefics(idefics, model)
    spec = EngineSpec(str(idefics), sidecar_in(folder).socket, SMALL)
    with Engine(spec, folder / "engine.log") as engine:
        yield engine.wait_ready()


@pytest.fixture(scope="module")
def sidecar(folder: Path, engine: Engine) -> Iterator[SidecarProcess]:
    with attached(folder, engine) as sidecar:
        yield sidecar


def prompt_of(before: int, behind: int, seed: int = 1) -> list[int]:
    """So many words before an image and behind it."""
    return [*words(before, seed), IMAGE, *words(behind, seed + 1)]


@pytest.mark.parametrize(
    "before", [0, CHUNK_TOKENS - 24, CHUNK_TOKENS + 40], ids=["first", "over two chunks", "second"]
)
def test_another_image_shares_only_what_is_before_it(
    engine: Engine, sidecar: SidecarProcess, before: int
) -> None:
    prompt = prompt_of(before, 500)
    tokens = before + IMAGE_TOKENS + 500
    one, other = ({"image": seed} for seed in (1, 2))
    found = check_hit(engine, Call(prompt, options=one))
    assert found.cached_tokens == tokens // BLOCK_TOKENS * BLOCK_TOKENS
    # Now under one salt, from a sidecar that has the prompt with the first image.
    salt = fresh_salt()
    empty(engine)
    first = Call(prompt, options=one).generate(engine, salt)
    assert first.cached_tokens == 0
    empty(engine)
    second = Call(prompt, options=other).generate(engine, salt)
    assert second.cached_tokens == before // CHUNK_TOKENS * CHUNK_TOKENS
    assert second.logprobs[0] != first.logprobs[0], "an image changes what is said"
    for options, expected, same in ((one, found, same_output), (other, second, close)):
        empty(engine)
        again = Call(prompt, options=options).generate(engine, salt)
        assert again.cached_tokens == found.cached_tokens
        # What was computed behind the shared head is rounded otherwise.
        assert same(again, expected)


def test_a_hit_that_ends_inside_an_image(engine: Engine, sidecar: SidecarProcess) -> None:
    """The rest of the image is computed, of which the tower's output is needed again."""
    image = {"image": 3}
    head = CHUNK_TOKENS - 24
    short, long = prompt_of(head, 0), prompt_of(head, 400)
    oracle_call = Call(long, options=image)
    found = check_hit(engine, oracle_call, before=[Call(short, options=image)])
    assert CHUNK_TOKENS <= found.cached_tokens < head + IMAGE_TOKENS
    # Another one of the same tokens is no hit at all.
    salt = fresh_salt()
    empty(engine)
    Call(short, options=image).generate(engine, salt)
    empty(engine)
    assert Call(long, options={"image": 4}).generate(engine, salt).cached_tokens == 0
