"""Traces of prompts: which chunks each request needs, in the order in which the requests came.

Owns the two formats and their checks. A file has one JSON object on each line, in one of them:

* Mooncake's traces: `hash_ids`, a number for each block of 512 tokens, and `input_length`, the
  tokens of the prompt. Other fields are ignored.
* `keys`, a string for each chunk of a prompt, head first, and `tokens_per_key`, the tokens of a
  whole chunk. `tokens`, the tokens of these chunks together, may be left out if all are whole.
  `kvlake record` writes it.

KV events cannot be replayed: they name chunks that were stored and removed, not those that a
request used.

Invariants: a key always follows the same key, or always begins a prompt; a request has each key
once, and at least one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from tiers.policy.key import CacheKey

MOONCAKE_TOKENS: Final = 512
"""Tokens of a block in Mooncake's traces."""
REALM_ID: Final = 1
SHOWN_CHARACTERS_MAX: Final = 60


class TraceError(ValueError):
    """A trace that cannot be replayed. The message names file, line, field, value and remedy."""


class PromptRequest(NamedTuple):
    """The chunks of one prompt, head first, and their tokens."""

    keys: tuple[CacheKey, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PromptTrace:
    """Requests in the order in which they came."""

    name: str
    tokens_per_key: int
    requests: list[PromptRequest]

    @property
    def num_keys(self) -> int:
        """Requested chunks."""
        return sum(len(request.keys) for request in self.requests)

    @property
    def num_different(self) -> int:
        """Different chunks."""
        return len({key for request in self.requests for key in request.keys})


class _Line(NamedTuple):
    """A line as it was read, before its keys are compared with those of other lines."""

    names: list[str]
    num_tokens: int
    tokens_per_key: int
    field: str
    """The one that has the keys."""


class _Place:
    """Where an error is."""

    def __init__(self, path: Path, number: int) -> None:
        self._path, self._number = path, number

    def error(self, field: str, value: object, remedy: str) -> TraceError:
        """An error in this line."""
        shown = json.dumps(value, default=repr)
        if len(shown) > SHOWN_CHARACTERS_MAX:
            shown = f"{shown[:SHOWN_CHARACTERS_MAX]}…"
        return TraceError(f"{self._path}, line {self._number}, {field}: {shown}; {remedy}")

    def whole_number(self, line: dict[str, Any], field: str, least: int) -> int:
        """The value of a field that must be an integer."""
        value = line.get(field)
        if type(value) is not int or value < least:
            raise self.error(field, value, f"give an integer from {least} on")
        return value

    def items(self, line: dict[str, Any], field: str, kind: type, what: str) -> list[Any]:
        """The value of a field that must be a list of different values of one type."""
        value = line[field]
        if not isinstance(value, list):
            raise self.error(field, value, f"give a list of {what}")
        seen = set[object]()
        for position, item in enumerate(value):
            if type(item) is not kind:
                raise self.error(f"{field}[{position}]", item, f"give {what} only")
            if item in seen:
                raise self.error(f"{field}[{position}]", item, "name each chunk of a prompt once")
            seen.add(item)
        return value


class _Chains:
    """The keys of a trace, and the key that each of them follows."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[CacheKey, str | None, int]] = {}
        """By name: the key, the name before it, and the line that had it first."""

    def keys_of(self, place: _Place, number: int, line: _Line) -> tuple[CacheKey, ...]:
        """The keys of line `number`."""
        before: str | None = None
        keys: list[CacheKey] = []
        for position, name in enumerate(line.names):
            known = self._known.get(name)
            if known is None:
                key = (REALM_ID, hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest())
                known = self._known[name] = (key, before, number)
            if known[1] != before:
                raise place.error(
                    f"{line.field}[{position}]",
                    name,
                    f"it follows {before!r} here and {known[1]!r} in line {known[2]}: name a chunk "
                    "by all tokens up to its end",
                )
            keys.append(known[0])
            before = name
        return tuple(keys)


def read_trace(path: Path) -> PromptTrace:
    """Read a trace; its name is that of the file without suffix.

    Raises:
        TraceError: A line is not of a known format, or contradicts another one.
        OSError: The file cannot be read.
    """
    chains, tokens_per_key = _Chains(), 0
    requests: list[PromptRequest] = []
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            place = _Place(path, number)
            line = _parse(place, text)
            tokens_per_key = tokens_per_key or line.tokens_per_key
            if line.tokens_per_key != tokens_per_key:
                raise place.error(
                    "tokens_per_key",
                    line.tokens_per_key,
                    f"earlier lines have {tokens_per_key}: make a file for each chunk size",
                )
            keys = chains.keys_of(place, number, line)
            if keys:
                requests.append(PromptRequest(keys, line.num_tokens))
    if not requests:
        raise TraceError(f"{path}: no line has a prompt with chunks; name a trace with prompts")
    return PromptTrace(path.stem, tokens_per_key, requests)


def _parse(place: _Place, text: bytes) -> _Line:
    try:
        line: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        shown = text[:SHOWN_CHARACTERS_MAX].decode(errors="replace").strip()
        raise place.error("JSON", shown, f"write one JSON object on each line ({error})") from None
    if not isinstance(line, dict):
        raise place.error("JSON", line, "write one JSON object on each line")
    if "hash_ids" in line:
        return _mooncake(place, line)
    if "keys" in line:
        return _plain(place, line)
    raise place.error("fields", sorted(line), "give hash_ids and input_length, or keys")


def _mooncake(place: _Place, line: dict[str, Any]) -> _Line:
    numbers = place.items(line, "hash_ids", int, "integers")
    tokens = place.whole_number(line, "input_length", 1)
    _check_tokens(place, "input_length", tokens, len(numbers), MOONCAKE_TOKENS)
    return _Line([str(one) for one in numbers], tokens, MOONCAKE_TOKENS, "hash_ids")


def _plain(place: _Place, line: dict[str, Any]) -> _Line:
    names: list[str] = place.items(line, "keys", str, "strings")
    per_key = place.whole_number(line, "tokens_per_key", 1)
    if "tokens" not in line:
        return _Line(names, len(names) * per_key, per_key, "keys")
    tokens = place.whole_number(line, "tokens", 0)
    _check_tokens(place, "tokens", tokens, len(names), per_key)
    return _Line(names, tokens, per_key, "keys")


def _check_tokens(place: _Place, field: str, tokens: int, keys: int, per_key: int) -> None:
    """Only the last chunk may have fewer tokens than a whole one."""
    if not (keys - 1) * per_key < tokens <= keys * per_key and (keys or tokens):
        least, most = max(0, (keys - 1) * per_key + 1), keys * per_key
        raise place.error(
            field, tokens, f"{keys} chunks of {per_key} tokens have {least} to {most}"
        )
