"""`kvlake top`: whether the cache helps, is healthy, and what is in it, drawn again every second.

Does not own the figures (`sidecar/observe/`). With several sidecars, a line for each, worst first.

Invariant: a sidecar that does not answer is a line that says so, and delays no other one's figures
by more than the timeout.
"""

import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sidecar.cli.console import CommandError, Document, NoAnswer, Options, duration, show
from sidecar.cli.fleet import SORTS, Fleet, Seen, per_second, summary, table_of
from sidecar.observe.benefit import WINDOWS, meaning_of_loss, what_if
from tiers.sizes import approximate_size

SOURCES: Final = {"local": "engine", "host": "host memory", "store": "object store"}
COMPUTED: Final = "computed"
LOST_SHOWN: Final = 3
_BAR: Final = 20


@dataclass(slots=True)
class View:
    """What the keys change."""

    page: str = "1"
    sort: int = 0
    paused: bool = False
    quit: bool = False
    keys: dict[str, Callable[[], None]] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = {
            "q": lambda: setattr(self, "quit", True),
            "p": lambda: setattr(self, "paused", not self.paused),
            "s": lambda: setattr(self, "sort", (self.sort + 1) % len(SORTS)),
        }
        self.keys |= {page: partial(setattr, self, "page", page) for page in "123"}


def main(options: Options) -> None:
    """Draw until `q`, or once."""
    if options.url and options.config:
        raise CommandError("--url and --config exclude each other: give one of them")
    with Fleet(options) as fleet:
        if options.once or options.json:
            seen = fleet.ask()
            documents = [one._asdict() for one in seen]
            show(documents, lambda _: _as_text(seen, View()), as_json=options.json)
            if all(one.status is None for one in seen):
                raise NoAnswer(seen[0].problem if seen else f"{options.targets} names no sidecar")
            return
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise CommandError("top draws on a terminal; use --once, or --json, without one")
        # An error: the terminal is gone.
        with suppress(OSError, termios.error):
            _run(fleet.ask, options.interval)


def _run(ask: Callable[[], list[Seen]], interval: float) -> None:
    view = View()
    with _single_keys(), Live(screen=True, auto_refresh=False) as live:
        seen, drawn = ask(), 0.0
        while not view.quit:
            if not view.paused and time.monotonic() - drawn >= interval:
                seen, drawn = ask(), time.monotonic()
            live.update(frame(seen, view), refresh=True)
            if select.select([sys.stdin], [], [], min(interval, 0.25))[0]:
                key = sys.stdin.read(1)
                # The terminal is gone.
                view.quit |= not key
                view.keys.get(key, lambda: None)()


@contextmanager
def _single_keys() -> Generator[None]:
    """Keys arrive one by one, without being shown."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _as_text(seen: Sequence[Seen], view: View) -> str:
    console = Console(width=80, no_color=True)
    with console.capture() as captured:
        console.print(frame(seen, view))
    return captured.get()


def frame(seen: Sequence[Seen], view: View) -> Group:
    """One picture."""
    footer = Text(f"1 help  2 health  3 contents  s sort: {SORTS[view.sort]}  p pause  q quit")
    if view.paused:
        footer.append("  paused", "bold yellow")
    if len(seen) != 1:
        return Group(
            Text(summary(seen), "bold", overflow="ellipsis", no_wrap=True),
            table_of(seen, SORTS[view.sort]),
            footer,
        )
    (one,) = seen
    if one.status is None:
        return Group(Panel(Text(one.problem), title=Text(one.url)), footer)
    status = one.status
    head = Text(
        f"kvlake {status.get('version', '?')} '{status.get('name', '?')}': "
        f"{status.get('state', '?')}, up {duration(status.get('uptime_seconds', 0))}, {one.url}",
        "bold",
    )
    pages = {"1": (_help, _health), "2": (_health,), "3": (_contents,)}
    return Group(head, *(page(status) for page in pages[view.page]), footer)


def _help(status: Document) -> Panel:
    windows: dict[str, Document] = status["prompts"]["last"]
    table = Table(box=None, expand=True, pad_edge=False)
    table.add_column("prompt tokens")
    for name in WINDOWS:
        table.add_column(name, justify="right")
    table.add_column("in the last minute", width=_BAR)
    minute = windows["1min"]["tokens"]
    rows = {**{text: (name,) for name, text in SOURCES.items()}, COMPUTED: _computed_of(minute)}
    for text, names in rows.items():
        cells = [f"{100 * _share(windows[name]['tokens'], names):.0f}%" for name in WINDOWS]
        bar = ProgressBar(total=1.0, completed=_share(minute, names), width=_BAR)
        table.add_row(text, *cells, bar)
    rates = [f"{per_second(windows[name], 'tokens'):,.0f}" for name in WINDOWS]
    table.add_row("tokens per second", *rates, "")
    saved = [f"{per_second(windows[name], 'gpu_seconds_saved'):.2f}" for name in WINDOWS]
    table.add_row("GPU seconds saved per second", *saved, "")
    lost = sorted(_computed_of(minute), key=lambda name: -minute[name])
    lines = [
        f"{100 * _share(minute, (name,)):.0f}% {name}: " + meaning_of_loss(name)
        for name in lost[:LOST_SHOWN]
    ]
    text = "\n".join(lines) or "nothing was lost in the last minute"
    return Panel(Group(table, Text(text, overflow="ellipsis")), title="does it help?")


def _computed_of(tokens: dict[str, int]) -> tuple[str, ...]:
    return tuple(name for name in tokens if name not in (*SOURCES, "other", "tail"))


def _share(tokens: dict[str, int], names: Sequence[str]) -> float:
    total = sum(count for name, count in tokens.items() if name != "tail")
    return sum(tokens.get(name, 0) for name in names) / total if total else 0.0


def _health(status: Document) -> Panel:
    store = status["tiers"]["store"]
    lines = [f"{one['code']}: {one.get('reason', '')}" for one in status.get("problems", [])]
    lines += [f"{one['engine_id']} is not cached: {one['message']}" for one in status["uncached"]]
    if store is not None:
        paused = [way for way in ("reads", "writes") if store.get(way) != "closed"]
        lines.append(
            f"object store {store['state']}"
            + (f", {' and '.join(paused)} pause" if paused else "")
            + f", {approximate_size(store['write_queue_bytes'])} wait to be written"
        )
    rates = status["rates"]["bytes_per_second"]
    lines.append(
        "per second: " + ", ".join(f"{approximate_size(rate)} {way}" for way, rate in rates.items())
    )
    refused = sum(status["refused"].values())
    lines.append(f"{len(status['sessions'])} clients, {refused} requests refused by limits")
    return Panel(Text("\n".join(lines)), title="is it healthy?")


def _contents(status: Document) -> Panel:
    host, store = status["tiers"]["host"], status["tiers"]["store"]
    used, size = host["used_bytes"], host["size_bytes"]
    evicted = f"{status['counters']['chunks_evicted']:,} evicted"
    occupied = f"{approximate_size(used)} of {approximate_size(size)}"
    lines = [f"host memory   {occupied}, {host['chunks']:,} chunks, {evicted}"]
    if ratios := host["expected_hit_ratio"]:
        lines.append(what_if(ratios, size))
    if store is not None:
        lines.append(f"object store  {store['chunks']:,} chunks in {store['url']}")
    table = Table(box=None, expand=True, pad_edge=False)
    for title in ("model", "ranks", "chunks in host", "in store"):
        table.add_column(title, justify="left" if title == "model" else "right")
    for realm in status["realms"]:
        table.add_row(
            Text(str(realm["model"])),
            str(realm["world_size"]),
            f"{realm['chunks_in_host']:,}",
            f"{realm['chunks_in_store']:,}",
        )
    return Panel(Group(Text("\n".join(lines)), table), title="what is in it?")
