"""Images in prompts, on a real engine: a small Idefics 3, a llama with a tower of SigLIP's kind.

An image is some dozens of tokens of one id, so prompts with other images are the same tokens; what
tells their KV apart is the image's hash, in the keys of all chunks that it overlaps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from sidecar.demo.model import WORDS
from tests.e2e.arms import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    GENERATED_TOKENS,
    SESSIONS,
    Call,
    attach,
    check_equal,
    check_hit,
    chunk_tokens,
    close,
    counters,
    empty,
    fresh_salt,
    idle,
    same_output,
    whole_blocks,
    words,
)
from tests.e2e.group_suite import GroupSuite, engine_of, nightly_but
from tests.harness.engine import EngineProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.arms import Measured
    from tests.harness.sidecars import SidecarProcess

pytestmark = [pytest.mark.engine, pytest.mark.promise("connector", "idefics-3", "suite-multimodal")]

IMAGE: Final = WORDS + 3
"""The token that stands for an image, behind the words and the tokenizer's special ones."""
PIXELS: Final = 64
PATCH_PIXELS: Final = 8
PATCHES: Final = (PIXELS // PATCH_PIXELS) ** 2
SPECIAL: Final = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
IMAGE_TOKENS: Final = PATCHES + 3
"""What the token becomes: one for each patch, in a frame of others."""
COUNTING: Final = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
"""Options of an engine that needs no hashes of images, and makes none."""


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
def engine(
    folder: Path, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    idefics = tmp_path_factory.mktemp("idefics")
    write_idefics(idefics, model)
    # What prepares the images needs the tokenizer.
    with engine_of(idefics, folder, skip_tokenizer_init=False) as engine:
        yield engine


def call_of(before: int, behind: int, image: int, max_tokens: int = GENERATED_TOKENS) -> Call:
    """So many words before an image and behind it. The words are always the same."""
    prompt = words(before + behind, 1)
    prompt.insert(before, IMAGE)
    return Call(prompt, max_tokens, {"image": image}, IMAGE_TOKENS - 1)


def shared_tokens(engine: EngineProcess, call: Call) -> int:
    """What a call finds of one with another image: the whole chunks before it."""
    chunk = chunk_tokens(engine)
    return call.prompt.index(IMAGE) // chunk * chunk


class TestIdefics3(GroupSuite):
    """Each prompt has an image, where there is room over the end of its first chunk.

    Requests with other seeds have the same words, but another image.
    """

    groups = 1
    preempted_tokens = 690
    begin_otherwise = False
    ranks_have_a_store = True

    @pytest.mark.nightly
    def test_engine_restarted(
        self, folder: Path, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        super().test_engine_restarted(folder, engine, sidecar)

    @pytest.mark.nightly
    def test_two_ranks(self, folder: Path, engine: EngineProcess) -> None:
        super().test_two_ranks(folder, engine)

    def call(self, tokens: int, seed: int, max_tokens: int = GENERATED_TOKENS) -> Call:
        before = min(CHUNK_TOKENS - 24, tokens - IMAGE_TOKENS)
        return call_of(before, tokens - IMAGE_TOKENS - before, seed, max_tokens)

    def another(self, call: Call) -> Call:
        """The same words around another image."""
        return replace(call, options={"image": call.options["image"] + 1})

    def blocks_read(self, tokens: int) -> int:
        return tokens // BLOCK_TOKENS

    def chunks_read(self, tokens: int) -> int:
        return -(-tokens // CHUNK_TOKENS)

    def check_bytes(self, measured: Measured, oracle: Measured) -> None:
        """There is nothing but the one group, so all of it must be the same."""
        check_equal(measured, oracle)

    def check_same(self, engine: EngineProcess, call: Call, expected: Measured) -> None:
        """And that another image is not taken for the one that is known."""
        super().check_same(engine, call, expected)
        empty(engine)
        another = self.another(call).generate(engine, expected.salt)
        assert another.cached_tokens == shared_tokens(engine, call)
        assert another.logprobs != expected.generation.logprobs

    @pytest.mark.parametrize("tokens", nightly_but(515, [125, 165, 515, 1500]))
    def test_host_hits(self, engine: EngineProcess, sidecar: SidecarProcess, tokens: int) -> None:
        """None of whole blocks: of such a prompt all is loaded, not only what vLLM would find."""
        super().test_host_hits(engine, sidecar, tokens)

    @pytest.mark.promise("multimodal")
    @pytest.mark.parametrize(
        "before",
        [0, CHUNK_TOKENS - 24, CHUNK_TOKENS + 40],
        ids=["first", "over two chunks", "second"],
    )
    def test_another_image_shares_only_what_is_before_it(
        self, engine: EngineProcess, sidecar: SidecarProcess, before: int
    ) -> None:
        one, other = (call_of(before, 500, image) for image in (1, 2))
        found = check_hit(engine, one)
        assert found.cached_tokens == whole_blocks(one.tokens)
        # Now under one salt, from a sidecar that has the prompt with the first image.
        salt = fresh_salt()
        empty(engine)
        first = one.generate(engine, salt)
        assert first.cached_tokens == 0
        empty(engine)
        second = other.generate(engine, salt)
        assert second.cached_tokens == shared_tokens(engine, one)
        assert second.logprobs[0] != first.logprobs[0], "an image changes what is said"
        for call, expected, same in ((one, found, same_output), (other, second, close)):
            empty(engine)
            again = call.generate(engine, salt)
            assert again.cached_tokens == found.cached_tokens
            # What was computed behind the shared head is rounded otherwise.
            assert same(again, expected)

    @pytest.mark.promise("multimodal")
    def test_a_hit_that_ends_inside_an_image(
        self, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        """The rest of the image is computed, of which the tower's output is needed again."""
        head = CHUNK_TOKENS - 24
        short, long = (call_of(head, behind, 3) for behind in (0, 400))
        found = check_hit(engine, long, before=[short])
        assert CHUNK_TOKENS <= found.cached_tokens < head + IMAGE_TOKENS
        # For another image with the same tokens, only what is before it.
        salt = fresh_salt()
        empty(engine)
        short.generate(engine, salt)
        empty(engine)
        again = self.another(long).generate(engine, salt)
        assert again.cached_tokens == shared_tokens(engine, long)

    def test_a_prompt_that_ends_with_an_image(
        self, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        """A prompt of whole blocks: its last token, one of the image's, is computed again."""
        call, salt = call_of(5 * BLOCK_TOKENS - IMAGE_TOKENS, 0, 5), fresh_salt()
        empty(engine)
        cold = call.generate(engine, salt)
        empty(engine)
        again = call.generate(engine, salt)
        assert again.cached_tokens == call.tokens
        assert close(again, cold)

    @pytest.mark.promise("media-not-hashed")
    @pytest.mark.nightly
    def test_images_that_vllm_only_counts_are_not_cached(
        self, folder: Path, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        """An engine that hashes no image stores none; it stores prompts of words alone."""
        call, text = self.call(900, 40), Call(words(900, 41))
        salt = fresh_salt()
        call.generate(engine, salt)
        empty(engine)
        engine_args = {**engine.spec.engine_args, **COUNTING}
        spec, log = replace(engine.spec, engine_args=engine_args), folder / "counting.log"
        with EngineProcess(spec, log) as counting:
            counting.wait_ready()
            attach(counting, sidecar, sessions=2 * SESSIONS)
            sidecar.wait("everything ended", idle)
            before = counters(sidecar)
            for _ in range(2):
                assert call.generate(counting, salt).cached_tokens == 0
                empty(counting)
            assert counters(sidecar) == before, "nothing is stored or loaded"
            assert text.generate(counting, salt).cached_tokens == 0
            empty(counting)
            assert text.generate(counting, salt).cached_tokens == whole_blocks(text.tokens)
            empty(counting)
        sidecar.wait("it is gone", lambda now: len(now["sessions"]) == SESSIONS)
        assert log.read_text().count("images, audio or video are not cached") == 1
