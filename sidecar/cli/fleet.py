"""Several sidecars at once: asking them all, and a line for each with the worst first.

Owns whom to ask, the order of the lines, and what they say. Does not own the figures
(`sidecar/observe/`), nor the drawing (`top.py`).

Invariants: sidecars are asked at the same time, so that one that does not answer delays the others'
figures by its own waits only (`client.py`); what one answers has the fields that are drawn, or
counts as no answer.
"""

import re
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, NotRequired, TypeAlias, TypedDict
from urllib.parse import urlsplit

import msgspec
from rich.table import Table
from rich.text import Text

from sidecar.cli.client import MESSAGE_BYTES_MAX, SidecarClient, client_of
from sidecar.cli.console import CommandError, Document, NoAnswer, Options, duration
from sidecar.cli.parser import PORT_MAX
from sidecar.sessions.model_names import printable

SORTS: Final = ("health", "hits", "name")
ASKED_TOGETHER_MAX: Final = 256
VERSION_CHARACTERS_MAX: Final = 20
CONTENTS_SECONDS: Final = 10.0
"""How old the sums of host memory may be: a sidecar walks over its chunks to make them."""
_DNS: Final = "dns:"
_ADDRESS: Final = re.compile(r"(http://)?(?P<place>(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5})/?")
_NO_VERSION: Final = "?"


_Number: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
_Factor: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9.]+x$")]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class WindowFigures(TypedDict):
    """Prompts of some seconds."""

    seconds: _Number
    cut: NotRequired[bool]
    tokens: dict[str, _Count]
    hit_share: _Number | None
    gpu_seconds_saved: _Number


_Windows = TypedDict("_Windows", {"10s": WindowFigures, "1min": WindowFigures, "1h": WindowFigures})


class _Last(TypedDict):
    last: _Windows


class _Host(TypedDict):
    used_bytes: _Count
    size_bytes: _Count
    chunks: _Count
    expected_hit_ratio: dict[_Factor, _Number]


class _Store(TypedDict):
    url: str
    state: str
    reads: str
    writes: str
    write_queue_bytes: _Count
    chunks: _Count


class _Tiers(TypedDict):
    host: _Host
    store: _Store | None


class _Problem(TypedDict):
    code: str
    reason: NotRequired[str]


class _Uncached(TypedDict):
    engine_id: str
    message: str


class _Realm(TypedDict):
    model: str | None
    world_size: int
    chunks_in_host: _Count
    chunks_in_store: _Count


class _Rates(TypedDict):
    bytes_per_second: dict[str, _Number]


class _Counters(TypedDict):
    chunks_evicted: _Count


class StatusFigures(TypedDict):
    """What is drawn of /status, which has more."""

    version: str
    name: str
    state: str
    ready: bool
    uptime_seconds: _Number
    problems: list[_Problem]
    uncached: list[_Uncached]
    prompts: _Last
    tiers: _Tiers
    rates: _Rates
    refused: dict[str, _Count]
    sessions: list[Any]
    counters: _Counters
    realms: list[_Realm]
    off: NotRequired[dict[str, str]]


class _Size(TypedDict):
    size_bytes: _Count


class _TenantSize(_Size):
    tenant: str


class _Namespace(TypedDict):
    ages: dict[str, _Size]
    depths: dict[str, _Size]
    tenants: list[_TenantSize]


class HostFigures(TypedDict):
    """What is drawn of /host."""

    namespaces: list[_Namespace]


class Seen(NamedTuple):
    """What one sidecar answered."""

    url: str
    status: Document | None
    problem: str = ""
    """Why it did not answer."""
    contents: Document | None = None
    """The document of /host, where it was asked for."""

    @property
    def version(self) -> str:
        """Its release."""
        return _NO_VERSION if self.status is None else str(self.status["version"])


@dataclass(slots=True)
class _Target:
    client: SidecarClient
    contents: Document | None = None
    contents_until: float = 0.0
    """On the monotonic clock."""

    def ask(self, *, contents: bool) -> Seen:
        """Its status, and its sums of host memory if they are wanted."""
        try:
            status = self._get("/status", StatusFigures)
            if contents and time.monotonic() >= self.contents_until:
                self.contents = self._get("/host", HostFigures)
                self.contents_until = time.monotonic() + CONTENTS_SECONDS
        except NoAnswer as error:
            return Seen(self.client.url, None, str(error))
        return Seen(self.client.url, status, contents=self.contents if contents else None)

    def _get(self, path: str, figures: object) -> Document:
        """A document that has these figures. Raises `NoAnswer`."""
        document = self.client.get(path)
        try:
            msgspec.convert(document, figures)
        except msgspec.ValidationError as error:
            # Another release, or something else that speaks JSON.
            version = printable(str(document.get("version")), VERSION_CHARACTERS_MAX)
            said = printable(str(error), MESSAGE_BYTES_MAX)
            raise NoAnswer(
                f"release {version} has not the figures of this one; update it ({said})"
            ) from error
        return document


class Fleet:
    """The sidecars that the options name."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._targets: dict[str | None, _Target] = {}
        self._listed: list[str] | None = None
        """The targets when they could be read last."""

    def ask(self, *, contents: bool = False) -> list[Seen]:
        """Their answers, in the order in which they are named; the `contents` of a single one.

        Raises `CommandError` if the targets could never be read.
        """
        urls: Sequence[str | None] = self._options.url or [None]
        lost: list[Seen] = []
        if self._options.targets is not None:
            try:
                # Again each time: nodes come and go.
                self._listed = targets(self._options.targets)
            except CommandError as error:
                if self._listed is None:
                    raise
                lost = [Seen(self._options.targets, None, str(error))]
            urls = self._listed
        for url in urls:
            if url not in self._targets:
                client = client_of(Options(**{**vars(self._options), "url": url}))
                from_list = self._options.targets is not None
                self._targets[url] = _Target(replace(client, from_list=from_list))
        asked = [self._targets[url] for url in urls]
        # The contents of several are not drawn.
        contents = contents and len(lost) + len(asked) == 1
        return lost + _ask_together(asked, contents=contents)


def _ask_together(asked: Sequence[_Target], *, contents: bool) -> list[Seen]:
    """In threads that do not keep the process from ending."""
    found: dict[int, Seen] = {}
    left = deque(range(len(asked)))

    def work() -> None:
        while True:
            try:
                number = left.popleft()
            except IndexError:
                return
            found[number] = asked[number].ask(contents=contents)

    threads = [
        threading.Thread(target=work, name="kvlake-ask", daemon=True)
        for _ in range(min(ASKED_TOGETHER_MAX, len(asked)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(asked))]


def targets(text: str) -> list[str]:
    """Addresses of the sidecars in a file, or behind a name in DNS. Raises `CommandError`."""
    if text.startswith(_DNS):
        return _resolved(text.removeprefix(_DNS))
    try:
        lines = Path(text).expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(
            f"--targets {text}: cannot be read: {error}; give a file with one HOST:PORT a line, or "
            f"{_DNS}NAME:PORT"
        ) from error
    found: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        if place := line.partition("#")[0].strip():
            url = _url_of(place)
            if url is None:
                raise CommandError(
                    f"--targets {text}, line {number}: {place[:80]!r} is no address; give "
                    f"HOST:PORT, PORT from 1 to {PORT_MAX}"
                )
            found[url] = None
    return list(found)


def _url_of(place: str) -> str | None:
    """None if it is no address."""
    match = _ADDRESS.fullmatch(place)
    if match is None:
        return None
    url = f"http://{match['place']}"
    try:
        return url if urlsplit(url).port else None
    except ValueError:
        # The port is too large, or what is in brackets is no IPv6 address.
        return None


def _resolved(place: str) -> list[str]:
    host, _, port = place.rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) <= PORT_MAX:
        raise CommandError(
            f"--targets {_DNS}{place[:80]}: give {_DNS}NAME:PORT, PORT from 1 to {PORT_MAX}"
        )
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        # UnicodeError: a label is empty or too long.
        raise CommandError(f"--targets {_DNS}{place}: {error}; is the name right?") from error
    # With IPv4 and IPv6 each sidecar has two addresses. The first one is of the preferred family.
    hosts = sorted({str(address[0]) for family, *_, address in found if family == found[0][0]})
    return [f"http://[{one}]:{port}" if ":" in one else f"http://{one}:{port}" for one in hosts]


def summary(seen: Sequence[Seen]) -> str:
    """How many are well, which releases they run, and what all of them save."""
    usual = usual_version(seen)
    bad = sum(_trouble(one, usual) > 0 for one in seen)
    versions = Counter(one.version for one in seen if one.status is not None)
    shown = ", ".join(f"{version} ({count})" for version, count in versions.most_common())
    saved = sum(
        per_second(one.status["prompts"]["last"]["1min"], "gpu_seconds_saved")
        for one in seen
        if one.status is not None
    )
    return (
        f"{len(seen)} sidecars, {bad} with problems; {saved:.1f} GPU seconds saved per second; "
        f"releases {shown or 'unknown'}"
    )


def _hits(status: Document) -> str:
    share = status["prompts"]["last"]["1min"]["hit_share"]
    return "-" if share is None else f"{100 * share:.0f}%"


def _saved(status: Document) -> str:
    return f"{per_second(status['prompts']['last']['1min'], 'gpu_seconds_saved'):.2f}"


def _tokens(status: Document) -> str:
    return f"{per_second(status['prompts']['last']['1min'], 'tokens'):,.0f}"


def _host(status: Document) -> str:
    host = status["tiers"]["host"]
    return f"{100 * host['used_bytes'] / max(1, host['size_bytes']):.0f}%"


def _stored(status: Document) -> str:
    store = status["tiers"]["store"]
    return "-" if store is None else f"{store['chunks']:,}"


def _models(status: Document) -> str:
    return ", ".join(sorted({str(realm["model"]) for realm in status["realms"]}))


_STATE: Final[Mapping[str, Callable[[Document], str]]] = {
    "state": lambda status: status["state"],
    "version": lambda status: status["version"],
}
_COLUMNS: Final[Mapping[str, Mapping[str, Callable[[Document], str]]]] = {
    "1": {**_STATE, "hits": _hits, "saved": _saved, "host": _host},
    "2": {
        **_STATE,
        "up": lambda status: duration(status["uptime_seconds"]),
        "clients": lambda status: str(len(status["sessions"])),
        "refused": lambda status: f"{sum(status['refused'].values()):,}",
    },
    "3": {
        "host": _host,
        "chunks": lambda status: f"{status['tiers']['host']['chunks']:,}",
        "evicted": lambda status: f"{status['counters']['chunks_evicted']:,}",
        "stored": _stored,
        "tokens/s": _tokens,
    },
}
"""By page: what stands in the columns between the address and the last one."""


def table_of(
    seen: Sequence[Seen], sort: str, page: str = "1", lines_max: int = sys.maxsize
) -> Table:
    """A line for each, in the order `sort`, in at most `lines_max` lines."""
    usual = usual_version(seen)
    table = Table(box=None, expand=True, pad_edge=False)
    columns = _COLUMNS[page]
    for title in ("sidecar", *columns):
        table.add_column(title, no_wrap=True)
    # In what is left of the line.
    last = "models" if page == "3" else "problems"
    table.add_column(last, no_wrap=True, overflow="ellipsis", ratio=1)
    rows = sorted(seen, key=lambda one: _order(one, sort, usual))
    shown = rows if len(rows) < lines_max else rows[: max(0, lines_max - 2)]
    for one in shown:
        name = Text(one.url.removeprefix("http://"))
        if one.status is None:
            table.add_row(name, "no answer", *[""] * (len(columns) - 1), Text(one.problem))
            continue
        problems = [problem["code"] for problem in one.status["problems"]]
        if one.version != usual:
            problems.append(f"others run {usual}")
        text = _models(one.status) if page == "3" else ", ".join(problems)
        cells = [Text(cell(one.status)) for cell in columns.values()]
        table.add_row(name, *cells, Text(text))
    if len(shown) < len(rows):
        table.add_row(f"and {len(rows) - len(shown)} more")
    return table


def usual_version(seen: Sequence[Seen]) -> str:
    """The release that most of them run."""
    versions = Counter(one.version for one in seen if one.status is not None)
    return versions.most_common(1)[0][0] if versions else _NO_VERSION


def per_second(window: Document, what: str) -> float:
    """A sum over a time, for each second of it."""
    count = window[what]
    total: float = sum(count.values()) if isinstance(count, dict) else count
    seconds: float = window["seconds"]
    return total / max(seconds, 1.0)


def _trouble(one: Seen, usual: str) -> int:
    """How bad it is: without an answer, not ready, with problems, or of another release."""
    if one.status is None:
        return 4
    if not one.status["ready"]:
        return 3
    return 2 if one.status["problems"] else int(one.version != usual)


def _order(one: Seen, by: str, usual: str) -> tuple[object, ...]:
    """Worst first; of those that are well, those with the lowest share of hits."""
    if by == "name":
        return (one.url,)
    status = one.status or {}
    share = status.get("prompts", {}).get("last", {}).get("1min", {}).get("hit_share")
    hits = 1.0 if share is None else share
    if by == "hits":
        return (one.status is None, hits, one.url)
    return (-_trouble(one, usual), -len(status.get("problems", [])), hits, one.url)
