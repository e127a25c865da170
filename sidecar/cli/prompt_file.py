"""A prompt for `kvlake explain --prompt`, from a file: its token ids and its cache salt.

Text has no tokens without a tokenizer, so vLLM's own server makes them (`/tokenize`).
"""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from sidecar.cli.console import CommandError, NoAnswer
from sidecar.sessions.model_names import printable

TOKENS_MAX: Final = 1 << 20
ANSWER_BYTES_MAX: Final = 16 << 20
SAID_CHARACTERS_MAX: Final = 400
NOT_FOR_TOKENS: Final = ("stream", "stream_options", "max_tokens", "max_completion_tokens")

Question = dict[str, Any]


def read_question(place: str, engine: str, seconds_max: float) -> Question:
    """The prompt in a file, as the sidecar's `/match` takes it. Raises `CommandError`."""
    try:
        text = sys.stdin.read() if place == "-" else Path(place).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--prompt {place}: {error}; give a readable file in UTF-8") from error
    try:
        given: object = json.loads(text)
    except ValueError:
        given = text
    if isinstance(given, dict):
        body = cast("dict[str, Any]", given)
    elif isinstance(given, list):
        body = {"prompt": cast("list[object]", given)}
    else:
        body = {"prompt": text}
    salt: object = body.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise CommandError(f"--prompt {place}: cache_salt={salt!r}; it must be text")
    tokens = body.get("prompt")
    if not isinstance(tokens, list):
        if not body.get("messages") and not tokens:
            raise CommandError(
                f"--prompt {place}: there is no prompt in it; give text, a list of token ids, or "
                "the body of a request with prompt or messages"
            )
        tokens = _tokens_of(body, engine, seconds_max)
    return {"tokens": _checked(cast("list[object]", tokens), place), "cache_salt": salt}


def _checked(tokens: list[object], place: str) -> list[object]:
    wrong = next((one for one in tokens if type(one) is not int or not 0 <= one < 1 << 31), None)
    if wrong is not None:
        raise CommandError(f"--prompt {place}: {wrong!r} is no token id; they are whole numbers")
    if not 0 < len(tokens) <= TOKENS_MAX:
        raise CommandError(
            f"--prompt {place}: it has {len(tokens):,} tokens; give between 1 and {TOKENS_MAX:,}"
        )
    return tokens


def _tokens_of(body: Mapping[str, Any], engine: str, seconds_max: float) -> list[object]:
    """Ask vLLM. Raises `NoAnswer`."""
    url = f"{engine.rstrip('/')}/tokenize"
    asked = {name: value for name, value in body.items() if name not in NOT_FOR_TOKENS}
    request = urllib.request.Request(  # noqa: S310 (the option's type takes http and https alone)
        url, json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=seconds_max) as answer:
            document: Any = json.loads(answer.read(ANSWER_BYTES_MAX))
        tokens = document["tokens"]
    except urllib.error.HTTPError as error:
        with error:
            said = printable(
                error.read(ANSWER_BYTES_MAX).decode(errors="replace"), SAID_CHARACTERS_MAX
            )
        raise NoAnswer(f"{url} answered {error.code}: {said}") from error
    except OSError as error:
        raise NoAnswer(
            f"no answer from {url}: {error}; text needs the vLLM server that serves the model "
            "(--engine), a list of token ids does not"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise NoAnswer(f"{url} answered without tokens; is that a vLLM server?") from error
    return cast("list[object]", tokens)
