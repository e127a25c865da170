"""Kinds of values that settings take: what a person writes, what the program gets.

Owns the conversions that strict validation leaves out on purpose: units, paths, numbers that came
out of an environment variable, and words that YAML reads as booleans. Limits stand with each
setting, in its section.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, cast

from pydantic import BeforeValidator, PlainSerializer, PlainValidator, WithJsonSchema

from sidecar.config.units import (
    DURATION_PATTERN,
    SIZE_PATTERN,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)

NODE_MAX: Final = 1023


def _path(value: object) -> object:
    if not isinstance(value, str) or not value:
        return value
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{value!r} has no such user's home; write an absolute path") from error


def _number(value: object) -> object:
    # A variable expands to text: `port: ${PORT:-9321}` must still be a number.
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


def _real(value: object) -> object:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _flag(value: object) -> object:
    return (
        {"true": True, "false": False}.get(value.lower(), value)
        if isinstance(value, str)
        else value
    )


def _switch(value: object) -> object:
    # YAML reads a bare `on` or `off` as a boolean.
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _nodes(value: object) -> Literal["auto", "off"] | tuple[int, ...]:
    # YAML reads a bare `off` as a boolean.
    if value is False or value == "off":
        return "off"
    if value == "auto":
        return "auto"
    if isinstance(value, list | tuple):
        nodes = [_number(one) for one in cast("list[object]", value)]
        good = [one for one in nodes if type(one) is int and 0 <= one <= NODE_MAX]
        if nodes and len(set(good)) == len(nodes):
            return tuple(good)
    raise ValueError(f"{value!r} is neither auto nor off, nor a list of NUMA nodes such as [0, 1]")


def _as_written(nodes: str | tuple[int, ...]) -> str | list[int]:
    return nodes if isinstance(nodes, str) else list(nodes)


Size = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(format_size, return_type=str, when_used="json"),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": SIZE_PATTERN}]}
    ),
]
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0},
                {"type": "string", "pattern": DURATION_PATTERN},
            ]
        }
    ),
]
Directory = Annotated[
    Path, BeforeValidator(_path), WithJsonSchema({"type": "string", "minLength": 1})
]
Count = Annotated[int, BeforeValidator(_number)]
Ratio = Annotated[float, BeforeValidator(_real)]
Flag = Annotated[bool, BeforeValidator(_flag)]
WriteMode = Annotated[
    Literal["through", "on_reuse", "on_evict", "off"],
    BeforeValidator(_switch),
    WithJsonSchema({"enum": ["through", "on_reuse", "on_evict", "off", False]}),
]
Nodes = Annotated[
    Literal["auto", "off"] | tuple[int, ...],
    PlainValidator(_nodes),
    PlainSerializer(_as_written, return_type=str | list[int], when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["auto", "off", False]},
                {
                    "type": "array",
                    "minItems": 1,
                    "uniqueItems": True,
                    "items": {"type": "integer", "minimum": 0, "maximum": NODE_MAX},
                },
            ]
        }
    ),
]
ReadMode = Annotated[
    Literal["on", "off"],
    BeforeValidator(_switch),
    WithJsonSchema({"enum": ["on", "off", True, False]}),
]
