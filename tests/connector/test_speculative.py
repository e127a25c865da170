"""Speculative decoding: rejected drafts, and drafters with layers in the KV cache.

On vLLM's own scheduler, with a model that accepts the tokens that it would have generated and
checks all KV that it reads. On real engines: `tests/e2e/test_drafters.py`,
and n-grams in `tests/e2e/test_requests.py`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import Request

from connector.identity.profile import EngineProfile
from connector.identity.speculative import (
    NO_DRAFTS,
    Speculation,
    speculation_of,
    speculation_unsupported_reason,
)
from connector.offloading.spec import identity_note
from connector.vllm import KVLakeConnector
from tests.connector.configurations import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    kv_cache_config,
    request_of,
    vllm_config,
    write_model,
)
from tests.connector.content import next_token
from tests.connector.conversations import converse, prompt_of
from tests.connector.engine import Engine
from tiers.kv.keys import KeyChain

DRAFTS = 3
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        "method": "eagle",
        "model": str(write_drafter(tmp_path_factory.mktemp("eagle"), "EagleLlamaForCausalLM")),
        "num_speculative_tokens": DRAFTS,
    }


def write_drafter(folder: Path, architecture: str, weights: bytes = b"drafter") -> Path:
    """As `write_model`, of one layer."""
    write_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [architecture], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def some_right(seed: int) -> Callable[[Request], list[int]]:
    """A drafter that guesses right for a while and then does not."""
    chooser = random.Random(seed)

    def draft(request: Request) -> list[int]:
        tokens = list(request.all_token_ids)
        for _ in range(chooser.randrange(DRAFTS + 1)):
            tokens.append(next_token(tokens))
        guesses = tokens[request.num_tokens :]
        return [*guesses, *[49] * (DRAFTS - len(guesses))]

    return draft


@pytest.fixture(params=["ngram", "eagle"])
def make(
    request: pytest.FixtureRequest, model: Path, eagle: dict[str, Any]
) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []
    ahead = request.param == "eagle"

    def engine_of(**options: Any) -> Engine:
        speculative = eagle if ahead else NGRAM
        options = {"speculative": speculative, "ahead_tokens": int(ahead), **options}
        engines.append(Engine(model, draft=some_right(1), **options))
        return engines[-1]

    yield engine_of
    for engine in engines:
        engine.close()


def loaded_tokens(engine: Engine, name: str, num_tokens: int) -> int:
    """Tokens of a prompt that were not computed, where drafts may have been beside them."""
    return -(-(num_tokens - engine.computed[name]) // BLOCK_TOKENS) * BLOCK_TOKENS


@pytest.mark.promise("ngram-drafts")
@pytest.mark.parametrize("length", [60, 128, 300])
def test_the_next_turn_finds_accepted_drafts(make: Callable[..., Engine], length: int) -> None:
    """All accepted tokens, and no rejected ones."""
    engine = make()
    first = engine.run(request_of("first", prompt_of(length, length), max_tokens=150))
    steps = engine.steps
    assert steps < 150, "some drafts were accepted"
    assert engine.computed["first"] > length + 150, "and some were not"
    engine.forget()
    turn = [*first.all_token_ids, *prompt_of(40, 2)]
    engine.computed.clear()
    engine.run(request_of("turn", turn, max_tokens=1))
    loaded = loaded_tokens(engine, "turn", len(turn))
    # The last token was not computed; of a drafter, nor is it known what follows the one before.
    assert loaded == (length + 150 - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    engine.check_idle()


@pytest.mark.promise("eagle")
def test_prompts_that_part_at_the_end_of_a_chunk(make: Callable[..., Engine]) -> None:
    """A drafter's KV of the last token depends on the next one, which makes another chunk."""
    engine = make()
    head = prompt_of(2 * CHUNK_TOKENS, 3)
    engine.run(request_of("one", [*head, 7, 8, 9], max_tokens=1))
    engine.forget()
    engine.run(request_of("other", [*head, 17, 18, 19], max_tokens=3))
    shared = CHUNK_TOKENS if engine.ahead_tokens else 2 * CHUNK_TOKENS
    engine.computed.clear()
    engine.forget()
    engine.run(request_of("third", [*head, 27], max_tokens=1))
    assert loaded_tokens(engine, "third", len(head) + 1) == shared
    engine.forget()
    engine.computed.clear()
    engine.run(request_of("again", [*head, 17, 18, 19], max_tokens=1))
    assert loaded_tokens(engine, "again", len(head) + 3) == len(head)
    engine.check_idle()


@pytest.mark.promise("eagle", "ngram-drafts")
@pytest.mark.parametrize("ranks", [1, 2])
def test_random_conversations_in_a_small_cache(make: Callable[..., Engine], ranks: int) -> None:
    """Preemption, eviction, failures, shared heads, and stores in flight."""
    # vLLM's own cache may give a drafter's layers a block from before another next token: it drops
    # the last block of a hit, not those of which it has several. Ours alone has to be exact.
    exact = {"prefix_caching": False} if make(num_blocks=8).ahead_tokens else {}
    engine = make(num_blocks=70, batch_tokens=96, ranks=ranks, **exact)
    converse(engine, 5, requests=20)


def test_a_step_that_is_too_long_for_the_drafter_stores_nothing(
    model: Path, eagle: dict[str, Any]
) -> None:
    """vLLM drafts for no request of such a step, and does not write the drafter's layers."""
    engine = Engine(
        model, draft=some_right(1), ahead_tokens=1, speculative={**eagle, "max_model_len": 300}
    )
    short, long = prompt_of(200, 1), prompt_of(297, 2)
    engine.run(request_of("short", short, max_tokens=1))
    assert engine.sidecar.parts
    before = set(engine.sidecar.parts)
    engine.forget()
    both = [engine.add(request_of(name, prompt_of(180, 3), max_tokens=1)) for name in ("a",)]
    both.append(engine.add(request_of("long", long, max_tokens=1)))
    engine.finish(*both)
    engine.settle()
    assert set(engine.sidecar.parts) == before
    engine.check_idle()
    engine.close()


@pytest.mark.parametrize(("num_blocks", "computes"), [(34, True), (35, False)])
def test_a_hit_that_leaves_no_block_for_drafts_is_computed(
    model: Path, num_blocks: int, computes: bool
) -> None:
    """vLLM would look it up forever, and never load it."""
    prompt = prompt_of(33 * BLOCK_TOKENS, 1)
    engine = Engine(model, num_blocks=num_blocks, draft=some_right(1), speculative=NGRAM)
    engine.run(request_of("first", prompt, max_tokens=1))
    engine.forget()
    again = engine.add(request_of("again", prompt, max_tokens=1))
    behind = engine.add(request_of("behind", prompt_of(20, 2), max_tokens=1))
    engine.finish(again, behind, steps_max=60)
    engine.settle()
    assert (engine.computed["again"] >= len(prompt)) == computes
    engine.check_idle()
    engine.close()


class TestNamespace:
    """Engines with the same drafter share, and others do not."""

    def namespace(self, model: Path, speculative: dict[str, Any] | None) -> bytes:
        engine = EngineProfile(vllm_config(model, speculative=speculative), kv_cache_config())
        assert engine.refusal == ""
        return engine.groups[0].namespace

    def test_n_grams_share_with_engines_that_do_not_draft(self, model: Path) -> None:
        assert self.namespace(model, NGRAM) == self.namespace(model, None)

    @pytest.mark.promise("eagle")
    def test_a_drafter_is_part_of_the_namespace(
        self, model: Path, eagle: dict[str, Any], tmp_path: Path
    ) -> None:
        other = write_drafter(tmp_path, "EagleLlamaForCausalLM", b"trained on")
        found = {
            self.namespace(model, None),
            self.namespace(model, eagle),
            self.namespace(model, {**eagle, "model": str(other)}),
        }
        assert len(found) == 3
        # The specs of vLLM's layers are equal with both FP8 formats.
        for name, values in {
            "kv_cache_dtype": ("fp8_e4m3", "fp8_e5m2"),
            "attention_backend": ("FLASH_ATTN", "TRITON_ATTN"),
        }.items():
            found |= {self.namespace(model, {**eagle, name: value}) for value in values}
        assert len(found) == 7
        more = {**eagle, "num_speculative_tokens": 5}
        assert self.namespace(model, more) == self.namespace(model, eagle)

    def test_a_drafter_is_part_of_an_offloading_identity(
        self, model: Path, eagle: dict[str, Any]
    ) -> None:
        plain, ngram, speculation = (
            identity_note(vllm_config(model, speculative=speculative), BLOCK_TOKENS)
            for speculative in (None, NGRAM, eagle)
        )
        assert plain == ngram
        assert speculation["identity"] == plain["identity"] | {
            "drafter": speculation_of(vllm_config(model, speculative=eagle)).drafter
        }
        config = vllm_config(model, speculative=eagle)
        assert config.speculative_config is not None
        config.speculative_config.method = "dflash"
        assert "'dflash'" in identity_note(config, BLOCK_TOKENS)["refusal"]


class TestRefused:
    @pytest.mark.promise("refuse-drafters")
    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"parallel_drafting": True}, "parallel_drafting"),
            ({"num_speculative_tokens_per_batch_size": [(1, 8, 2)]}, "per_batch_size"),
            ({"method": "dflash"}, "'dflash'"),
            ({"method": "custom_class"}, "'custom_class'"),
        ],
    )
    def test_unsafe_methods(
        self,
        model: Path,
        eagle: dict[str, Any],
        changes: dict[str, Any],
        reason: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        config = vllm_config(model, speculative=eagle)
        for name, value in changes.items():
            setattr(config.speculative_config, name, value)
        assert reason in speculation_unsupported_reason(config)
        connector = KVLakeConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config())
        assert connector.get_num_new_matched_tokens(request_of("a", [1, 2]), 0) == (0, False)
        (line,) = [one.getMessage() for one in caplog.records if "without the cache" in one.message]
        assert reason in line

    @pytest.mark.promise("refuse-drafters")
    def test_replicated_heads_of_a_drafter(self, model: Path, eagle: dict[str, Any]) -> None:
        config = vllm_config(model, speculative=eagle, ranks=2)
        assert speculation_unsupported_reason(config) == ""
        assert config.speculative_config is not None
        config.speculative_config.draft_parallel_config.tensor_parallel_size = 1
        assert "draft_tensor_parallel_size=1" in speculation_unsupported_reason(config)
        config.speculative_config.draft_parallel_config.tensor_parallel_size = 4
        config.parallel_config.tensor_parallel_size = 4
        assert "2 KV heads for 4 ranks" in speculation_unsupported_reason(config)

    @pytest.mark.promise("refuse-drafters")
    def test_pipeline_stages(self, model: Path) -> None:
        config = vllm_config(model, speculative=NGRAM)
        config.parallel_config.pipeline_parallel_size = 2
        assert "pipeline stages" in speculation_unsupported_reason(config)


def test_how_an_engine_drafts(model: Path, eagle: dict[str, Any]) -> None:
    assert speculation_of(vllm_config(model)) == NO_DRAFTS
    ngrams = speculation_of(vllm_config(model, speculative=NGRAM))
    assert ngrams == Speculation(draft_tokens=DRAFTS)
    found = speculation_of(vllm_config(model, speculative=eagle))
    assert (found.ahead_tokens, found.draft_tokens) == (1, DRAFTS)
    assert found.drafter["method"] == "eagle"
    assert not found.leaves_out([2000])
    assert found.leaves_out([10, 2046])
    assert not NO_DRAFTS.leaves_out([10**9])
    assert not Speculation(sequence_tokens_max=5).leaves_out([])


def test_the_second_model_runner_drafts_in_steps_of_any_length(
    model: Path, eagle: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was stored of the requests of a step beyond an EAGLE head's own length."""
    config = vllm_config(model, speculative=eagle)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert config.use_v2_model_runner
    assert not speculation_of(config).leaves_out([10**9])


def test_keys_that_cover_the_next_token() -> None:
    """The same chunk before another token has another key; before none, it has no key yet."""
    tokens = list(range(8))

    def keys(*more: int, ahead_tokens: int = 1) -> list[bytes]:
        chain = KeyChain(b"root", 4, 2, ahead_tokens=ahead_tokens)
        chain.extend([*tokens, *more])
        return list(chain.keys)

    assert len(keys()) == 1
    assert keys(8)[0] == keys()[0]
    assert len({keys(8)[1], keys(9)[1], keys(8, ahead_tokens=0)[1]}) == 3
    chain = KeyChain(b"root", 4, 2, ahead_tokens=1)
    chain.extend(tokens[:6])
    assert (chain.decided_tokens, chain.partial_blocks(1)) == (5, 0)
    chain.extend(tokens[6:7])
    assert chain.partial_blocks(1) == 1
    other = KeyChain(b"root", 4, 2, ahead_tokens=1)
    other.extend([*tokens[:6], 77])
    assert chain.partial(1, 1) != other.partial(1, 1)
