"""How the product is laid out: sizes of files and folders, and one class for one name.

Tests follow the rule of a file's size alone.

Import rules are contracts in `pyproject.toml`; `make check` verifies both.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import Final

from tests import places

LINES_MAX: Final = 500
MODULES_MAX: Final = 16
CORE_MODULES_MAX: Final = 21


def product() -> list[Path]:
    return sorted(
        path.relative_to(places.ROOT)
        for package in places.PACKAGES
        for path in (places.ROOT / package).rglob("*.py")
    )


def of_tests() -> list[Path]:
    return sorted(path.relative_to(places.ROOT) for path in (places.ROOT / "tests").rglob("*.py"))


def test_no_file_is_too_long() -> None:
    for path in [*product(), *of_tests()]:
        lines = len((places.ROOT / path).read_text().splitlines())
        assert lines <= LINES_MAX, f"{path} has {lines} lines: cut it"


def test_no_folder_has_too_many_modules() -> None:
    modules: defaultdict[str, int] = defaultdict(int)
    for path in product():
        modules[str(path.parent)] += path.name != "__init__.py"
    for folder, count in modules.items():
        allowed = CORE_MODULES_MAX if folder == "sidecar/core" else MODULES_MAX
        assert count <= allowed, f"{folder}/ has {count} modules: merge some, or make a package"


def test_a_public_class_name_stands_for_one_class() -> None:
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for path in product():
        for node in ast.parse((places.ROOT / path).read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path))
    twice = {name: found for name, found in homes.items() if len(found) > 1}
    assert not twice, f"give these classes names of their own: {twice}"
