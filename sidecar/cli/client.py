"""A running sidecar over HTTP, as commands ask it.

Does not own what the documents say (`sidecar/observe/`).

Invariants: once connected, an answer ends within the timeout, also if it comes byte by byte; each
address of the host that is tried before may take the timeout too, and resolving its name what the
resolver takes; no proxy is used, because the sidecar is on this machine or beside it; no redirect
is followed.
"""

import http.client
import json
import math
import socket
import time
import urllib.parse
from contextlib import closing
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, cast

from sidecar.cli.console import CommandError, Document, NoAnswer, Options, load_config
from sidecar.config.secret_files import read_secret
from sidecar.errors import StartError
from sidecar.exits import Exit
from sidecar.sessions.model_names import printable

if TYPE_CHECKING:
    # As in `console.py`.
    from sidecar.config.model import Config

DOCUMENT_BYTES_MAX: Final = 16 << 20
MESSAGE_BYTES_MAX: Final = 4096
_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (compared, not bound)
_STRANGER: Final = "is that a kvlake sidecar?"


class QueryRejected(NoAnswer):
    """The sidecar rejected the query; the message is its own."""

    code = Exit.USAGE


class SidecarNotReady(NoAnswer):
    """Something listens there but does not answer yet: a sidecar that starts, ends or hangs."""


def url_of(config: "Config") -> str:
    """Address of the sidecar of this configuration. Raises `NoAnswer` if the port is not known."""
    settings = config.http
    if settings.port == 0:
        raise NoAnswer(
            "http.port is 0, so the port was chosen at start; the sidecar's first log line has "
            "it: kvlake status --url http://127.0.0.1:PORT"
        )
    host = _WILDCARDS.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


class _DeadlineSocket(socket.socket):
    """A socket that receives until a moment of the monotonic clock."""

    deadline = math.inf

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As its base. Raises `TimeoutError` at the deadline."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left)
        return super().recv_into(buffer, nbytes, flags)


class _Connection(http.client.HTTPConnection):
    """Its timeout is for the whole answer, after one for each address that is tried."""

    def connect(self) -> None:
        # Each address of the host has a timeout of its own: the first may drop packets.
        super().connect()
        deadline = time.monotonic() + (self.timeout or math.inf)
        assert self.sock is not None, "it is connected"
        receiver = _DeadlineSocket(fileno=self.sock.detach())
        receiver.settimeout(self.timeout)
        receiver.deadline = deadline
        self.sock = receiver


@dataclass(frozen=True, slots=True)
class SidecarClient:
    """The address of a sidecar, the longest wait for its answer, and its token."""

    url: str
    timeout_seconds: float = 5.0
    token: str = field(default="", repr=False)
    from_list: bool = False
    """Its address comes from a list, so no option names it or its configuration."""

    def get(self, path: str = "/status", body: Document | None = None) -> Document:
        """The document of a path; with a body, the answer to it. Raises `NoAnswer`."""
        url = urllib.parse.urlsplit(self.url.rstrip("/").removesuffix("/status"))
        target = f"{url.geturl()}{path.partition('?')[0]}"
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        data = None if body is None else json.dumps(body).encode()
        try:
            connection = _Connection(url.hostname or "", url.port, timeout=self.timeout_seconds)
            with closing(connection):
                method = "GET" if data is None else "POST"
                connection.request(method, f"{url.path}{path}", data, headers)
                answer = connection.getresponse()
                if answer.status != HTTPStatus.OK:
                    raise self._refusal(target, path, answer)
                document: object = json.loads(answer.read(DOCUMENT_BYTES_MAX))
        except OSError as error:
            kind = SidecarNotReady if isinstance(error, TimeoutError) else NoAnswer
            options = "" if self.from_list else " (--config or --url)"
            raise kind(
                f"no answer from {target}: {error}. Does the sidecar run, and are http.host and "
                f"http.port those of its configuration?{options}"
            ) from error
        except http.client.HTTPException as error:
            said = printable(str(error), MESSAGE_BYTES_MAX)
            raise NoAnswer(f"{target} does not answer by HTTP ({said}); {_STRANGER}") from error
        except ValueError as error:
            raise NoAnswer(f"no answer from {target}: it is not JSON; {_STRANGER}") from error
        if not isinstance(document, dict):
            raise NoAnswer(f"{target} answered something else; {_STRANGER}")
        return cast("Document", document)

    def _refusal(self, target: str, path: str, answer: http.client.HTTPResponse) -> NoAnswer:
        code = answer.status
        said = answer.read(MESSAGE_BYTES_MAX) if code == HTTPStatus.BAD_REQUEST else b""
        if text := said.decode(errors="replace").strip():
            return QueryRejected(printable(text, MESSAGE_BYTES_MAX))
        if code == HTTPStatus.UNAUTHORIZED:
            why = "takes another one" if self.token else "none was given"
            options = (
                "--token-file"
                if self.from_list
                else "--config with the sidecar's own file in place of --url, or --token-file"
            )
            return NoAnswer(f"{target} needs a token, and {why}; give {options}")
        if code == HTTPStatus.SERVICE_UNAVAILABLE:
            return SidecarNotReady(f"{target}: the sidecar is starting or ending, ask again")
        if code == HTTPStatus.NOT_FOUND and path != "/status":
            return NoAnswer(
                f"{target} answered 404: that is no kvlake sidecar, or one of an earlier release "
                "without this path; restart it with the release that is installed"
            )
        return NoAnswer(f"{target} answered {code}; {_STRANGER}")


def client_of(options: Options) -> SidecarClient:
    """The running sidecar that these options name. Raises `CommandError`."""
    try:
        config = None if options.url else load_config(options.config)
        url = options.url if config is None else url_of(config)
        token = "" if config is None else config.http.secret_token()
        if options.token_file is not None:
            token = read_secret(options.token_file, "--token-file")
    except StartError as error:
        raise CommandError(str(error)) from error
    return SidecarClient(url, options.timeout, token)


def get_list(client: SidecarClient, path: str, name: str, **query: str) -> Document:
    """The document of a path, which must have a list of this name. Raises `NoAnswer`."""
    document = client.get(f"{path}?{urllib.parse.urlencode(query)}")
    if not isinstance(document.get(name), list):
        raise NoAnswer(f"{client.url} answered something else; {_STRANGER}")
    return document
