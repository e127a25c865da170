"""Where a name of the product is defined, so that no test depends on a file of the product.

Owns finding the one module of `connector`, `sidecar` and `tiers` that defines a qualified name such
as `JOB_BYTES_MAX` or `SidecarFence.copying`, replacing a name for a test, and where the repository
and its documents are. It reads the sources and imports only what is asked for. A name that two
modules define is an error, unless the caller names the package: moving a file within its package
breaks no test.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import importlib
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final[tuple[str, ...]] = ("connector", "sidecar", "tiers")


class NoPlace(LookupError):
    """No module of the product defines the name."""


class SeveralPlaces(LookupError):
    """More than one module of the product defines the name."""


@dataclass(frozen=True, slots=True)
class Source:
    """The names that one file of the product defines, and those that it imports."""

    path: Path
    defined: frozenset[str]
    imported: dict[str, tuple[str, str]]
    """The module and the name in it, by the name here, for each `from module import name`.

    For `from module import *` the name in it is `*`, and the name here is `*module`.
    """


@dataclass(frozen=True, slots=True)
class Place:
    """A qualified name, the name of the module that defines it, and that module's file."""

    name: str
    module_name: str
    path: Path

    @property
    def module(self) -> Any:
        """The module, imported."""
        return importlib.import_module(self.module_name)

    @property
    def owner(self) -> Any:
        """The module or the class that has the attribute."""
        owner = self.module
        for part in self.name.split(".")[:-1]:
            owner = getattr(owner, part)
        return owner

    @property
    def attribute(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def value(self) -> Any:
        """What the name stands for now."""
        return getattr(self.owner, self.attribute)


def find(name: str, *, package: str | None = None) -> Place:
    """The place of a qualified name such as `Engine.handle`, in all of the product or a package.

    Raises:
        NoPlace: No module defines it. The message has the names that are most like it.
        SeveralPlaces: More than one module defines it; `package` may narrow it.
        ValueError: `package` is not a package of the product.
    """
    sources = _sources_of(package, name.partition(".")[0])
    found = [module for module, source in sources.items() if name in source.defined]
    if not found:
        every = _sources_of(package, "").values()
        known = sorted({known for source in every for known in source.defined})
        near = ", ".join(difflib.get_close_matches(name, known, 5)) or "nothing"
        raise NoPlace(f"{package or 'the product'} does not define {name!r}; near it: {near}")
    if len(found) > 1:
        raise SeveralPlaces(f"{name!r} is defined in {', '.join(found)}: name a package")
    return Place(name, found[0], sources[found[0]].path)


def patch(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, *, package: str | None = None
) -> None:
    """Replace what a qualified name stands for, for all of the product that is imported.

    A name at the top level of a module is also replaced in each module that has it by
    `from module import name`.
    """
    place = find(name, package=package)
    monkeypatch.setattr(place.owner, place.attribute, value)
    if "." not in name:
        for module, here in _readers(place):
            monkeypatch.setattr(module, here, value)


@contextlib.contextmanager
def patched(name: str, value: object, *, package: str | None = None) -> Iterator[None]:
    """As `patch`, while this lasts."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch(monkeypatch, name, value, package=package)
        yield


def replace(name: str, value: object, *, package: str | None = None) -> None:
    """As `patch`, for good: for a program that a test starts."""
    patch(pytest.MonkeyPatch(), name, value, package=package)


def page(name: str) -> Path:
    """The page of the documentation with this file name, wherever it is in `docs/`."""
    found = sorted((ROOT / "docs").rglob(name))
    if len(found) != 1:
        raise LookupError(f"docs/ has {len(found)} pages with the name {name!r}, not one")
    return found[0]


def program() -> tuple[str, ...]:
    """The arguments for Python that start `kvlake`, installed or not."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    return "-m", scripts["kvlake"].partition(":")[0]


def _readers(place: Place) -> list[tuple[Any, str]]:
    """The imported modules that have the name from another module, with their name for it."""
    sources = _sources(place.name)
    return [
        (sys.modules[module], here)
        for module, source in sources.items()
        if module in sys.modules
        for here in (source.imported.keys() | {place.name}) - source.defined
        if here in vars(sys.modules[module])
        and _origin(sources, module, here) == (place.module_name, place.name)
    ]


def _origin(sources: dict[str, Source], module: str, name: str) -> tuple[str, str] | None:
    """The module and the name in it where a name that `module` has comes from."""
    source = sources.get(module)
    if source is None or name in source.defined:
        return None if source is None else (module, name)
    if (imported := source.imported.get(name)) is not None:
        return _origin(sources, *imported)
    whole = [other for other, what in source.imported.values() if what == "*"]
    origins = (_origin(sources, other, name) for other in whole)
    return next((origin for origin in origins if origin is not None), None)


def _sources_of(package: str | None, word: str) -> dict[str, Source]:
    if package is None:
        return _sources(word)
    if not (ROOT / Path(*package.split("."), "__init__.py")).is_file():
        raise ValueError(f"{package!r} is not a package of the product")
    return {
        module: source
        for module, source in _sources(word).items()
        if f"{module}.".startswith(f"{package}.")
    }


def _sources(word: str) -> dict[str, Source]:
    """What the modules of the product whose text has this word define, by the module's name.

    To parse them all takes a second, which is long for a program that a test starts.
    """
    texts = _texts(ROOT, PACKAGES).items()
    return {
        _module_name(path.relative_to(ROOT)): _source(path, text)
        for path, text in texts
        if word in text or "import *" in text
    }


@functools.cache
def _texts(root: Path, packages: tuple[str, ...]) -> dict[Path, str]:
    paths = [path for package in packages for path in sorted((root / package).rglob("*.py"))]
    return {path: path.read_text() for path in paths}


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _source(path: Path, text: str) -> Source:
    tree = ast.parse(text)
    return Source(path, frozenset(_defined(tree.body)), dict(_imported(tree.body)))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or a class, with those below its `if`, `try` and `with`."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _statements([
                below for below in ast.iter_child_nodes(statement) if isinstance(below, ast.stmt)
            ])  # fmt: skip
        for handler in getattr(statement, "handlers", ()):
            yield from _statements(handler.body)


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    """The qualified names that these statements define."""
    for statement in _statements(body):
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
                yield from (f"{name}.{member}" for member in _defined(statement.body))
            case ast.Assign(targets=targets):
                yield from (
                    node.id
                    for target in targets
                    for node in ast.walk(target)
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                )
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def _imported(body: list[ast.stmt]) -> Iterator[tuple[str, tuple[str, str]]]:
    for statement in _statements(body):
        if isinstance(statement, ast.ImportFrom):
            module = statement.module or ""
            for alias in statement.names:
                here = alias.asname or alias.name
                yield f"*{module}" if here == "*" else here, (module, alias.name)
