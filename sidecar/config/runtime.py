"""The section `runtime`: the sidecar's sockets, and which users may use them.

`sidecar/service/runtime_dir.py` creates the directory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, field_validator, model_validator

from sidecar.config.types import NAME_PATTERN, AbsolutePath, Count, Flag, Section, matching

SOCKET_PATH_BYTES_MAX: Final = 107
"""What `struct sockaddr_un` holds on Linux, less the closing zero."""

UID_MAX: Final = (1 << 32) - 1
OVERFLOW_UID: Final = 65_534


def default_runtime_directory() -> Path:
    """The user's own runtime directory where there is one, else one in /tmp named by user id."""
    own = os.environ.get("XDG_RUNTIME_DIR")
    if own and Path(own).is_dir():
        return Path(own) / "kvlake"
    return Path(f"/tmp/kvlake-{os.getuid()}")  # noqa: S108 (made 0700, and its owner is checked)


class RuntimeSettings(Section):
    """The sidecar's sockets and its name."""

    directory: AbsolutePath = Field(default_factory=default_runtime_directory)
    """Absolute directory for sockets; created with mode 0700."""
    name: Annotated[
        str,
        matching(
            NAME_PATTERN, "cannot name a directory; use 1 to 64 letters, digits, '.', '_' or '-'"
        ),
    ] = "default"
    """Name of this sidecar; two on one node need two names."""
    allow_uids: tuple[Count, ...] = Field(default=(), max_length=256, strict=False)
    """User ids whose engines are served, beside the sidecar's own user and root."""
    strict_parents: Flag = True
    """Refuse a directory below one that other users can write to. Off for a volume of one pod."""

    @field_validator("allow_uids")
    @classmethod
    def _users(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        for uid in value:
            if not 0 <= uid < UID_MAX:
                raise ValueError(f"{uid} is no user id; write numbers from 0 to {UID_MAX - 1}")
            if uid == OVERFLOW_UID:
                raise ValueError(
                    f"{uid} is every user that this user namespace does not map; give the engine a "
                    "user of its own"
                )
        return value

    @model_validator(mode="after")
    def _fits(self) -> RuntimeSettings:
        length = len(os.fsencode(self.attach_path))
        if length > SOCKET_PATH_BYTES_MAX:
            raise ValueError(
                f"socket path {self.attach_path} has {length} bytes, and Linux takes at most "
                f"{SOCKET_PATH_BYTES_MAX}; choose a shorter runtime.directory or runtime.name"
            )
        return self

    @property
    def served_uids(self) -> tuple[int, ...]:
        """Users whose engines may attach: our own, root (which could anyway), and those listed."""
        return tuple(sorted({os.geteuid(), 0, *self.allow_uids}))

    @property
    def home(self) -> Path:
        """This sidecar's own directory."""
        return self.directory / self.name

    @property
    def attach_path(self) -> Path:
        """Unix socket on which engines attach."""
        return self.home / "attach.sock"

    @property
    def engine_events(self) -> tuple[str, str]:
        """Where an engine that `kvlake run` starts publishes its own events, and replays them."""
        return f"ipc://{self.home / 'engine.sock'}", f"ipc://{self.home / 'again.sock'}"
