"""`kvlake demo --json`: what a newcomer runs first says the truth, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine

SCENES = [
    "cold",
    "engine_prefix_hit",
    "host_hit",
    "engine_restart_hit",
    "object_store_hit",
    "other_cluster_hit",
    "sidecar_killed",
]


@pytest.mark.timeout(1200)
def test_json_is_the_only_output_and_every_scene_is_right(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sidecar.cli", "demo", "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 1
    result = json.loads(lines[0])
    assert list(result) == ["engine", "prompt_tokens", "ttft_ms", "tokens_loaded", "logprobs_equal"]
    assert result["engine"].startswith("vllm ")
    assert result["prompt_tokens"] == 3000
    for measured in (result["ttft_ms"], result["tokens_loaded"], result["logprobs_equal"]):
        assert list(measured) == SCENES
    assert all(result["logprobs_equal"].values())
    assert all(ttft > 0 for ttft in result["ttft_ms"].values())
    loaded = result["tokens_loaded"]
    assert loaded["cold"] == loaded["engine_prefix_hit"] == 0
    hits = ["host_hit", "engine_restart_hit", "object_store_hit", "other_cluster_hit"]
    assert {loaded[scene] for scene in hits} == {2976}
