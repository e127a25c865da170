"""The base class of all sections of a configuration, and the types of their values.

Owns the conversions that strict validation leaves out: units, paths, numbers from environment
variables, and words that YAML reads as booleans. Limits stand with each setting.
"""

import json
import os
import re
from pathlib import Path
from typing import Annotated, Final, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SecretStr,
    WithJsonSchema,
)

from tiers.redaction import MASK, mask_url
from tiers.sizes import (
    DURATION_PATTERN,
    SIZE_PATTERN,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)

NODE_MAX: Final = 1023
NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_HTTP_PATTERN: Final = r"^https?://[^/]"


class Section(BaseModel):
    """A part of the configuration file: strict, frozen, without unknown keys.

    Values of an instance are valid. Errors do not show the input.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        validate_default=True,
        validate_by_name=True,
        validate_by_alias=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )


def _from_text(value: object) -> object:
    # A variable expands to text: `port: ${PORT:-9321}` must still be a number.
    if isinstance(value, str):
        try:
            return json.loads(value.lower())
        except ValueError:
            return value
    return value


def _switch(value: object) -> object:
    # YAML reads a bare `on` or `off` as a boolean.
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _nodes(value: object) -> Literal["auto", "off"] | tuple[int, ...]:
    value = _switch(value)
    if value in ("auto", "off"):
        return value
    if isinstance(value, list | tuple):
        nodes = [_from_text(one) for one in cast("list[object]", value)]
        good = [one for one in nodes if type(one) is int and 0 <= one <= NODE_MAX]
        if nodes and len(set(good)) == len(nodes):
            return tuple(good)
    raise ValueError(f"{value!r} is neither auto nor off, nor a list of NUMA nodes such as [0, 1]")


def _absolute(value: Path) -> Path:
    if not value.is_absolute():
        raise ValueError(f"'{value}' is a relative path; write an absolute one such as /{value}")
    return value


def matching(pattern: str, problem: str) -> AfterValidator:
    """Text that matches; if it does not, the error is the value and then `problem`."""

    def check(value: str) -> str:
        if not re.match(pattern, value):
            raise ValueError(f"{value!r} {problem}")
        return value

    return AfterValidator(check)


def _http_url(value: str) -> str:
    if not re.match(_HTTP_PATTERN, value):
        # What is before an @ may be a password.
        _, _, place = value.rpartition("@")
        raise ValueError(f"{place!r} has no scheme; write http://HOST:PORT or https://HOST")
    return value


def _number_or(number: str, pattern: str) -> WithJsonSchema:
    text = {"type": "string", "pattern": pattern}
    return WithJsonSchema({"anyOf": [{"type": number, "minimum": 0}, text]})


Size = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(format_size, return_type=str, when_used="json"),
    _number_or("integer", SIZE_PATTERN),
]
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str, when_used="json"),
    _number_or("number", DURATION_PATTERN),
]
FilePath = Annotated[
    Path,
    Field(strict=False),
    AfterValidator(lambda path: Path(os.path.expanduser(path))),
    WithJsonSchema({"type": "string", "minLength": 1}),
]
AbsolutePath = Annotated[FilePath, AfterValidator(_absolute)]
Count = Annotated[int, BeforeValidator(_from_text)]
Ratio = Annotated[float, BeforeValidator(_from_text)]
Flag = Annotated[bool, BeforeValidator(_from_text)]
Text = Annotated[str, Field(min_length=1)]
Secret = Annotated[SecretStr, PlainSerializer(lambda _: MASK, return_type=str, when_used="json")]
SecretText = Annotated[
    Text | None,
    Field(repr=False),
    PlainSerializer(lambda _: MASK, return_type=str, when_used="json-unless-none"),
]
"""As `Secret`, for libraries that take secrets as text."""
Endpoint = Annotated[
    str,
    matching(
        r"^(ipc$|tcp://(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9.*-]+):[0-9]{1,5}$)",
        "is no endpoint; write ipc, or tcp://ADDRESS:PORT such as tcp://127.0.0.1:9322",
    ),
]
HttpUrl = Annotated[
    str,
    AfterValidator(_http_url),
    PlainSerializer(mask_url, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": _HTTP_PATTERN}),
]
WriteMode = Annotated[
    Literal["through", "on_reuse", "on_evict", "off"],
    BeforeValidator(_switch),
    WithJsonSchema({"enum": ["through", "on_reuse", "on_evict", "off", False]}),
]
ReadMode = Annotated[
    Literal["on", "off"],
    BeforeValidator(_switch),
    WithJsonSchema({"enum": ["on", "off", True, False]}),
]
Nodes = Annotated[
    Literal["auto", "off"] | tuple[int, ...],
    PlainValidator(_nodes),
    PlainSerializer(lambda nodes: nodes, return_type=str | tuple[int, ...], when_used="json"),
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
