"""The demo's model as `kvlake demo --model-only` writes it: text is what it says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli import main
from sidecar.demo.model import WORDS, write_model
from sidecar.exits import Exit


def test_without_vllm_the_demo_says_where_to_run_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert main(["demo"]) == Exit.USAGE
    assert "run the demo in the engine's environment" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder: Path = tmp_path_factory.mktemp("model")
    write_model(folder, layers=1, hidden=64, heads=1, kv_heads=1)
    make: Any = AutoTokenizer
    return make.from_pretrained(folder)


def test_different_text_gives_different_tokens(tokenizer: Any) -> None:
    said = ("The quick brown fox", "The quick brown fix", "naïve café", "日本語", "")
    prompts = [tuple(tokenizer.encode(text)) for text in said]
    assert len(set(prompts)) == len(said)
    assert all(0 <= token < WORDS for prompt in prompts for token in prompt)


def test_words_of_the_vocabulary_are_one_token_each(tokenizer: Any) -> None:
    assert tokenizer.encode("w0 w17 w3839") == [0, 17, 3839]
    assert tokenizer.decode([0, 17, 3839]) == "w0 w17 w3839"
    assert tokenizer.decode(tokenizer.encode("café w1")) == "café w1"
