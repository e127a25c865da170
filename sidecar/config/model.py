"""The sidecar's settings as a whole: one YAML file, its defaults, its JSON schema.

Owns `Config`, loading and showing it, and the schema that editors check a file against. Does not
own the sections, which have a module each, nor reading YAML and wording errors (`yaml_file.py`).

Invariants: a `Config` is valid, frozen and complete (every default filled in); sizes are bytes and
durations are seconds; no secret is in a `repr`, in the result of `show` or in an error.
"""

from __future__ import annotations

import json
import os
import shlex
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml
from pydantic import BaseModel, Field, PrivateAttr, ValidationError

from sidecar.config.host import (
    ChunkSettings,
    CopySettings,
    GpuSettings,
    HostSettings,
    IntegritySettings,
    LimitsSettings,
)
from sidecar.config.observability import EventsSettings, HttpSettings, LogSettings
from sidecar.config.runtime import RuntimeSettings
from sidecar.config.store import StoreSettings
from sidecar.config.tenants import TenantsSettings
from sidecar.config.types import Section
from sidecar.config.yaml_file import ANY_NAME, ConfigError, FieldPath, Source, explain

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Config", "ConfigError", "load", "loads", "schema", "show"]


class Config(Section):
    """kvlake sidecar."""

    runtime: RuntimeSettings = Field(default_factory=RuntimeSettings)
    chunk: ChunkSettings = Field(default_factory=ChunkSettings)
    host: HostSettings = Field(default_factory=HostSettings)
    store: StoreSettings | None = None
    limits: LimitsSettings = Field(default_factory=LimitsSettings)
    tenants: TenantsSettings = Field(default_factory=TenantsSettings)
    integrity: IntegritySettings = Field(default_factory=IntegritySettings)
    copies: CopySettings = Field(default_factory=CopySettings, alias="copy")
    # Not `copy`: pydantic models have a method of this name.
    gpu: GpuSettings = Field(default_factory=GpuSettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    events: EventsSettings = Field(default_factory=EventsSettings)
    log: LogSettings = Field(default_factory=LogSettings)

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
        texts = [self.http.token, *(one.salt for one in self.tenants.named.values())]
        found = {text.get_secret_value() for text in texts if text is not None}
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
