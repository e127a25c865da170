"""The sidecar's settings as a whole: one YAML file, its defaults, its JSON schema.

Owns `Config`, loading and showing it, errors that name file, line, path, value and remedy, and the
schema that editors check a file against. Does not own the sections (`sections.py`, `store.py`).

Invariants:

* A `Config` is valid, frozen and complete (every default filled in); sizes are bytes and durations
  are seconds.
* Only YAML's safe types are built; a key that is given twice is an error.
* No secret is in a `repr`, in the result of `show` or in an error: no message has a password of a
  URL, a value below a setting of `_OPAQUE`, or a value whose name is unknown.
"""

import difflib
import json
import os
import re
import shlex
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeAlias, cast

import yaml
from pydantic import BaseModel, Field, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails
from yaml.parser import ParserError

from sidecar.config import sections
from sidecar.config.store import StoreSettings
from tiers.redaction import mask_url
from tiers.settings import Section
from tiers.sizes import format_size

FieldPath: TypeAlias = tuple[str | int, ...]

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
_TEXT_TAG: Final = "tag:yaml.org,2002:str"


class Config(Section):
    """kvlake sidecar."""

    runtime: sections.RuntimeSettings = Field(default_factory=sections.RuntimeSettings)
    chunk: sections.ChunkSettings = Field(default_factory=sections.ChunkSettings)
    host: sections.HostSettings = Field(default_factory=sections.HostSettings)
    store: StoreSettings | None = None
    limits: sections.LimitsSettings = Field(default_factory=sections.LimitsSettings)
    tenants: sections.TenantsSettings = Field(default_factory=sections.TenantsSettings)
    integrity: sections.IntegritySettings = Field(default_factory=sections.IntegritySettings)
    copies: sections.CopySettings = Field(default_factory=sections.CopySettings, alias="copy")
    # Not `copy`: pydantic models have a method of this name.
    gpu: sections.GpuSettings = Field(default_factory=sections.GpuSettings)
    http: sections.HttpSettings = Field(default_factory=sections.HttpSettings)
    events: sections.EventsSettings = Field(default_factory=sections.EventsSettings)
    log: sections.LogSettings = Field(default_factory=sections.LogSettings)

    _file: Path | None = PrivateAttr(default=None)

    @property
    def file(self) -> Path | None:
        """The file that it was read from; None for the built-in defaults."""
        return self._file

    @property
    def option(self) -> str:
        """The option of `kvlake` that names this configuration, after a space; or nothing."""
        return "" if self._file is None else f" --config {shlex.quote(str(self._file))}"

    def read_from(self, path: Path) -> Self:
        """This configuration, with the file that messages name."""
        self._file = path
        return self

    @property
    def pool_path(self) -> Path:
        """The host tier's file: one for each user and name."""
        return self.host.directory / f"kvlake-{os.getuid()}-{self.runtime.name}.pool"

    def secrets(self) -> set[str]:
        """Every secret that the configuration holds."""
        named = self.tenants.named
        found = {one.salt.get_secret_value() for one in named.values() if one.salt is not None}
        # A salt that is also a tenant's name is shown wherever that name is.
        found -= named.keys()
        if self.http.token is not None:
            found.add(self.http.token.get_secret_value())
        if self.store is not None:
            found |= self.store.secrets()
        return found


def load(path: str | Path | None, *, environment: Mapping[str, str] | None = None) -> Config:
    """Read and check a configuration file; the defaults where `path` is None.

    Raises `ConfigError`: the file cannot be read, or something in it must be fixed.
    """
    if path is None:
        return Config()
    try:
        text = Path(path).read_text("utf-8")
    except FileNotFoundError as error:
        problem = f"{path}: no such file; configs/default.yaml is one to start from"
        raise ConfigError([problem]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from error
    return loads(text, name=str(path), environment=environment).read_from(Path(path))


def loads(
    text: str, *, name: str = "configuration", environment: Mapping[str, str] | None = None
) -> Config:
    """Check a configuration given as YAML text. Raises `ConfigError`."""
    source = Source(text, name, os.environ if environment is None else environment)
    # A section that is written but left empty (`host:`) means its defaults.
    values = {key: value for key, value in source.values.items() if value is not None}
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        names = _names(Config)
        found = error.errors(include_url=False)
        raise ConfigError([explain(detail, source, names) for detail in found]) from None


def _names(model: type[BaseModel], path: FieldPath = ()) -> dict[FieldPath, list[str]]:
    fields = {info.alias or name: info for name, info in model.model_fields.items()}
    found: dict[FieldPath, list[str]] = {path: list(fields)}
    for name, info in fields.items():
        kinds = typing.get_args(info.annotation)
        inner = (*path, name, ANY_NAME) if typing.get_origin(info.annotation) is dict else None
        for kind in (info.annotation, *kinds):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= _names(kind, inner or (*path, name))
    return found


def show(config: Config) -> str:
    """The whole configuration as YAML, defaults filled in and secrets masked."""
    values = config.model_dump(mode="json", by_alias=True)
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=False)


def schema() -> str:
    """JSON schema of the file, as text that ends in a newline."""
    document = Config.model_json_schema(mode="validation")
    for section in document["$defs"].values():
        for name, value in section["properties"].items():
            section["properties"][name] = _or_variable(value)
    for section in document["properties"].values():
        if "$ref" in section:
            # One with comments alone is empty.
            section["anyOf"] = [{"$ref": section.pop("$ref")}, {"type": "null"}]
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    document["title"] = "kvlake sidecar configuration"
    return json.dumps(document, indent=2) + "\n"


def _or_variable(value: dict[str, Any]) -> dict[str, Any]:
    """Let a value that is not free text also be an environment variable."""
    if value.get("type") == "object" or (value.get("type") == "string" and "enum" not in value):
        return value
    texts = ("title", "description", "default")
    about: dict[str, Any] = {key: value.pop(key) for key in texts if key in value}
    alternatives = value["anyOf"] if set(value) == {"anyOf"} else [value]
    return {**about, "anyOf": [*alternatives, {"type": "string", "pattern": r"\$\{"}]}


class ConfigError(Exception):
    """A configuration cannot be used. `problems` are sentences, one for each thing to fix."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class Source:
    """A YAML file: the values of its settings, and their lines. `name` is what messages call it.

    `${NAME}` and `${NAME:-default}` in its strings are expanded, and `$$` stands for one dollar
    sign. Keys are not expanded.
    """

    def __init__(self, text: str, name: str, environment: Mapping[str, str]) -> None:
        """Raises `ConfigError`: bad YAML, a key that is given twice, or an unset variable."""
        self.name = name
        self._environment = environment
        self._lines: dict[FieldPath, int] = {}
        self._problems: list[str] = []
        value: object = {}
        try:
            loader = yaml.SafeLoader(text)
            root = loader.get_single_node()
            if root is not None:
                self._lines[()] = root.start_mark.line + 1
                self._visit(root, (), set())
                value = loader.construct_document(root)
        except yaml.MarkedYAMLError as error:
            raise ConfigError([_yaml_problem(name, error)]) from error
        except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
            # PyYAML lets errors of conversions through: ValueError for 2001-13-45, KeyError for
            # !!bool.
            raise ConfigError(
                [f"{name}: not YAML: a value is not what it looks like ({error}); put it in quotes"]
            ) from error
        if not isinstance(value, dict):
            self._problems = [
                f"{self.where(())}: expected sections such as `host:`, not a bare value"
            ]
        if self._problems:
            raise ConfigError(self._problems)
        self.values = cast("dict[str, object]", value)

    def where(self, path: FieldPath) -> str:
        """`file:line` of the innermost part of `path` that the file has."""
        lines = (self._lines.get(path[:end]) for end in range(len(path), -1, -1))
        return f"{self.name}:{next(filter(None, lines), 1)}"

    def _visit(self, node: yaml.Node, path: FieldPath, visited: set[int]) -> None:
        """Note the lines of settings, and expand variables; once, where an anchor has aliases."""
        if id(node) in visited:
            return
        visited.add(id(node))
        if isinstance(node, yaml.MappingNode):
            names: set[str] = set()
            for key, value in node.value:
                if key.tag == _MERGE_TAG:
                    self._visit(value, path, visited)
                    continue
                key.tag, name = _TEXT_TAG, str(key.value)
                inner = (*path, name)
                self._lines[inner] = key.start_mark.line + 1
                if name in names:
                    problem = f"{self.where(inner)}: {dotted(inner)} is given twice"
                    self._problems.append(f"{problem}; keep one of the two")
                names.add(name)
                self._visit(value, inner, visited)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                inner = (*path, index)
                self._lines[inner] = item.start_mark.line + 1
                self._visit(item, inner, visited)
        elif node.tag == _TEXT_TAG:
            node.value = _VARIABLE.sub(lambda match: self._expanded(match, path), node.value)

    def _expanded(self, match: re.Match[str], path: FieldPath) -> str:
        if match[0] == "$$":
            return "$"
        if match["bad"]:
            problem = (
                "`${` starts no variable; write ${NAME} or ${NAME:-default}, or $$ for a dollar "
                "sign"
            )
        else:
            name, found = match["name"], self._environment.get(match["name"])
            if found is not None:
                # As with `$(...)` in a shell: a file that Kubernetes passes on ends with one.
                found = found.rstrip("\r\n")
            # As in a shell, `:-` also covers a variable that is set but empty.
            if match["default"] is not None:
                return found or match["default"]
            if found is not None:
                return found
            problem = (
                f"environment variable {name} is not set; set it, or write ${{{name}:-default}}"
            )
        self._problems.append(f"{self.where(path)}: {dotted(path)}: {problem}")
        return ""


def _yaml_problem(name: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else name
    said = " ".join(part for part in (error.context, error.problem) if part)
    if re.search(r"\b(alias|anchor|tag)\b", said):
        # Without what PyYAML says: the value may be a secret.
        said = "a value begins with *, & or !, which mean something in YAML; put it in quotes"
    hint = ""
    if "\\t" in said:
        hint = "; indent with spaces, not tabs"
    elif "mapping values are not allowed" in said:
        hint = "; put the value in quotes, or check the indentation"
    elif isinstance(error, ParserError) and "${" in ((mark and mark.buffer) or ""):
        hint = '; between braces, a variable needs quotes: "${NAME}"'
    return f"{where}: not YAML: {said or error}{hint}"


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
    lowered = message[:1].lower() + message[1:]
    return f"{place}={mask_url(repr(value))}: {lowered}{_hint(error, value)}"


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
