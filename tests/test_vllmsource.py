"""A release's Python on another's compiled parts: what is laid out, and of what."""

from __future__ import annotations

import importlib.metadata
import zipfile
from pathlib import Path

import pytest

from tests.vllmsource import lay_out

pytestmark = pytest.mark.promise("vllm-source")


def wheel_in(folder: Path, name: str = "vllm-9.1.0-cp38-abi3-linux_x86_64.whl") -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "here = 9\n")
        archive.writestr("vllm/_C.abi3.so", "for CUDA")
        archive.writestr("vllm-9.1.0.dist-info/METADATA", "Version: 9.1.0\n")
    return path


def test_its_python_lies_beside_the_compiled_parts_of_another(tmp_path: Path) -> None:
    binaries = tmp_path / "installed"
    (binaries / "deep").mkdir(parents=True)
    (binaries / "__init__.py").touch()
    (binaries / "_C.abi3.so").write_text("for CPUs")
    (binaries / "deep/part.so").touch()
    folder = tmp_path / "made"
    for _ in range(2):
        assert lay_out(folder, wheel_in(tmp_path), binaries) == "9.1.0+cpu"
        assert (folder / "vllm/__init__.py").read_text() == "here = 9\n"
        assert (folder / "vllm/_C.abi3.so").read_text() == "for CPUs"
        assert (folder / "vllm/deep/part.so").is_symlink()
        (found,) = importlib.metadata.distributions(path=[str(folder)])
        assert (found.metadata["Name"], found.version) == ("vllm", "9.1.0+cpu")


def test_another_file_is_refused_and_what_is_there_stays(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    text = tmp_path / "vllm-9.1.0-text.whl"
    text.write_text("no archive")
    for wheel in (text, wheel_in(tmp_path, "torch-2.0-py3-none-any.whl"), tmp_path / "none.whl"):
        with pytest.raises(ValueError, match=r"must be a wheel of vllm"):
            lay_out(folder, wheel, tmp_path)
    assert folder.is_dir()
