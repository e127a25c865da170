"""What kvlake stands on in vLLM: symbols, members, and the order of calls.

`USED` is what must be there and how it must look, `ORDER` (`order.py`) which calls must follow one
another. It goes through every method of the base classes of kvlake's: those of the connector's
base class in `base.py`, the others by what is `left` alone. `moved` compares all of it with a
manifest (`manifests/*.json`), which `python -m tests.contract` makes from vLLM's source.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tests.contract.base import BASE_CLASS, LEFT_ALONE, NOT_IN_EVERY_RELEASE, OVERRIDDEN
from tests.contract.engine import ENGINE
from tests.contract.offloading import OFFLOADING
from tests.contract.order import ORDER
from tests.contract.reading import Sources
from tests.contract.used import ATTRIBUTE, PROPERTY, Used

MANIFESTS: Final = Path(__file__).parent / "manifests"

USED: Final[dict[str, Used]] = ENGINE | OFFLOADING
"""All but the base class. A method that kvlake calls may get further parameters if they have
defaults."""


def record(sources: Sources) -> dict[str, Any]:
    """The manifest of a release: what it says of everything that is used here."""
    symbols: dict[str, dict[str, str] | None] = {BASE_CLASS: sources.members(BASE_CLASS)}
    for symbol, used in USED.items():
        members = sources.members(symbol)
        if members is not None:
            members = {name: given for name, given in members.items() if _kept(used, name, given)}
        symbols[symbol] = members
    calls = {symbol: sources.calls(symbol, names) for symbol, names in ORDER.items()}
    return {"version": sources.version, "symbols": symbols, "calls": calls}


def _kept(used: Used, name: str, given: str) -> bool:
    if name in used.members:
        return True
    private = name.startswith("_") and not given.startswith("abstract")
    return used.left is not None and given != ATTRIBUTE and not private


def recorded(version: str) -> dict[str, Any] | None:
    """The manifest of a release in `manifests/`, or None."""
    path = MANIFESTS / f"{version}.json"
    if not path.is_file():
        return None
    manifest: dict[str, Any] = json.loads(path.read_text())
    return manifest


def dump(manifest: dict[str, Any]) -> str:
    """A manifest as the text of its file."""
    return json.dumps(manifest, indent=1, sort_keys=True) + "\n"


def moved(manifest: dict[str, Any]) -> list[str]:
    """What is not where kvlake expects it, one line each; nothing where all is well."""
    version, symbols = manifest["version"], manifest["symbols"]
    lines = _moved_base(version, symbols.get(BASE_CLASS))
    for symbol, used in USED.items():
        if _before(version, used.since):
            continue
        members = symbols.get(symbol)
        if members is None:
            lines.append(f"{symbol} is gone")
            continue
        for name, expected in used.members.items():
            given = members.get(name)
            if given is None:
                if not _before(version, used.late.get(name, "0")):
                    lines.append(f"{_path(symbol, name)} is gone, expected: {expected}")
            elif not (_fits if used.left is None else _takes)(expected, given):
                lines.append(f"{_path(symbol, name)} is {given}, expected: {expected}")
        if used.left is not None:
            lines += _undecided(version, symbol, members, used)
    for symbol, names in ORDER.items():
        given = manifest["calls"].get(symbol)
        if given is None:
            lines.append(f"{symbol} is gone")
            continue
        if missing := _out_of_order(given.removeprefix("calls ").split(", "), names):
            lines.append(f"{symbol} does not call {missing} in the order of {', '.join(names)}")
    return lines


def _moved_base(version: str, members: dict[str, str] | None) -> list[str]:
    if members is None:
        return [f"{BASE_CLASS} is gone"]
    lines = []
    for name, expected in OVERRIDDEN.items():
        given = members.get(name)
        if given is None:
            if not _before(version, NOT_IN_EVERY_RELEASE.get(name, "0")):
                lines.append(f"{BASE_CLASS}.{name} is gone, expected: {expected}")
        elif given != expected:
            lines.append(f"{BASE_CLASS}.{name} is {given}, expected: {expected}")
    base = Used(OVERRIDDEN, late=NOT_IN_EVERY_RELEASE, left=LEFT_ALONE)
    return lines + _undecided(version, BASE_CLASS, members, base)


def _undecided(version: str, symbol: str, members: dict[str, str], used: Used) -> list[str]:
    """Methods that nothing is said of, and such as are gone, of what something is made from."""
    left = used.left or {}
    lines = [
        f"{symbol}.{name} is gone, which was left alone"
        for name in left
        if name not in members and not _before(version, used.late.get(name, "0"))
    ]
    return lines + [
        f"{symbol}.{name} is new: {given}; override it, or say where it is left alone why"
        for name, given in members.items()
        if name not in {*used.members, *left} and given != ATTRIBUTE
    ]


def _path(symbol: str, name: str) -> str:
    return f"{symbol}.{name}" if name else symbol


def _before(version: str, since: str) -> bool:
    return _numbers(version) < _numbers(since)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]


def _fits(expected: str, given: str) -> bool:
    """Whether what is called as `expected` says can be: more parameters, if they have defaults."""
    if expected == given or {expected, given} == {ATTRIBUTE, PROPERTY}:
        return True
    kind, _, parameters = expected.removesuffix(")").partition("(")
    given_kind, _, given_parameters = given.removesuffix(")").partition("(")
    if kind != given_kind or "(" not in expected:
        return False
    wanted = [part for part in parameters.split(", ") if part]
    have = [part for part in given_parameters.split(", ") if part]
    return have[: len(wanted)] == wanted and all(
        part.endswith("=") or part.startswith("*") for part in have[len(wanted) :]
    )


def _takes(expected: str, given: str) -> bool:
    """Whether a method of ours, as `expected` says, takes whatever `given` may be called with."""
    if expected == given or {expected, given} == {ATTRIBUTE, PROPERTY}:
        return True
    kind, _, parameters = expected.removesuffix(")").partition("(")
    given_kind, _, given_parameters = given.removesuffix(")").partition("(")
    if kind != given_kind or "(" not in expected:
        return False
    ours = [part for part in parameters.split(", ") if part]
    theirs = [part for part in given_parameters.split(", ") if part]
    return ours[: len(theirs)] == theirs and all(part.endswith("=") for part in ours[len(theirs) :])


def _out_of_order(calls: list[str], names: tuple[str, ...]) -> str:
    """The first of `names` that does not come in its turn; nothing where all do."""
    place = 0
    for name in names:
        if name not in calls[place:]:
            return name
        place = calls.index(name, place)
    return ""
