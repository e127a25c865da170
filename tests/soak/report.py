"""What a soak leaves: a summary in words, a picture, and a document with its samples.

Owns how they are made and where they go. Does not own what they say. Invariant: they are small
enough to be committed, whatever the length of the run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests import places
from tests.soak import plot
from tests.soak.verdicts import Sample, Verdict

if TYPE_CHECKING:
    from tests.soak.run import Soak

PAGE: Final = places.page("soak.md")
PICTURE: Final = PAGE.with_suffix(".svg")
DOCUMENT: Final = places.ROOT / "benchmarks" / "results" / "soak.json"
BEGIN: Final = "<!-- what `make soak SOAK_ARGS=--docs` says begins -->\n"
END: Final = "<!-- what `make soak SOAK_ARGS=--docs` says ends -->\n"
POINTS_MAX: Final = 240
WINDOW_SECONDS: Final = 10.0


class Told:
    """A run that is over, and what was found."""

    def __init__(self, soak: Soak, found: Sequence[Verdict]) -> None:
        self._soak = soak
        self._found = found

    def summary(self) -> str:
        """The verdicts as a table of Markdown, below a line on the run."""
        soak, totals = self._soak, self._soak.clients.totals()
        kinds = sorted({name for _, name in soak.events})
        counts = ", ".join(f"{_count(soak.events, name)} {name}" for name in kinds)
        good = sum(one.good for one in self._found)
        share = totals["cached_tokens"] / max(totals["prompt_tokens"], 1)
        about = (
            f"{soak.seconds / 60:g} minutes, seed {soak.seed}: {totals['requests']:,.0f} requests, "
            f"{totals['prompt_tokens']:,.0f} prompt tokens, {share:.0%} of them cached; {counts}. "
            f"{good} of {len(self._found)} verdicts are good."
        )
        rows = [
            f"| {'good' if one.good else '**BAD**'} | {one.name} | {_cell(one.said)} |"
            for one in self._found
        ]
        return "\n".join([about, "", "| | verdict | |", "|---|---|---|", *rows]) + "\n"

    def picture(self) -> str:
        """The plot, with the windows' throughput and the measured rounds among the samples."""
        soak = self._soak
        samples = soak.samples[:: max(1, -(-len(soak.samples) // POINTS_MAX))]
        others = [*windows(soak.samples), *soak.rounds, *soak.stored]
        merged = sorted([*samples, *others], key=lambda one: one["time"])
        title = f"kvlake soak: {soak.seconds / 60:g} minutes, seed {soak.seed}"
        return plot.svg(merged, soak.events, title)

    def document(self) -> dict[str, object]:
        """Everything that was found, and samples of it."""
        soak = self._soak
        step = max(1, -(-len(soak.samples) // POINTS_MAX))
        return {
            "seconds": soak.seconds,
            "seed": soak.seed,
            "totals": soak.clients.totals(),
            "verdicts": [vars(one) for one in self._found],
            "events": [(round(at, 1), what) for at, what in soak.events],
            "rounds": columns(soak.rounds),
            "stored": columns(soak.stored),
            "samples": columns(soak.samples[::step]),
        }

    def write(self, folder: Path, *, docs: bool) -> list[Path]:
        """Keep them in `folder`, or with `docs` where the documentation shows them."""
        picture, document = folder / "soak.svg", folder / "soak.json"
        if docs:
            picture, document = PICTURE, DOCUMENT
        text = json.dumps(self.document(), separators=(",", ":"))
        document.write_text(text + "\n")
        picture.write_text(self.picture())
        if not docs:
            return [document, picture]
        shown = f"{self.summary()}\n![the plot of the run]({PICTURE.name})\n"
        PAGE.write_text(inserted(PAGE.read_text(), shown))
        return [document, picture, PAGE]


def inserted(page: str, summary: str) -> str:
    """`page` with `summary` in the place that is kept for it. Raises `ValueError` without one."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page must have the lines {BEGIN.strip()!r} and {END.strip()!r}")
    return f"{before}{begin}\n{summary}\n{end}{after}"


def windows(samples: Sequence[Sample]) -> list[Sample]:
    """What the load did by window; those in which it was held are left out."""
    made: list[Sample] = []
    start = 0
    for number, sample in enumerate(samples):
        part = samples[start : number + 1]
        if sample["time"] - part[0]["time"] < WINDOW_SECONDS:
            continue
        start = number
        if not any(one["held"] for one in part):
            made.append(_window(part[0], part[-1]))
    return made


def _window(first: Sample, last: Sample) -> Sample:
    seconds = last["time"] - first["time"]

    def made(name: str) -> float:
        return last[name] - first[name]

    return {
        "time": last["time"],
        "tokens_per_second": made("prompt_tokens") / seconds,
        "hit_ratio": made("cached_tokens") / max(made("prompt_tokens"), 1),
        "ttft_ms": made("ttft_ms_sum") / max(made("requests"), 1),
    }


def columns(samples: Sequence[Sample]) -> dict[str, object]:
    """Each quantity as one row of numbers, None for gaps; one number where it never changed."""
    names = sorted({name for sample in samples for name in sample})
    made: dict[str, object] = {}
    for name in names:
        values = [float(f"{one[name]:.5g}") if name in one else None for one in samples]
        made[name] = values[0] if len(set(values)) == 1 else values
    return made


def _count(events: Sequence[tuple[float, str]], name: str) -> int:
    return sum(what == name for _, what in events)


def _cell(said: str) -> str:
    return " ".join(said.replace("|", "/").split())
