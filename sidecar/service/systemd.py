"""Notifying systemd of the service's state (sd_notify): datagrams to `$NOTIFY_SOCKET`.

Owns the socket's address and the interval of systemd's watchdog. Does not own what is sent, nor
when (`watchdog.py`, `cli/run/`).

Invariants: without `$NOTIFY_SOCKET` nothing is sent; sending never waits and never raises;
`MAINPID` is never sent, and the children of `kvlake run` do not get the variables, so that no
process speaks for another one.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
STATUS_CHARACTERS_MAX: Final = 512


class Notifier:
    """Notifies the service manager that the environment names, if any."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        given = os.environ if environment is None else environment
        path = given.get("NOTIFY_SOCKET", "")
        # "@name" is a socket in the abstract namespace; vsock addresses are for virtual machines.
        self._address = f"\0{path[1:]}" if path.startswith("@") else path
        self.listening = path.startswith(("@", "/"))
        self.watchdog_seconds = _watchdog_seconds(given) if self.listening else None
        """systemd ends the process if it gets no `alive` for so long. None without a watchdog."""

    def ready(self, status: str) -> None:
        """The service can be used."""
        self._send("READY=1", f"STATUS={_line(status)}")

    def status(self, status: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={_line(status)}")

    def stopping(self, status: str) -> None:
        """The service is stopping."""
        self._send("STOPPING=1", f"STATUS={_line(status)}")

    def extend(self, seconds: float) -> None:
        """Starting or stopping takes longer: extend the timeout to this much from now on."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def alive(self) -> None:
        """Feed the watchdog."""
        if self.watchdog_seconds is not None:
            self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if not self.listening:
            return
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as sock:
            sock.sendto("\n".join(lines).encode(), self._address)


def without_notify(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for a child that is not the service's main process."""
    return {name: value for name, value in environment.items() if name not in VARIABLES}


def _watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    text, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not text.isdecimal() or int(text) == 0 or pid not in ("", str(os.getpid())):
        return None
    return int(text) / 1e6


def _line(text: str) -> str:
    return " ".join(text.split())[:STATUS_CHARACTERS_MAX]
