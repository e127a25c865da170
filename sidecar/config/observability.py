"""The sections for those who watch a sidecar: `http`, `events` and `log`.

Owns these sections, and the rule that nothing with prompts in it leaves the machine without a key.
Does not own what is served (`sidecar/observe/http.py`, `sidecar/events/sockets.py`,
`sidecar/logs.py`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal, cast

from pydantic import Field, SecretStr, field_serializer, field_validator, model_validator

from sidecar.config.addresses import is_loopback, require_absolute, require_endpoint
from sidecar.config.secret_files import read_secret
from sidecar.config.section import Section
from sidecar.config.types import Count, Directory, Flag, Size
from sidecar.config.yaml_file import MASK

if TYPE_CHECKING:
    from pathlib import Path

_PUBLIC_KEY: Final = re.compile(r"^[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}$")


class HttpSettings(Section):
    """Metrics, health and status over HTTP."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; one that is not loopback needs a token."""
    port: Count = Field(default=9321, ge=0, le=65_535)
    """Port to listen on; 0 takes any that is free."""
    token: SecretStr | None = Field(default=None, min_length=16, max_length=1024)
    """Who asks for metrics or status must send it; a secret, so take it from the environment."""
    token_file: Directory | None = None
    """A file that holds the token, readable by its owner only; `kvlake keygen` makes one."""

    @field_validator("token_file")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else require_absolute(value)

    @field_serializer("token", when_used="json")
    def _mask(self, value: SecretStr | None) -> str | None:
        return None if value is None else MASK

    @model_validator(mode="after")
    def _guarded(self) -> HttpSettings:
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file are both given; keep one of them")
        if self.token is None and self.token_file is None and not is_loopback(self.host):
            raise ValueError(
                f"host={self.host} can be reached from other machines; listen on 127.0.0.1, or "
                "give http.token_file (made by `kvlake keygen --out FILE`) or http.token"
            )
        return self

    def secret_token(self) -> str:
        """The token, or nothing where none is needed. Raises `SecretFileError`."""
        if self.token_file is not None:
            return read_secret(self.token_file, "http.token_file")
        return "" if self.token is None else self.token.get_secret_value()


class EventsSettings(Section):
    """What the tiers and the engines' caches gain and lose (docs/reference/events.md)."""

    enabled: Flag = False
    """Publish KV events. Whoever subscribes reads the prompts' token ids."""
    endpoint: str = "ipc"
    """Where batches are published: `ipc` (`events.sock` beside the attach socket) or
    `tcp://ADDRESS:PORT`."""
    replay_endpoint: str = "ipc"
    """Where a subscriber asks for what it missed: `ipc` (`replay.sock`) or `tcp://ADDRESS:PORT`."""
    topic: str = Field(default="", max_length=256)
    """First frame of every batch; subscribers choose by it."""
    buffer_batches: Count = Field(default=10_000, ge=1, le=1_000_000)
    """Batches that are kept for replay."""
    buffer_max: Size = Field(default=64 << 20, ge=1 << 20)
    """Bytes of the batches that are kept."""
    queue_batches: Count = Field(default=10_000, ge=1, le=1_000_000)
    """Batches that wait for one subscriber; more are dropped for it, and counted."""
    curve_secret_key_file: Directory | None = None
    """File with this side's CURVE key, for TCP; `kvlake keygen` makes it."""
    subscribers: tuple[str, ...] = Field(default=(), max_length=256)
    """Public CURVE keys of those who may subscribe over TCP."""

    @field_validator("subscribers", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return tuple(cast("list[object]", value)) if isinstance(value, list) else value

    @field_validator("subscribers")
    @classmethod
    def _keys(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for key in value:
            if not _PUBLIC_KEY.match(key):
                raise ValueError(f"{key!r} is no public CURVE key, which has 40 characters of Z85")
        return value

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _known(cls, value: str) -> str:
        return require_endpoint(value)

    @model_validator(mode="after")
    def _guarded(self) -> EventsSettings:
        places = {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint}
        over_tcp = {name: place for name, place in places.items() if place != "ipc"}
        if self.curve_secret_key_file is not None:
            require_absolute(self.curve_secret_key_file)
            if len(over_tcp) < len(places):
                raise ValueError("curve_secret_key_file is for TCP; give both endpoints over TCP")
            if not self.subscribers:
                raise ValueError("curve_secret_key_file without subscribers lets nobody in")
        elif self.subscribers:
            raise ValueError(
                "subscribers are known by CURVE keys, and this side has none: `kvlake keygen --out "
                "FILE`, then events.curve_secret_key_file: FILE"
            )
        for name, place in over_tcp.items():
            if self.curve_secret_key_file is None:
                raise ValueError(
                    f"{name}={place} can be reached by every user of this machine at least, and "
                    "prompts can be read there; use `ipc`, or give curve_secret_key_file and "
                    "subscribers"
                )
        return self

    def secret_key(self) -> str:
        """The CURVE key, or nothing where none is given. Raises `SecretFileError`."""
        if self.curve_secret_key_file is None:
            return ""
        return read_secret(self.curve_secret_key_file, "events.curve_secret_key_file")


class LogSettings(Section):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is written."""
    format: Literal["text", "json"] = "text"
    """`text` for people, `json` for one object per line."""
