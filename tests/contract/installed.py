"""Where the vLLM of this environment is, found without importing it."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def installed() -> Path:
    """The folder that holds the installed `vllm/`."""
    found = importlib.util.find_spec("vllm")
    assert found is not None, "no vLLM is installed here"
    assert found.origin is not None, "vllm is a namespace package: another folder shadows it"
    return Path(found.origin).parent.parent
