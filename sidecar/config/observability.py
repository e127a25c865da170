"""The sections `http`, `events` and `log`.

Invariant: events, which contain prompts, leave the machine only encrypted, for known subscribers.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from pydantic import Field, model_validator

from sidecar.config.secret_files import read_secret
from sidecar.config.types import (
    AbsolutePath,
    Count,
    Endpoint,
    Flag,
    Secret,
    Section,
    Size,
    matching,
)
from sidecar.errors import StartError

PublicKey = Annotated[
    str,
    matching(
        r"^[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}$",
        "is no public CURVE key, which has 40 characters of Z85",
    ),
]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address. Names but `localhost` are not resolved."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class HttpSettings(Section):
    """Metrics, health and status over HTTP."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; one that is not loopback needs a token."""
    port: Count = Field(default=9321, ge=0, le=65_535)
    """Port to listen on; 0 takes any that is free."""
    token: Secret | None = Field(default=None, min_length=16, max_length=1024)
    """Requests for metrics or status must carry it. A secret: take it from the environment."""
    token_file: AbsolutePath | None = None
    """A file with the token, readable by its owner only; `kvlake keygen` creates one."""

    @model_validator(mode="after")
    def _needs_token(self) -> HttpSettings:
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file are both given; keep one of them")
        if self.token is None and self.token_file is None and not is_loopback(self.host):
            raise ValueError(
                f"host={self.host} can be reached from other machines; listen on 127.0.0.1, or "
                "give http.token_file (made by `kvlake keygen --out FILE`) or http.token"
            )
        return self

    def secret_token(self) -> str:
        """The token, or nothing where none is needed. Raises `StartError`."""
        if self.token_file is not None:
            return read_secret(self.token_file, "http.token_file")
        return "" if self.token is None else self.token.get_secret_value()


class EventsSettings(Section):
    """What the tiers and the engines' caches gain and lose (docs/reference/events.md)."""

    enabled: Flag = False
    """Publish KV events. Subscribers can read the prompts' token ids."""
    endpoint: Endpoint = "ipc"
    """Where batches are published: `ipc` (`events.sock` beside the attach socket) or
    `tcp://ADDRESS:PORT`."""
    replay_endpoint: Endpoint = "ipc"
    """Where subscribers request missed batches: `ipc` (`replay.sock`) or `tcp://ADDRESS:PORT`."""
    topic: str = Field(default="", max_length=256)
    """First frame of every batch; subscribers filter by it."""
    buffer_batches: Count = Field(default=10_000, ge=1, le=1_000_000)
    """Batches that are kept for replay."""
    buffer_max: Size = Field(default=64 << 20, ge=1 << 20)
    """Bytes of the batches that are kept."""
    queue_batches: Count = Field(default=10_000, ge=1, le=1_000_000)
    """Batches queued for one subscriber; further ones are dropped for it, and counted."""
    curve_secret_key_file: AbsolutePath | None = None
    """File with this side's CURVE key, for TCP; `kvlake keygen` creates it."""
    subscribers: tuple[PublicKey, ...] = Field(default=(), max_length=256, strict=False)
    """Public CURVE keys of the allowed subscribers over TCP."""

    @model_validator(mode="after")
    def _needs_keys(self) -> EventsSettings:
        places = {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint}
        over_tcp = {name: place for name, place in places.items() if place != "ipc"}
        if self.curve_secret_key_file is not None:
            if len(over_tcp) < len(places):
                raise ValueError("curve_secret_key_file is for TCP; give both endpoints over TCP")
            if not self.subscribers:
                raise ValueError(
                    "curve_secret_key_file without subscribers admits nobody; list their keys"
                )
            return self
        if self.subscribers:
            raise ValueError(
                "subscribers need a CURVE key of this side: run `kvlake keygen --out FILE` and set "
                "events.curve_secret_key_file: FILE"
            )
        for name, place in over_tcp.items():
            raise ValueError(
                f"{name}={place} can be reached by every user of this machine at least, who could "
                "read prompts; use `ipc`, or give curve_secret_key_file and subscribers"
            )
        return self

    def secret_key(self) -> bytes:
        """The CURVE key. Raises `StartError`."""
        # Here, so that commands without events start without it.
        import zmq

        path = self.curve_secret_key_file
        assert path is not None, "events go over TCP"
        key = read_secret(path, "events.curve_secret_key_file").encode()
        try:
            zmq.curve_public(key)
        except (ValueError, KeyError, zmq.ZMQError) as error:
            raise StartError(
                f"events.curve_secret_key_file={path} holds no CURVE key; make one with "
                "`kvlake keygen --out FILE`"
            ) from error
        return key


class LogSettings(Section):
    """The log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity that is written."""
    format: Literal["text", "json"] = "text"
    """`text` for people, `json` for one object per line."""
