"""Prometheus' own `promtool`, with which the tests fire the alarms of deploy/prometheus.

No package of PyPI or npm has it. Debian's does, so `make setup` takes the program out of that one,
into the environment: nothing is installed, and it takes no right. Where there is no Debian it is
looked for on PATH.
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

OWN: Final = Path(sys.prefix) / "promtool"
"""Where `make setup` puts it."""
PACKAGES: Final = ("prometheus", "promtool")
"""Package of Debian and Ubuntu; later releases have it in a package of its own."""
REMEDY: Final = (
    "promtool is not here, and the tests of the alarms need it. On Debian or Ubuntu `make setup` "
    "fetches it; elsewhere install Prometheus so that `promtool` is on PATH"
)


def find() -> Path | None:
    """Where it is, or None."""
    if OWN.is_file():
        return OWN
    found = shutil.which("promtool")
    return None if found is None else Path(found)


def fetch() -> None:
    """Take it out of Debian's package. Raises `OSError` or `CalledProcessError`."""
    with tempfile.TemporaryDirectory(dir=sys.prefix, prefix="promtool-") as name:
        folder = Path(name)
        for package in _packages(folder):
            _run("dpkg", "--extract", str(package), str(folder))
            program = folder / "usr" / "bin" / "promtool"
            if program.is_file():
                _run(str(program), "--version")
                program.replace(OWN)
                return
    raise FileNotFoundError(f"none of the packages {', '.join(PACKAGES)} has it")


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
    if find() is not None:
        return
    try:
        fetch()
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        sys.stderr.write(f"{REMEDY} ({said}).\n")


if __name__ == "__main__":
    main()
