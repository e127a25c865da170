"""Places that settings name: endpoints, hosts, absolute paths.

Owns the checks that several sections share. Does not own what a section makes of a place.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_TCP: Final = re.compile(r"^tcp://(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9.*-]+):[0-9]{1,5}$")


def require_endpoint(value: str) -> str:
    """`ipc`, or a ZMQ endpoint over TCP. Raises `ValueError`."""
    if value != "ipc" and not _TCP.match(value):
        raise ValueError(
            f"{value!r} is no endpoint; write ipc, or tcp://ADDRESS:PORT such as "
            "tcp://127.0.0.1:9322"
        )
    return value


def is_loopback(host: str) -> bool:
    """Whether an address is one that only this machine reaches. Other names are not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_absolute(value: Path) -> Path:
    """A path that means the same wherever the sidecar is started. Raises `ValueError`."""
    if not value.is_absolute():
        raise ValueError(f"'{value}' is a relative path; write an absolute one such as /{value}")
    return value
