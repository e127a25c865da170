"""The engine's command line with the connector's options, for `kvlake run` and `kvlake doctor`.

Also owns the check that the chunk size fits the engine's blocks, as far as its command line tells:
vLLM may choose larger blocks for a model, and an engine whose chunks do not fit its blocks serves
without the cache (`connector/identity/eligibility.py`). Starts nothing.
"""

import json
import re
import secrets
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

from sidecar.cli.console import CommandError, complain
from sidecar.config.model import Config
from tiers.redaction import MASK

CONNECTOR: Final = "KVLakeConnector"
TRANSFER_OPTION: Final = "--kv-transfer-config"
EVENTS_OPTION: Final = "--kv-events-config"
BLOCK_SIZE_OPTION: Final = "--block-size"
BLOCK_TOKENS_STEP: Final = 16
"""Every block size that vLLM chooses by itself is a multiple of this."""
_NAME: Final = "(?:key|token|password|secret)"
_OPTION: Final = re.compile(rf"--[\w-]*{_NAME}", re.IGNORECASE)
"""An option with a secret behind it, such as `--api-key`."""
_GIVEN: Final = re.compile(rf"({_NAME})=[^,\s]+", re.IGNORECASE)
"""A secret in the same word: `--api-key=…`, `VLLM_API_KEY=…`, `--export=HF_TOKEN=…`."""


def check_command(command: Sequence[str], config: Config) -> list[str]:
    """The engine's command with the connector's options.

    Raises `CommandError`: it cannot be started, or its engine would not be cached.
    """
    if not command:
        example = f"kvlake run{config.option} -- vllm serve MODEL"
        raise CommandError(f"no command; write it after --, as in: {example}")
    if shutil.which(command[0]) is None:
        raise CommandError(f"{command[0]}: no such command; is vLLM installed in this environment?")
    result = with_connector(command, config)
    if reason := misfit(result):
        raise CommandError(reason)
    return result


def shown(command: Sequence[str]) -> str:
    """A command for logs, without API keys, tokens and passwords."""
    words: list[str] = []
    hidden = False
    for word in command:
        # An option may have several values, as vLLM's --api-key has.
        hidden = hidden and not word.startswith("-")
        words.append(MASK if hidden else _GIVEN.sub(rf"\1={MASK}", word))
        hidden = hidden or _OPTION.fullmatch(word) is not None
    return shlex.join(words)


def own_chunk_tokens(config: Config) -> int | None:
    """`chunk.tokens` if the file has it; else the connector chooses what fits its blocks."""
    return config.chunk.tokens if "tokens" in config.chunk.model_fields_set else None


def transfer_config(config: Config) -> dict[str, Any]:
    """The value of vLLM's `--kv-transfer-config` for this configuration's sidecar."""
    extra: dict[str, object] = {"socket": str(config.runtime.attach_path)}
    if (tokens := own_chunk_tokens(config)) is not None:
        extra["chunk_tokens"] = tokens
        extra["chunk_tokens_from"] = "chunk.tokens"
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        # vLLM's own default ends a request whose load failed; a cache fault must only cost time.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def with_connector(command: Sequence[str], config: Config) -> list[str]:
    """The engine's command with the connector's options added, or merged into the user's own.

    Raises `CommandError`: it does not start vLLM, or has options that contradict.
    """
    wanted = transfer_config(config)
    example = f"{TRANSFER_OPTION} '{json.dumps(wanted)}'"
    if not any(Path(word).name == "vllm" or word.startswith("vllm.") for word in command):
        raise CommandError(
            f"{shown(command)!r} does not name vllm, so its options cannot be set. For "
            f"another program run `kvlake serve{config.option}` beside it and give it {example}"
        )
    result = list(command)
    for index, word in enumerate(command):
        name, equals, given = word.partition("=")
        name = name.replace("_", "-")
        if not name.startswith("--kv-transfer"):
            continue
        if "." in name:
            raise CommandError(f"{word}: give the whole of it as JSON instead: {example}")
        if not equals and index + 1 == len(command):
            raise CommandError(f"{word} has no value; leave it out, or give {example}")
        given = given if equals else command[index + 1]
        merged = json.dumps(_merged(given, wanted, example, config.option))
        end = index + 1 if equals else index + 2
        result[index:end] = [f"{TRANSFER_OPTION}={merged}"] if equals else [word, merged]
        return result
    return [*result, TRANSFER_OPTION, json.dumps(wanted)]


def _merged(given: str, wanted: dict[str, Any], example: str, option: str) -> dict[str, object]:
    """The user's own options, with the wanted ones where the user has none."""
    try:
        own: Any = json.loads(given)
    except json.JSONDecodeError as error:
        raise CommandError(
            f"{TRANSFER_OPTION} is not JSON ({error}); leave it out, or give {example}"
        ) from None
    if not isinstance(own, dict):
        raise CommandError(
            f"{TRANSFER_OPTION} is not a JSON object; leave it out, or give {example}"
        )
    options = cast("dict[str, object]", own)
    connector = options.get("kv_connector", CONNECTOR)
    if connector != CONNECTOR:
        raise CommandError(
            f"{TRANSFER_OPTION} asks for kv_connector={connector!r}. Leave the option out to use "
            "kvlake alone; to use both, list it in a MultiConnector yourself and start the sidecar "
            f"with `kvlake serve{option}`. kvlake's own options are {example}"
        )
    extra = options.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise CommandError(
            f"{TRANSFER_OPTION}: kv_connector_extra_config must be an object, as in {example}"
        )
    own_extra = cast("dict[str, object]", extra)
    wanted_extra = wanted["kv_connector_extra_config"]
    merged: dict[str, object] = wanted_extra | own_extra
    if merged["socket"] != wanted_extra["socket"]:
        raise CommandError(
            f"{TRANSFER_OPTION} names socket={merged['socket']!r}, but this sidecar listens on "
            f"{wanted_extra['socket']!r}; leave the socket out, or set runtime.directory and "
            "runtime.name in the sidecar's configuration"
        )
    if "chunk_tokens" in own_extra:
        merged.pop("chunk_tokens_from", None)
    return wanted | options | {"kv_connector_extra_config": merged}


def event_sockets(home: Path) -> tuple[Path, Path]:
    """Where this engine publishes its own events, and replays them: nobody else has these paths."""
    # Not by process id: in containers that share the directory, engines may have the same. No name
    # is longer than attach.sock, whose length the configuration checks.
    mark = secrets.token_hex(3)
    return home / f"pub-{mark}", home / f"rep-{mark}"


def with_events(command: Sequence[str], config: Config, sockets: tuple[Path, Path]) -> list[str]:
    """The engine's command with its own KV events on, for the sidecar to follow (`events`).

    `sockets` are its `event_sockets`. The command is unchanged if it has options for events, or
    starts several engines by data parallelism, whose publishers vLLM cannot tell apart over `ipc`.
    """
    given = [word.partition("=")[0].replace("_", "-") for word in command]
    if not config.events.enabled or any(word.startswith(EVENTS_OPTION) for word in given):
        return list(command)
    if any(word.startswith("--data-parallel") or word == "-dp" for word in given):
        complain(
            f"data parallelism: give {EVENTS_OPTION} with tcp endpoints to have its events joined"
        )
        return list(command)
    endpoint, replay_endpoint = (f"ipc://{path}" for path in sockets)
    wanted = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint,
        "replay_endpoint": replay_endpoint,
    }
    return [*command, EVENTS_OPTION, json.dumps(wanted)]


def misfit(command: Sequence[str]) -> str:
    """Why the chunks of a vLLM command do not fit its blocks, with a remedy; or nothing.

    `command` has the connector's options as JSON.
    """
    options: dict[str, Any] = json.loads(_last_value(command, TRANSFER_OPTION) or "{}")
    extra: dict[str, Any] = options.get("kv_connector_extra_config") or {}
    tokens = extra.get("chunk_tokens")
    if not isinstance(tokens, int) or tokens <= 0:
        # None is given, or one that the engine refuses by itself.
        return ""
    step, blocks = BLOCK_TOKENS_STEP, f"{BLOCK_TOKENS_STEP}, as vLLM's block sizes are"
    given = _last_value(command, BLOCK_SIZE_OPTION)
    if given.isdecimal() and int(given):
        step, blocks = int(given), f"{BLOCK_SIZE_OPTION} {given}"
    elif given or _last_value(command, "--config"):
        # Not a size; or vLLM's file of further options may have it.
        return ""
    if tokens % step == 0:
        return ""
    below = tokens // step * step
    fitting = f"{below} or {below + step}" if below else f"{step}"
    name = extra.get("chunk_tokens_from") or "kv_connector_extra_config['chunk_tokens']"
    return (
        f"{name}={tokens} is not a multiple of {blocks}: the engine would serve without the cache; "
        f"choose {fitting}, or leave {name} out"
    )


def _last_value(command: Sequence[str], option: str) -> str:
    """The last value of an option in a command line; empty if it is not there."""
    value = ""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, equals, given = word.partition("=")
        if name.replace("_", "-") == option:
            value = given if equals else following
    return value
