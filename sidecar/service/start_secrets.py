"""Secrets that a start needs, HTTP's token and the CURVE key of events: read, checked, masked.

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

    from sidecar.config.model import Config


def http_token(config: Config) -> str:
    """The token of HTTP, or nothing where none is needed. Raises `StartError`."""
    return _read(config.http.secret_token)


def events_key(config: Config) -> bytes:
    """The CURVE key of events over TCP, or nothing over Unix sockets. Raises `StartError`."""
    events = config.events
    path = events.curve_secret_key_file if events.enabled else None
    if path is None:
        return b""
    key = _read(events.secret_key).encode()
    try:
        zmq.curve_public(key)
    except (ValueError, KeyError, zmq.ZMQError) as error:
        raise StartError(
            f"events.curve_secret_key_file={path} holds no CURVE key; make one with "
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
