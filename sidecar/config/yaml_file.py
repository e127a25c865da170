"""Reading a YAML file so that an error can say where: lines, environment variables, nearest names.

Owns the way from text to plain values with their line numbers, and from a validation failure to
sentences that name file, line, path, value and remedy. Does not own what the settings are: that
is `sidecar/config/model.py`.

Invariants: only YAML's safe types are built; the same key twice is an error, not the last one
wins; no message repeats a password of a URL, a value below `storage_options`, or one whose name is
unknown; whatever the text is, it takes bounded time and memory, and only `ConfigError` comes out.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar, cast

import yaml

from sidecar.config.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pydantic_core import ErrorDetails

FieldPath: TypeAlias = tuple[str | int, ...]
T = TypeVar("T")

_REMOVED: Final[Mapping[FieldPath, str]] = {
    ("runtime", "endpoint"): "jobs travel over the Unix socket alone, no more over TCP",
    ("runtime", "curve_secret_key_file"): (
        "jobs travel over the Unix socket alone, which needs no key (the key for KV events is "
        "events.curve_secret_key_file)"
    ),
    ("limits", "frames_queued_max"): (
        "jobs travel over the Unix socket alone, where messages wait in the client"
    ),
}
"""Settings of earlier versions, and what is said to who still has them."""
_VARIABLE: Final = re.compile(
    # Without its bound, a row of `${A:-` is searched to its end from each of them.
    r"\$\$|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]{0,1024}))?\}|(?P<bad>\$\{)"
)
TEXT_BYTES_MAX: Final = 256 * 1024
"""The largest file that ships has 5 KiB."""
NODES_MAX: Final = 10_000
"""Values of a file, those that aliases repeat counted each time."""
DEPTH_MAX: Final = 32
PROBLEMS_MAX: Final = 20
PROBLEM_CHARACTERS_MAX: Final = 1000
_SECRET_NAME: Final = re.compile(
    r"secret|token|passw|credential|private|signature|sas|auth|connection_string|(^|_|-)keys?($|_|-)",
    re.IGNORECASE,
)
_KIB: Final = 1024
_OPAQUE: Final = frozenset({"credentials", "storage_options", "salt", "token"})
"""Settings whose values no message repeats, whatever is wrong with them."""
ANY_NAME: Final = "*"
"""Stands in a path for the names that a mapping's owner chose."""
_USERINFO: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^/\s]*)@")
_QUERY: Final = re.compile(r"\?.*$", re.DOTALL)
MASK: Final = "***"


class ConfigError(Exception):
    """A configuration cannot be used. `problems` are sentences, one for each thing to fix."""

    def __init__(self, problems: Sequence[str]) -> None:
        told = [problem[:PROBLEM_CHARACTERS_MAX] for problem in problems[:PROBLEMS_MAX]]
        if len(problems) > PROBLEMS_MAX:
            told.append(f"and {len(problems) - PROBLEMS_MAX} more; mend these first")
        super().__init__("\n".join(told))
        self.problems = tuple(told)


@dataclass(frozen=True, slots=True)
class Source:
    """A file's values, and the line of each one's path. `name` is what messages call the file."""

    name: str
    values: dict[str, object] = field(default_factory=dict[str, object])
    lines: dict[FieldPath, int] = field(default_factory=dict[FieldPath, int])

    def where(self, path: FieldPath) -> str:
        """`file:line` of the innermost part of `path` that the file spells out."""
        for length in range(len(path), 0, -1):
            line = self.lines.get(path[:length])
            if line is not None:
                return f"{self.name}:{line}"
        return self.name


def read_source(text: str, name: str, environment: Mapping[str, str] | None = None) -> Source:
    """Parse YAML, expand `${NAME}` and `${NAME:-default}` in its strings, remember the lines.

    `$$` stands for one dollar sign. Keys are never expanded.

    Raises:
        ConfigError: for bad YAML, a key that stands twice, or an unset variable without default.
    """
    size_bytes = len(text.encode("utf-8", "surrogatepass"))
    if size_bytes > TEXT_BYTES_MAX:
        raise ConfigError(
            [f"{name}: {size_bytes} bytes; a configuration has at most {TEXT_BYTES_MAX}"]
        )
    loader = _parsed(name, lambda: yaml.SafeLoader(text))
    root = _parsed(name, loader.get_single_node)
    if root is None:
        return Source(name)
    problems: list[str] = []
    lines: dict[FieldPath, int] = {}
    # Before any value is built: what aliases and `<<` multiply is counted first.
    _Walk(name, lines, problems).visit(root, ())
    value: object = _parsed(name, lambda: loader.construct_document(root))
    if not isinstance(value, dict):
        place = f"{name}:{root.start_mark.line + 1}"
        raise ConfigError([f"{place}: expected sections such as `host:`, not a bare value"])
    expanded = _expand(
        cast("object", value),
        (),
        Source(name, {}, lines),
        os.environ if environment is None else environment,
        problems,
    )
    if problems:
        raise ConfigError(problems)
    return Source(name, cast("dict[str, object]", expanded), lines)


def _parsed(name: str, step: Callable[[], T]) -> T:
    try:
        return step()
    except yaml.MarkedYAMLError as error:
        raise ConfigError([_yaml_problem(name, error)]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{name}: not YAML: {error}"]) from error
    except RecursionError as error:
        raise ConfigError([_too_deep(name)]) from error
    except Exception as error:
        # PyYAML converts a scalar as its tag or its looks say and lets what that raises through:
        # ValueError for 2001-13-45, IndexError for `!!int ""`, AttributeError, KeyError.
        raise ConfigError(
            [f"{name}: not YAML: a value is not what it looks like ({error}); put it in quotes"]
        ) from error


def _too_deep(place: str) -> str:
    return f"{place}: nested too deeply to be a configuration"


def _yaml_problem(name: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else name
    said = " ".join(part for part in (error.context, error.problem) if part)
    hint = ""
    if "\\t" in said:
        hint = "; indent with spaces, not tabs"
    elif "mapping values are not allowed" in said:
        hint = "; put the value in quotes, or check the indentation"
    elif mark is not None and mark.buffer is not None and "${" in mark.buffer:
        hint = '; between braces, a variable needs quotes: "${NAME}"'
    return f"{where}: not YAML: {said or error}{hint}"


class _Walk:
    """Goes over every value once for each time that it stands in the result, and notes its line."""

    def __init__(self, name: str, lines: dict[FieldPath, int], problems: list[str]) -> None:
        self._name = name
        self._lines = lines
        self._problems = problems
        self._nodes = 0

    def visit(self, node: yaml.Node, path: FieldPath) -> None:
        """Note what is below `path`. Raises `ConfigError` where there is no end, or too much."""
        line = node.start_mark.line + 1
        place = f"{self._name}:{line}"
        self._nodes += 1
        if len(path) > DEPTH_MAX:
            raise ConfigError([_too_deep(place)])
        if self._nodes > NODES_MAX:
            raise ConfigError([f"{place}: more than {NODES_MAX} values to be a configuration"])
        if isinstance(node, yaml.MappingNode):
            self._mapping(node, path)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._lines[(*path, index)] = item.start_mark.line + 1
                self.visit(item, (*path, index))
        elif not _plain_text(str(node.value)):
            self._problems.append(
                f"{place}: {dotted(path)}: has a character that no setting can hold; remove it"
            )

    def _mapping(self, node: yaml.MappingNode, path: FieldPath) -> None:
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in seen and key != "<<":
                self._problems.append(
                    f"{self._name}:{line}: {dotted((*path, key))} stands twice; keep one of the two"
                )
            if not _plain_text(key):
                self._problems.append(f"{self._name}:{line}: a key has a character without meaning")
            seen.add(key)
            self._lines[(*path, key)] = line
            self.visit(value_node, (*path, key))


def _plain_text(text: str) -> bool:
    """Whether it can be written down and handed to the kernel: no NUL, no half of a surrogate."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


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
            problems.append(
                f"{source.where(path)}: {dotted(path)}: `${{` starts no variable; write ${{NAME}} "
                "or ${NAME:-default}, or $$ for a dollar sign"
            )
            return ""
        found = environment.get(match["name"])
        # As in a shell, `:-` also covers a variable that is set but empty.
        if match["default"] is not None:
            return found or match["default"]
        if found is None:
            problems.append(
                f"{source.where(path)}: {dotted(path)}: environment variable {match['name']} is "
                f"not set; set it, or write ${{{match['name']}:-default}}"
            )
            return ""
        return found

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
        parent = path[:-1]
        if path in _REMOVED:
            return f"{place}: {_REMOVED[path]}; remove it"
        valid = _valid(names, parent)
        near = difflib.get_close_matches(str(path[-1]), valid, n=1, cutoff=0.5)
        suggestion = f"did you mean `{near[0]}`? " if near else ""
        section = f"`{dotted(parent)}`" if parent else "the top level"
        return f"{place}: unknown setting; {suggestion}{section} takes {', '.join(valid)}"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        valid = _valid(names, path)
        takes = f" ({', '.join(valid)})" if valid else ""
        return f"{place}: expected indented settings{takes}, not a single value"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"{place}: must be given"
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
    if error["type"] == "string_type" and isinstance(value, bool):
        return "; YAML reads yes, no, on and off as booleans: put the word in quotes"
    if error["type"] == "literal_error" and isinstance(value, bool):
        return "; YAML reads yes, no, on and off as booleans"
    if error["type"] == "bool_type":
        return "; write true or false"
    if error["type"] == "string_type" and isinstance(value, int | float):
        return "; YAML reads it as a number: put it in quotes"
    limits = error.get("ctx", {})
    limit = limits.get("ge", limits.get("le"))
    if isinstance(limit, int) and limit >= _KIB and not limit % _KIB:
        return f" ({format_size(limit)})"
    return ""


def _valid(names: Mapping[FieldPath, Sequence[str]], path: FieldPath) -> list[str]:
    found = names.get(path, names.get((*path[:-1], ANY_NAME), ()))
    return sorted(found)


def mask_url(url: str) -> str:
    """A URL without its user, password and query (a SAS signature travels there)."""
    if "://" not in url:
        return url

    def replace(match: re.Match[str]) -> str:
        # abfs://container@account is Azure's way to write a place, not a user.
        plain = match["scheme"].startswith(("abfs", "wasb")) and ":" not in match["user"]
        return match[0] if plain else f"{match['scheme']}{MASK}@"

    return _QUERY.sub(f"?{MASK}", _USERINFO.sub(replace, url))


def secrets_of_url(url: str) -> set[str]:
    """What `mask_url` would leave out: user, password and what the query holds."""
    found: set[str] = set()
    if mask_url(url) == url:
        return found
    for match in _USERINFO.finditer(url):
        found.update(match["user"].split(":", 1))
    _, _, query = url.partition("?")
    found.update(value for _, _, value in (part.partition("=") for part in query.split("&")))
    return found - {""}


def secrets_in(value: object, name: str = "") -> set[str]:
    """Every text in `value` that `masked` would leave out."""
    if isinstance(value, dict):
        items = cast("dict[str, object]", value)
        return {
            one for key, item in items.items() for one in secrets_in(item, _secret(name) or key)
        }
    if isinstance(value, list):
        return {one for item in cast("list[object]", value) for one in secrets_in(item, name)}
    if isinstance(value, bool) or value is None:
        return set()
    if _SECRET_NAME.search(name):
        return {str(value)}
    return secrets_of_url(value) if isinstance(value, str) else set()


def _secret(name: str) -> str:
    return name if _SECRET_NAME.search(name) else ""


def masked(value: object, name: str = "") -> object:
    """A copy of plain values fit to be shown: secrets replaced, at any depth."""
    if isinstance(value, dict):
        items = cast("dict[str, object]", value)
        # Below a secret name everything is one: `auth: {inner: ...}`.
        return {key: masked(item, _secret(name) or key) for key, item in items.items()}
    if value is not None and not isinstance(value, bool) and _SECRET_NAME.search(name):
        return MASK
    if isinstance(value, list):
        return [masked(item, name) for item in cast("list[object]", value)]
    if isinstance(value, str):
        return mask_url(value)
    return value
