"""Prometheus and its `promtool`, with which the tests check what deploy/ has for them.

No package of PyPI or npm has them. Debian's does, so `make setup` takes the programs out of that
one, into the environment: nothing is installed, and it takes no right. Where there is no Debian
they are looked for on PATH.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAMS: Final = ("promtool", "prometheus")
PACKAGES: Final = ("prometheus", "promtool")
"""Packages of Debian and Ubuntu; later releases have promtool in a package of its own."""
REMEDY: Final = (
    "Prometheus and promtool are not here, and the tests of alarms and dashboards need them. On "
    "Debian or Ubuntu `make setup` fetches them; elsewhere install Prometheus so that both are on "
    "PATH"
)


def find(program: str = "promtool") -> Path | None:
    """Where `make setup` put a program, or where it is on PATH, or None."""
    own = Path(sys.prefix) / program
    if own.is_file():
        return own
    found = shutil.which(program)
    return None if found is None else Path(found)


def fetch() -> None:
    """Take both out of Debian's packages. Raises `OSError` or `CalledProcessError`."""
    with tempfile.TemporaryDirectory(dir=sys.prefix, prefix="promtool-") as name:
        folder = Path(name)
        for package in _packages(folder):
            _run("dpkg", "--extract", str(package), str(folder))
            for name in PROGRAMS:
                program = folder / "usr" / "bin" / name
                if program.is_file():
                    _run(str(program), "--version")
                    program.replace(Path(sys.prefix) / name)
            if all(map(find, PROGRAMS)):
                return
    raise FileNotFoundError(f"the packages {', '.join(PACKAGES)} do not have both")


def _packages(folder: Path) -> Iterator[Path]:
    """Files of packages that may have it, by the machine's lists of packages or new ones."""
    # As root apt would become another user, who may not write here. Lists of our own need no right.
    as_we_are = ("-o", "APT::Sandbox::User=root")
    own_lists = ("-o", f"Dir::State::lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache")
    for lists in ((), own_lists):
        if lists:
            for place in ("lists/partial", "cache/archives/partial"):
                (folder / place).mkdir(parents=True)
            _run("apt-get", "--quiet=2", *as_we_are, *lists, "update", cwd=folder)
        for name in PACKAGES:
            command = ("apt-get", "--quiet=2", *as_we_are, *lists, "download", name)
            done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
            if done.returncode == 0:
                yield from sorted(folder.glob(f"{name}_*.deb"))


def _run(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, cwd=cwd, capture_output=True, check=True, text=True)


def main() -> None:
    """For `make setup`: have it here if it can be had, and else say what lacks without it."""
    if all(map(find, PROGRAMS)):
        return
    try:
        fetch()
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        sys.stderr.write(f"{REMEDY} ({said}).\n")


if __name__ == "__main__":
    main()
