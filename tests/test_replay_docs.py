"""Made-up workloads, and the section of the documentation that a replay fills."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.replay.__main__ import main
from benchmarks.replay.docs import BEGIN, END, section
from benchmarks.replay.traces import read_trace
from benchmarks.replay.workloads import CHUNK_TOKENS, WORKLOADS, merged

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, name: str, requests: int) -> Path:
    lines = (
        json.dumps({"keys": keys, "tokens_per_key": CHUNK_TOKENS})
        for keys in merged(name, 1, requests)
    )
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_can_be_replayed(tmp_path: Path, name: str) -> None:
    trace = read_trace(write(tmp_path / f"{name}.jsonl", name, 50))
    assert len(trace.requests) == 50
    assert merged(name, 1, 50) == merged(name, 1, 50)
    assert merged(name, 1, 50) != merged(name, 2, 50)
    assert trace.num_different < trace.num_keys, "something is used again"


def test_a_replay_fills_its_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tmp_path / "results" / "replay.json"
    monkeypatch.setattr("benchmarks.replay.__main__.RESULT", result)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n\nearlier\n\n{END}\nafter\n")
    trace = write(tmp_path / "chat.jsonl", "chat", 40)
    given = [str(trace), "--tokens", "16384", "--policies", "density", "lru", "--docs", str(page)]
    main([*given, "--plot", str(tmp_path / "hits.svg"), "--part", "all", "second"])
    assert "chat" in capsys.readouterr().out
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "earlier" not in text
    assert "### The second half of each trace" in text
    assert section(json.loads(result.read_text()), "../images/hits.svg") in text, "page and figures"
    assert text.count("\n| density |") == 5, "hits of two parts, time, the loop, memory"
    assert "../images/hits.svg" in text
    assert all(len(line) <= 100 for line in text.splitlines() if not line.startswith("|"))


def test_a_page_without_the_section_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    trace = write(tmp_path / "once.jsonl", "once", 5)
    with pytest.raises(ValueError, match="has no section"):
        main([str(trace), "--tokens", "16384", "--policies", "lru", "--quick", "--docs", str(page)])
