"""Notifying systemd of the service's state (sd_notify): datagrams to `$NOTIFY_SOCKET`.

Owns the socket's address and the interval of systemd's watchdog. Does not own what is sent, nor
when (`watchdog.py`, `cli/run/`).

Invariants: without `$NOTIFY_SOCKET` nothing is sent; sending never waits and never raises;
`MAINPID` is never sent, and the children of `kvlake run` do not get the variables, so that no
process speaks for another one.
"""

import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Final

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
        self.watchdog_seconds: float | None = None
        """systemd ends the process if it gets no `alive` for so long. None without a watchdog."""
        usec, pid = given.get("WATCHDOG_USEC", ""), given.get("WATCHDOG_PID", "")
        if self.listening and usec.isdecimal() and pid in ("", str(os.getpid())):
            self.watchdog_seconds = int(usec) / 1e6 or None

    def ready(self, status: str) -> None:
        """The service can be used."""
        self.status(status, "READY=1")

    def stopping(self, status: str) -> None:
        """The service is stopping."""
        self.status(status, "STOPPING=1")

    def status(self, status: str, *lines: str) -> None:
        """One line for `systemctl status`."""
        self._send(*lines, f"STATUS={' '.join(status.split())[:STATUS_CHARACTERS_MAX]}")

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
