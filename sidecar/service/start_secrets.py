"""The secrets that a start needs: HTTP's token and the CURVE keys, read, checked and masked.

Owns which there are and what is said where one cannot be used. Does not own the files' checks
(`config/secret_files.py`), nor what a secret is for.

Invariant: from the moment that a secret is returned here, nothing that is told repeats it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import zmq

from sidecar.config.secret_files import SecretFileError
from sidecar.errors import StartError
from sidecar.redaction import conceal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sidecar.config.model import Config


def http_token(config: Config) -> str:
    """The token of HTTP, or nothing where none is needed. Raises `StartError`."""
    return _read(config.http.secret_token)


def jobs_key(config: Config) -> bytes:
    """The CURVE key of jobs over TCP, or nothing over the Unix socket. Raises `StartError`."""
    runtime = config.runtime
    path = runtime.curve_secret_key_file
    return b"" if path is None else _key(runtime.secret_key, "runtime", path)


def events_key(config: Config) -> bytes:
    """The CURVE key of events over TCP, or nothing over Unix sockets. Raises `StartError`."""
    events = config.events
    path = events.curve_secret_key_file if events.enabled else None
    return b"" if path is None else _key(events.secret_key, "events", path)


def _key(read: Callable[[], str], section: str, path: Path) -> bytes:
    key = _read(read).encode()
    try:
        zmq.curve_public(key)
    except (ValueError, KeyError, zmq.ZMQError) as error:
        raise StartError(
            f"{section}.curve_secret_key_file={path} holds no CURVE key; make one with "
            "`kvlake keygen --out FILE`"
        ) from error
    return key


def _read(read: Callable[[], str]) -> str:
    try:
        secret = read()
    except SecretFileError as error:
        raise StartError(str(error)) from error
    conceal([secret])
    return secret
