"""Reading YAML so that an error names file, line, path, value and remedy.

Owns parsing, environment variables, and wording the errors of a validation. Does not own what the
settings are (`model.py`).

Invariants: only YAML's safe types are built; a key that is given twice is an error; no message has
a password of a URL, a value below a setting of `_OPAQUE`, or a value whose name is unknown.
"""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import yaml
from yaml.composer import ComposerError
from yaml.parser import ParserError

from sidecar.config.masking import mask_url
from sidecar.config.units import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic_core import ErrorDetails

FieldPath: TypeAlias = tuple[str | int, ...]

_REMOVED: Final[Mapping[FieldPath, str]] = {
    ("runtime", "endpoint"): "jobs use the Unix socket only, TCP is not supported",
    ("runtime", "curve_secret_key_file"): (
        "jobs use the Unix socket only, which needs no key (the key for KV events is "
        "events.curve_secret_key_file)"
    ),
    ("limits", "frames_queued_max"): (
        "jobs use the Unix socket only, where messages wait in the client"
    ),
}
"""Settings of earlier versions, and why they were removed."""
_VARIABLE: Final = re.compile(
    r"\$\$|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|(?P<bad>\$\{)"
)
_KIB: Final = 1024
_OPAQUE: Final = frozenset({"credentials", "storage_options", "salt", "token"})
"""Settings whose values are in no message."""
ANY_NAME: Final = "*"
"""Stands in a path for the names that a mapping's owner chose."""
_BOOLEANS: Final = "; YAML reads yes, no, on and off as booleans"
_MERGE_TAG: Final = "tag:yaml.org,2002:merge"


class ConfigError(Exception):
    """A configuration cannot be used. `problems` are sentences, one for each thing to fix."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Source:
    """A file's values and its YAML nodes. `name` is what messages call the file."""

    name: str
    root: yaml.Node | None = None
    values: dict[str, object] = field(default_factory=dict[str, object])

    def where(self, path: FieldPath) -> str:
        """`file:line` of the innermost part of `path` that the file has."""
        place, node = self.name, self.root
        for part in path:
            children: dict[str, tuple[yaml.Node, yaml.Node]] = {}
            if isinstance(node, yaml.MappingNode):
                children = {str(key.value): (key, value) for key, value in node.value}
            elif isinstance(node, yaml.SequenceNode):
                children = {str(index): (item, item) for index, item in enumerate(node.value)}
            if str(part) not in children:
                break
            named, node = children[str(part)]
            place = f"{self.name}:{named.start_mark.line + 1}"
        return place


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if key.tag != _MERGE_TAG]
        counts = Counter(str(key.value) for key in keys)
        for key in reversed(keys):
            if counts[str(key.value)] > 1:
                raise ComposerError(
                    None, None, f"{key.value} is given twice; keep one of the two", key.start_mark
                )
        return node


def read_source(text: str, name: str, environment: Mapping[str, str] | None = None) -> Source:
    """Parse YAML and expand `${NAME}` and `${NAME:-default}` in its strings.

    `$$` stands for one dollar sign. Keys are not expanded.

    Raises:
        ConfigError: for bad YAML, a key that is given twice, or an unset variable without default.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        value: object = {} if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        raise ConfigError([_yaml_problem(name, error)]) from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        # PyYAML lets errors of conversions through: ValueError for 2001-13-45, KeyError for !!bool.
        raise ConfigError(
            [f"{name}: not YAML: a value is not what it looks like ({error}); put it in quotes"]
        ) from error
    source = Source(name, root)
    if not isinstance(value, dict):
        place = f"{name}:{root.start_mark.line + 1}" if root else name
        raise ConfigError([f"{place}: expected sections such as `host:`, not a bare value"])
    problems: list[str] = []
    variables = os.environ if environment is None else environment
    expanded = _expand(cast("object", value), (), source, variables, problems)
    if problems:
        raise ConfigError(problems)
    return Source(name, root, cast("dict[str, object]", expanded))


def _yaml_problem(name: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else name
    said = " ".join(part for part in (error.context, error.problem) if part)
    hint = ""
    if "\\t" in said:
        hint = "; indent with spaces, not tabs"
    elif "mapping values are not allowed" in said:
        hint = "; put the value in quotes, or check the indentation"
    elif isinstance(error, ParserError) and "${" in ((mark and mark.buffer) or ""):
        hint = '; between braces, a variable needs quotes: "${NAME}"'
    return f"{where}: not YAML: {said or error}{hint}"


def _expand(
    value: object,
    path: FieldPath,
    source: Source,
    environment: Mapping[str, str],
    problems: list[str],
) -> object:
    if isinstance(value, dict):
        items = cast("dict[object, object]", value)
        return {
            str(key): _expand(item, (*path, str(key)), source, environment, problems)
            for key, item in items.items()
        }
    if isinstance(value, list):
        return [
            _expand(item, (*path, index), source, environment, problems)
            for index, item in enumerate(cast("list[object]", value))
        ]
    if not isinstance(value, str) or "$" not in value:
        return value

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        if match["bad"]:
            problem = (
                "`${` starts no variable; write ${NAME} or ${NAME:-default}, or $$ for a dollar "
                "sign"
            )
        else:
            name, found = match["name"], environment.get(match["name"])
            # As in a shell, `:-` also covers a variable that is set but empty.
            if match["default"] is not None:
                return found or match["default"]
            if found is not None:
                return found
            problem = (
                f"environment variable {name} is not set; set it, or write ${{{name}:-default}}"
            )
        problems.append(f"{source.where(path)}: {dotted(path)}: {problem}")
        return ""

    return _VARIABLE.sub(replace, value)


def dotted(path: FieldPath) -> str:
    """A path as people write it: `store.storage_options.key`, `items[2]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "(top level)"


def explain(error: ErrorDetails, source: Source, names: Mapping[FieldPath, Sequence[str]]) -> str:
    """One validation error as a sentence. `names` holds the valid keys of every section."""
    path: FieldPath = tuple(error["loc"])
    place = f"{source.where(path)}: {dotted(path)}"
    if error["type"] == "extra_forbidden":
        if path in _REMOVED:
            return f"{place}: {_REMOVED[path]}; remove it"
        parent = path[:-1]
        valid = _valid(names, parent)
        near = difflib.get_close_matches(str(path[-1]), valid, n=1, cutoff=0.5)
        suggestion = f"did you mean `{near[0]}`? " if near else ""
        section = f"`{dotted(parent)}`" if parent else "the top level"
        return f"{place}: unknown setting; {suggestion}{section} takes {', '.join(valid)}"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        valid = _valid(names, path)
        takes = f" ({', '.join(valid)})" if valid else ""
        return f"{place}: expected indented settings{takes}, not a single value"
    if error["type"] == "missing":
        return f"{place}: must be given"
    message = error["msg"].removeprefix("Value error, ")
    value: object = error.get("input")
    # A message of this project's own has the value in it. A mapping may have secrets in it.
    plain = isinstance(value, str | int | float) and _OPAQUE.isdisjoint(path)
    if error["type"] == "value_error" or not plain:
        return f"{place}: {message}"
    return (
        f"{place}={mask_url(repr(value))}: {message[:1].lower()}{message[1:]}{_hint(error, value)}"
    )


def _hint(error: ErrorDetails, value: object) -> str:
    """What pydantic's own message leaves out."""
    kind = error["type"]
    if kind == "string_type" and isinstance(value, bool):
        return f"{_BOOLEANS}: put the word in quotes"
    if kind == "literal_error" and isinstance(value, bool):
        return _BOOLEANS
    if kind == "bool_type":
        return "; write true or false"
    if kind == "string_type" and isinstance(value, int | float):
        return "; YAML reads it as a number: put it in quotes"
    limits = error.get("ctx", {})
    limit = limits.get("ge", limits.get("le"))
    if isinstance(limit, int) and limit >= _KIB and not limit % _KIB:
        return f" ({format_size(limit)})"
    return ""


def _valid(names: Mapping[FieldPath, Sequence[str]], path: FieldPath) -> list[str]:
    return sorted(names.get(path, names.get((*path[:-1], ANY_NAME), ())))
