"""`kvlake top`: whether the cache helps, is healthy, and what is in it, drawn again every second.

Does not own the figures (`sidecar/observe/`). With several sidecars, a line for each, worst first.

Invariants: a sidecar that does not answer is a line that says so, and delays no other one's figures
by more than its own waits (`client.py`); keys act at once, also while one does not answer; a
picture fits into its terminal.
"""

import os
import queue
import select
import signal
import sys
import termios
import textwrap
import threading
import time
import tty
from collections import Counter
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
from sidecar.cli.status import paused_ways
from sidecar.observe.benefit import meaning_of_loss
from tiers.sizes import approximate_size

SOURCES: Final = {"local": "engine", "host": "host memory", "store": "object store"}
COMPUTED: Final = "computed"
HELP, HEALTH, CONTENTS = "1", "2", "3"
"""Pages, by the key that shows them."""
LOST_SHOWN: Final = 3
TENANTS_SHOWN: Final = 4
KEYS_BYTES_MAX: Final = 1024
WIDTH: Final = 80
"""Without a terminal."""
_BAR: Final = 20
_FRAME: Final = 2
"""Lines, or columns of spaces and borders on each side, of a panel."""
_ROWS: Final = 7
"""Lines of the table of tokens."""


@dataclass(slots=True)
class View:
    """What the keys change."""

    page: str = HELP
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
        self.keys |= {
            page: partial(setattr, self, "page", page) for page in (HELP, HEALTH, CONTENTS)
        }


def main(options: Options) -> None:
    """Draw until `q`, or once."""
    if options.url and options.config:
        raise CommandError("--url and --config exclude each other: give one of them")
    fleet = Fleet(options)
    if options.once or options.json:
        seen = fleet.ask()
        documents = [{"url": one.url, "status": one.status, "problem": one.problem} for one in seen]
        show(documents, lambda _: _as_text(seen, View()), as_json=options.json)
        if all(one.status is None for one in seen):
            raise NoAnswer(seen[0].problem if seen else f"{options.targets} names no sidecar")
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or Console().is_dumb_terminal:
        raise CommandError("top draws on a terminal; use --once, or --json, without one")
    signal.signal(signal.SIGTERM, _end)
    # An error: the terminal is gone.
    with suppress(OSError, termios.error):
        _run(fleet, options.interval)


def _end(number: int, _frame: object) -> None:
    # As Ctrl-C does: the terminal gets its picture and settings back first.
    raise SystemExit(128 + number)


def _run(fleet: Fleet, interval: float) -> None:
    view = View()
    answers = queue.SimpleQueue[list[Seen] | Exception]()

    def ask() -> None:
        try:
            answers.put(fleet.ask(contents=view.page == CONTENTS))
        except Exception as error:
            answers.put(error)

    with _single_keys(), Live(screen=True, auto_refresh=False) as live:
        seen: list[Seen] | None = None
        due, asking = 0.0, False
        while not view.quit:
            if not (asking or view.paused) and time.monotonic() >= due:
                due, asking = time.monotonic() + interval, True
                # Not awaited if the user quits.
                threading.Thread(target=ask, name="kvlake-top", daemon=True).start()
            with suppress(queue.Empty):
                answer = answers.get_nowait()
                if isinstance(answer, Exception):
                    raise answer
                seen, asking = answer, False
            live.update(frame(seen, view, *live.console.size), refresh=True)
            if select.select([sys.stdin], [], [], min(interval, 0.1))[0]:
                # Not by `sys.stdin`, whose buffer `select` does not see.
                keys = os.read(sys.stdin.fileno(), KEYS_BYTES_MAX)
                # The terminal is gone.
                view.quit |= not keys
                # Arrows and other keys without a character are sequences that begin with Escape.
                for key in "" if keys.startswith(b"\x1b") else keys.decode(errors="replace"):
                    view.keys.get(key, lambda: None)()
                # Another page may need other figures.
                due = min(due, time.monotonic()) if view.page == CONTENTS else due


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
    console = Console(width=WIDTH, no_color=True)
    with console.capture() as captured:
        console.print(frame(seen, view))
    return captured.get()


def frame(
    seen: Sequence[Seen] | None, view: View, width: int = WIDTH, height: int = sys.maxsize
) -> Group:
    """One picture of at most `height` lines; None: nobody has answered yet."""
    footer = Text(
        f"1 help  2 health  3 contents  s sort: {SORTS[view.sort]}  p pause  q quit",
        no_wrap=True,
        overflow="ellipsis",
    )
    if view.paused:
        footer.append("  paused", "bold yellow")
    # Without the first line and the footer.
    room = height - 2
    if seen is None:
        return Group(Text("asking …", "bold"), footer)
    if len(seen) != 1:
        return Group(
            Text(summary(seen), "bold", overflow="ellipsis", no_wrap=True),
            table_of(seen, SORTS[view.sort], view.page, room),
            footer,
        )
    (one,) = seen
    if one.status is None:
        return Group(Panel(Text(one.problem), title=Text(one.url)), footer)
    status = one.status
    head = Text(
        f"kvlake {status['version']} '{status['name']}': {status['state']}, "
        f"up {duration(status['uptime_seconds'])}, {one.url}",
        "bold",
        no_wrap=True,
        overflow="ellipsis",
    )
    health = _health(status)
    if view.page == CONTENTS:
        return Group(head, _contents(status, one.contents, room), footer)
    if view.page == HEALTH:
        return Group(head, _health_panel(health, room - _FRAME), footer)
    memory = _memory(status)
    lost = _lost(status["prompts"]["last"]["1min"]["tokens"], width - 2 * _FRAME)
    # Lines for losses and health together, of which each gets half if it needs so much.
    room -= 2 * _FRAME + _ROWS + len(memory)
    health_max = max(room // 2, room - sum(map(len, lost)))
    lost_max = room - min(len(health), health_max)
    return Group(
        head, _help(status, lost, lost_max, memory), _health_panel(health, health_max), footer
    )


def _health_panel(lines: list[str], lines_max: int) -> Panel:
    text = Text("\n".join(_first(lines, lines_max)), no_wrap=True, overflow="ellipsis")
    return Panel(text, title="is it healthy?")


def _first(lines: list[str], lines_max: int) -> list[str]:
    """The first lines, with the number of the others."""
    if len(lines) <= lines_max:
        return lines
    shown = max(0, lines_max - 1)
    return [*lines[:shown], f"and {len(lines) - shown} more"]


def _help(status: Document, lost: list[list[str]], lost_max: int, memory: list[str]) -> Panel:
    windows: dict[str, Document] = status["prompts"]["last"]
    table = Table(box=None, expand=True, pad_edge=False)
    table.add_column("prompt tokens")
    for name, one in windows.items():
        table.add_column(duration(one["seconds"]) if one.get("cut") else name, justify="right")
    table.add_column("in the last minute", width=_BAR)
    minute = windows["1min"]["tokens"]
    for text in (*SOURCES.values(), COMPUTED):
        shares = [_share(one["tokens"], text) for one in windows.values()]
        bar = ProgressBar(total=1.0, completed=_share(minute, text), width=_BAR)
        table.add_row(text, *[f"{100 * share:.0f}%" for share in shares], bar)
    rates = [f"{per_second(one, 'tokens'):,.0f}" for one in windows.values()]
    table.add_row("tokens per second", *rates, "")
    saved = [f"{per_second(one, 'gpu_seconds_saved'):.2f}" for one in windows.values()]
    table.add_row("GPU seconds saved per second", *saved, "")
    lines: list[str] = []
    for loss in lost:
        # Whole sentences only.
        if len(lines) + len(loss) <= lost_max:
            lines += loss
    text = "\n".join([*lines, *memory])
    return Panel(Group(table, Text(text, no_wrap=True, overflow="ellipsis")), title="does it help?")


def _lost(minute: dict[str, int], width: int) -> list[list[str]]:
    """The lines of each loss, largest first."""
    total = _total(minute)
    lost = sorted(_computed_of(minute), key=lambda name: -minute[name])[:LOST_SHOWN]
    texts = [
        f"{100 * minute[name] / total:.0f}% {name}: {meaning_of_loss(name)}"
        for name in lost
        if minute[name]
    ]
    return [textwrap.wrap(text, width) for text in texts or ["nothing was lost in the last minute"]]


def _memory(status: Document) -> list[str]:
    """What host memory of another size would bring, in a line, if it is known."""
    host = status["tiers"]["host"]
    found = [
        f"{100 * ratio:.0f}% in {approximate_size(host['size_bytes'] * float(factor[:-1]))}"
        for factor, ratio in host["expected_hit_ratio"].items()
    ]
    return [f"what if (LRU): {', '.join(found)}"] if found else []


def _computed_of(tokens: dict[str, int]) -> tuple[str, ...]:
    return tuple(name for name in tokens if name not in (*SOURCES, "other", "tail"))


def _total(tokens: dict[str, int]) -> int:
    return sum(count for name, count in tokens.items() if name != "tail")


def _share(tokens: dict[str, int], text: str) -> float:
    """The part of the tokens that is in the line with this text."""
    names = {words: (name,) for name, words in SOURCES.items()}.get(text, _computed_of(tokens))
    total = _total(tokens)
    return sum(tokens.get(name, 0) for name in names) / total if total else 0.0


def _health(status: Document) -> list[str]:
    store = status["tiers"]["store"]
    lines = [f"{one['code']}: {one.get('reason', '')}" for one in status["problems"]]
    lines += [f"{one['engine_id']} is not cached: {one['message']}" for one in status["uncached"]]
    if store is not None:
        paused = paused_ways(store)
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
    clients = len(status["sessions"])
    lines.append(f"{clients} client{'s' * (clients != 1)}, {refused:,} requests refused by limits")
    return lines


def _contents(status: Document, contents: Document | None, room: int) -> Panel:
    host, store = status["tiers"]["host"], status["tiers"]["store"]
    used, size = host["used_bytes"], host["size_bytes"]
    evicted = f"{status['counters']['chunks_evicted']:,} evicted"
    occupied = f"{approximate_size(used)} of {approximate_size(size)}"
    lines = [f"host memory   {occupied}, {host['chunks']:,} chunks, {evicted}", *_memory(status)]
    lines += status.get("off", {}).values()
    if store is not None:
        lines.append(f"object store  {store['chunks']:,} chunks in {store['url']}")
    if contents is not None:
        lines += _shares_of(contents)
    table = Table(box=None, expand=True, pad_edge=False)
    for title in ("model", "ranks", "chunks in host", "in store"):
        table.add_column(title, justify="left" if title == "model" else "right", no_wrap=True)
    realms = status["realms"]
    # Without the heads of panel and table.
    rows_max = room - _FRAME - len(lines) - 1
    shown = realms if len(realms) <= rows_max else realms[: max(0, rows_max - 1)]
    for realm in shown:
        table.add_row(
            Text(str(realm["model"])),
            str(realm["world_size"]),
            f"{realm['chunks_in_host']:,}",
            f"{realm['chunks_in_store']:,}",
        )
    if len(shown) < len(realms):
        table.add_row(f"and {len(realms) - len(shown)} more")
    text = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
    return Panel(Group(text, table), title="what is in it?")


def _shares_of(contents: Document) -> list[str]:
    """Host memory by the time since its last use, by depth in the prompt, and by tenant."""
    sums = {name: Counter[str]() for name in ("ages", "depths", "tenants")}
    for namespace in contents["namespaces"]:
        for name in ("ages", "depths"):
            for one, share in namespace[name].items():
                sums[name][one] += share["size_bytes"]
        for tenant in namespace["tenants"]:
            sums["tenants"][tenant["tenant"]] += tenant["size_bytes"]
    titles = {"ages": "last used within", "depths": "tokens before, below"}
    lines = [
        f"{title}: {_percents(sums[name], list(sums[name]))}" for name, title in titles.items()
    ]
    largest = [name for name, _ in sums["tenants"].most_common(TENANTS_SHOWN)]
    return [*lines, f"largest tenants: {_percents(sums['tenants'], largest)}"]


def _percents(sums: Counter[str], names: Sequence[str]) -> str:
    total = sums.total()
    shares = [f"{name} {100 * sums[name] / total:.0f}%" for name in names if sums[name]]
    return ", ".join(shares) or "nothing"
