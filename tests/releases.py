"""The vLLM that is installed: which release it is, and what it has not.

`make test-release` runs tests with another release than the one that the suite was written on. A
test that needs a later one is skipped, and says which.
"""

from __future__ import annotations

import importlib.metadata
from typing import Final

import pytest
from packaging.version import Version

STATE_BEFORE: Final = "it leaves a recurrent layer's state before the last block of a prompt"
"""Also of one that ends with a block: sent again, it is a hit."""


def has_vllm(release: str) -> bool:
    """Whether the installed vLLM is of `release` or a later one."""
    return Version(importlib.metadata.version("vllm")) >= Version(release)


def require_vllm(release: str, what: str) -> None:
    """Skip the test that calls this where vLLM has not what came with `release`."""
    if not has_vllm(release):
        pytest.skip(f"vLLM {release} or later: {what}")
