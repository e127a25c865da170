"""A name of the product is found where it is defined, and replaced wherever it is read."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import places

FILES = {
    "upper/__init__.py": "",
    "upper/reader.py": (
        "from typing import TYPE_CHECKING\n"
        "from lower.inner import JOBS_MAX\n"
        "from lower.limits import JOBS_MAX as LIMIT\n"
        "if TYPE_CHECKING:\n"
        "    from lower.first import Engine\n"
        "try:\n"
        "    import no_such_module\n"
        "except ImportError:\n"
        "    no_such_module = None\n"
    ),
    "upper/double.py": "def start(): ...\n",
    "upper/waiting.py": "from lower.limits import JOBS_MAX\n",
    "upper/late.py": "from lower.whole import JOBS_MAX\n",
    "lower/whole.py": "from lower.limits import *\n",
    "lower/__init__.py": "",
    "lower/limits.py": "JOBS_MAX = 8\nOTHERS_MAX: int = 8\n",
    "lower/first.py": (
        "class Engine:\n"
        "    limit = 1\n"
        "    def start(self): return 1\n"
        "    class Part:\n"
        "        def stop(self): ...\n"
    ),
    "lower/inner/__init__.py": "from lower.limits import JOBS_MAX\n",
    "lower/inner/second.py": "class Engine:\n    async def stop(self): ...\n",
    "lower/double.py": "def start(): ...\n",
    "docs/evidence/testing.md": "",
    "docs/guides/install.md": "",
    "docs/guides/README.md": "",
    "docs/adr/README.md": "",
    "pyproject.toml": '[project.scripts]\nkvlake = "upper.start.now:main"\n',
}


@pytest.fixture(autouse=True)
def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small product in the place of the real one."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(places, "ROOT", tmp_path)
    monkeypatch.setattr(places, "PACKAGES", ("upper", "lower"))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("upper", "lower")]:
        del sys.modules[name]


def imported(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("name", "module", "file"),
    [
        ("JOBS_MAX", "lower.limits", "lower/limits.py"),
        ("OTHERS_MAX", "lower.limits", "lower/limits.py"),
        ("Engine.limit", "lower.first", "lower/first.py"),
        ("Engine.stop", "lower.inner.second", "lower/inner/second.py"),
        ("Engine.Part.stop", "lower.first", "lower/first.py"),
        ("no_such_module", "upper.reader", "upper/reader.py"),
    ],
)
def test_a_name_is_found_where_it_is_defined(
    name: str, module: str, file: str, product: Path
) -> None:
    place = places.find(name)
    assert (place.module_name, place.path) == (module, product / file)
    assert not any(one.startswith(("upper.", "lower.")) for one in sys.modules)


def test_a_place_has_the_owner_and_the_attribute() -> None:
    place = places.find("Engine.Part.stop")
    engine = imported("lower.first").Engine
    assert place.module is imported("lower.first")
    assert (place.owner, place.attribute) == (engine.Part, "stop")
    assert place.value is engine.Part.stop
    constant = places.find("JOBS_MAX")
    assert (constant.owner, constant.value) == (imported("lower.limits"), 8)


def test_a_name_of_two_modules_is_an_error_that_lists_both() -> None:
    with pytest.raises(places.SeveralPlaces, match=r"lower\.first, lower\.inner\.second"):
        places.find("Engine")
    assert places.find("Engine", package="lower.inner").module_name == "lower.inner.second"
    with pytest.raises(places.SeveralPlaces, match=r"upper\.double, lower\.double"):
        places.find("start")
    assert places.find("start", package="upper").module_name == "upper.double"


@pytest.mark.parametrize("package", ["lower.first", "low", "docs", "nothing"])
def test_a_name_is_narrowed_by_a_package_and_not_by_a_file(package: str) -> None:
    with pytest.raises(ValueError, match="is not a package"):
        places.find("Engine", package=package)


def test_an_unknown_name_is_an_error_with_the_names_that_are_like_it() -> None:
    with pytest.raises(places.NoPlace, match=r"the product .*'JOB_MAX'; near it: JOBS_MAX"):
        places.find("JOB_MAX")
    with pytest.raises(places.NoPlace, match=r"upper does not define 'Engine\.stop'"):
        places.find("Engine.stop", package="upper")


def test_a_patch_is_seen_by_each_loaded_module_that_imported_the_name() -> None:
    limits, inner, reader = (
        imported(name) for name in ("lower.limits", "lower.inner", "upper.reader")
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        places.patch(monkeypatch, "JOBS_MAX", 2)
        assert (limits.JOBS_MAX, inner.JOBS_MAX, reader.JOBS_MAX, reader.LIMIT) == (2, 2, 2, 2)
        # The same object, by another name.
        assert limits.OTHERS_MAX == 8
    assert (limits.JOBS_MAX, inner.JOBS_MAX, reader.JOBS_MAX, reader.LIMIT) == (8, 8, 8, 8)
    assert "upper.waiting" not in sys.modules


def test_a_patch_is_seen_through_the_import_of_a_whole_module() -> None:
    limits, whole, late = map(imported, ("lower.limits", "lower.whole", "upper.late"))
    with places.patched("JOBS_MAX", 1):
        assert (limits.JOBS_MAX, whole.JOBS_MAX, late.JOBS_MAX) == (1, 1, 1)
    assert (limits.JOBS_MAX, whole.JOBS_MAX, late.JOBS_MAX) == (8, 8, 8)


def test_a_patch_of_a_method_is_one_of_the_class() -> None:
    engine = imported("lower.first").Engine()
    with places.patched("Engine.start", lambda _: 2):
        assert engine.start() == 2
    assert engine.start() == 1


def test_a_page_is_found_by_its_name(product: Path) -> None:
    assert places.page("testing.md") == product / "docs" / "evidence" / "testing.md"
    assert places.page("install.md") == product / "docs" / "guides" / "install.md"
    for name in ("README.md", "nothing.md"):
        with pytest.raises(LookupError, match="pages with the name"):
            places.page(name)


def test_the_program_is_that_of_the_console_script() -> None:
    assert places.program() == ("-m", "upper.start.now")
