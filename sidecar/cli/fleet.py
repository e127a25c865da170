"""Several sidecars at once: asking them all, and a line for each with the worst first.

Owns whom to ask, the order of the lines, and what they say. Does not own the figures
(`sidecar/observe/`), nor the drawing (`top.py`).

Invariant: sidecars are asked at the same time, so that one that does not answer delays the others'
figures by the timeout at most.
"""

import re
import socket
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple, Self

from rich.table import Table
from rich.text import Text

from sidecar.cli.client import SidecarClient, client_of
from sidecar.cli.console import CommandError, Document, NoAnswer, Options
from sidecar.sessions.model_names import printable

SORTS: Final = ("health", "hits", "name")
ASKED_TOGETHER_MAX: Final = 256
VERSION_CHARACTERS_MAX: Final = 20
_DNS: Final = "dns:"
_ADDRESS: Final = re.compile(r"(http://)?(?P<place>(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5})/?")
_NO_VERSION: Final = "?"


class Seen(NamedTuple):
    """What one sidecar answered."""

    url: str
    status: Document | None
    problem: str = ""
    """Why it did not answer."""

    @property
    def version(self) -> str:
        """Its release."""
        return _NO_VERSION if self.status is None else str(self.status.get("version", _NO_VERSION))


class Fleet:
    """The sidecars that the options name."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._threads: ThreadPoolExecutor | None = None
        self._clients: dict[str | None, SidecarClient] = {}
        self._listed: list[str] | None = None
        """The targets when they could be read last."""

    def __enter__(self) -> Self:
        self._threads = ThreadPoolExecutor(ASKED_TOGETHER_MAX, thread_name_prefix="kvlake-ask")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._threads is not None, "it was entered"
        self._threads.shutdown(cancel_futures=True)

    def ask(self) -> list[Seen]:
        """Their answers, in the order in which they are named.

        Raises `CommandError` if the targets could never be read.
        """
        assert self._threads is not None, "it was entered"
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
            if url not in self._clients:
                self._clients[url] = client_of(Options(**{**vars(self._options), "url": url}))
        return lost + list(self._threads.map(_ask, [self._clients[url] for url in urls]))


def _ask(client: SidecarClient) -> Seen:
    try:
        status = client.get("/status")
    except NoAnswer as error:
        return Seen(client.url, None, str(error))
    if not {"prompts", "tiers", "version", "state"} <= status.keys():
        # An earlier release, or something else that speaks JSON.
        version = printable(str(status.get("version")), VERSION_CHARACTERS_MAX)
        return Seen(client.url, None, f"release {version} has no figures for this; update it")
    return Seen(client.url, status)


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
            match = _ADDRESS.fullmatch(place)
            if match is None:
                raise CommandError(
                    f"--targets {text}, line {number}: {place[:80]!r} is no address; give HOST:PORT"
                )
            found[f"http://{match['place']}"] = None
    return list(found)


def _resolved(place: str) -> list[str]:
    host, _, port = place.rpartition(":")
    if not host or not re.fullmatch(r"\d{1,5}", port):
        raise CommandError(f"--targets {_DNS}{place}: give {_DNS}NAME:PORT")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise CommandError(f"--targets {_DNS}{place}: {error}; is the name right?") from error
    hosts = sorted({str(address[0]) for *_, address in found})
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


def table_of(seen: Sequence[Seen], sort: str) -> Table:
    """A line for each, in the order `sort`."""
    usual = usual_version(seen)
    table = Table(box=None, expand=True, pad_edge=False)
    for title in ("sidecar", "state", "version", "hits", "saved", "host"):
        table.add_column(title, no_wrap=True)
    # In what is left of the line.
    table.add_column("problems", no_wrap=True, overflow="ellipsis", ratio=1)
    for one in sorted(seen, key=lambda one: _order(one, sort, usual)):
        name = one.url.removeprefix("http://")
        if one.status is None:
            table.add_row(Text(name), "no answer", "", "", "", "", Text(one.problem))
            continue
        minute, host = one.status["prompts"]["last"]["1min"], one.status["tiers"]["host"]
        share = minute["hit_share"]
        problems = [problem["code"] for problem in one.status.get("problems", [])]
        if one.version != usual:
            problems.append(f"others run {usual}")
        table.add_row(
            Text(name),
            Text(one.status["state"]),
            Text(one.version),
            "-" if share is None else f"{100 * share:.0f}%",
            f"{per_second(minute, 'gpu_seconds_saved'):.2f}",
            f"{100 * host['used_bytes'] / max(1, host['size_bytes']):.0f}%",
            Text(", ".join(problems)),
        )
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
    if not one.status.get("ready"):
        return 3
    return 2 if one.status.get("problems") else int(one.version != usual)


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
