"""Whether the chunk size that an engine is given fits its blocks, as far as its command line says.

An engine whose chunks do not fit serves without the cache (`connector/identity/eligibility.py`), so
`kvlake run` looks before it starts one. Owns that look. What the blocks are in the end only vLLM
knows: it may choose larger ones for the model.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

OPTION: Final = "--kv-transfer-config"
BLOCK_SIZE_OPTION: Final = "--block-size"
FILE_OPTION: Final = "--config"
"""Of vLLM: a file of further options."""
BLOCK_TOKENS_STEP: Final = 16
"""Every block size that vLLM chooses by itself is a multiple of this."""


def misfit(command: Sequence[str]) -> str:
    """Why the chunks of a vLLM command do not fit its blocks, with a remedy; or nothing.

    `command` has the connector's options as JSON.
    """
    options: dict[str, Any] = json.loads(_last_value(command, OPTION) or "{}")
    extra: dict[str, Any] = options.get("kv_connector_extra_config") or {}
    tokens = extra.get("chunk_tokens")
    if not isinstance(tokens, int) or tokens <= 0:
        # None is given, or one that the engine refuses to start with.
        return ""
    step, blocks = _blocks_of(command)
    if tokens % step == 0:
        return ""
    below = tokens // step * step
    fitting = f"{below} or {below + step}" if below else f"{step}"
    name = extra.get("chunk_tokens_from") or "kv_connector_extra_config['chunk_tokens']"
    return (
        f"{name}={tokens} is not a multiple of {blocks}: the engine would serve without the cache; "
        f"choose {fitting}, or leave {name} out"
    )


def _blocks_of(command: Sequence[str]) -> tuple[int, str]:
    """What the engine's block size is a multiple of, and what to call that."""
    given = _last_value(command, BLOCK_SIZE_OPTION)
    if given.isdecimal() and int(given):
        return int(given), f"{BLOCK_SIZE_OPTION} {given}"
    if given or _last_value(command, FILE_OPTION):
        # Not a size; or it may stand in that file.
        return 1, ""
    return BLOCK_TOKENS_STEP, f"{BLOCK_TOKENS_STEP}, as vLLM's block sizes are"


def _last_value(command: Sequence[str], option: str) -> str:
    """What a command line says of an option in the end; empty where it does not have it."""
    value = ""
    for index, word in enumerate(command):
        name, equals, given = word.partition("=")
        if name.replace("_", "-") == option:
            value = given if equals else "".join(command[index + 1 : index + 2])
    return value
