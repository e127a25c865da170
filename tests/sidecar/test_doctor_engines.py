"""What `kvlake doctor` says of engines: what they would find here, and their command."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.cli import doctor
from sidecar.cli.doctor import Check
from sidecar.config.model import Config, loads
from sidecar.exits import Exit
from tests import places
from tests.sidecar.client import RunningSidecar, config_in
from tests.sidecar.commands import Commands, commands
from tests.sidecar.doctor_world import World, world

__all__ = ["commands", "world"]


def found(config: Config, *command: str) -> dict[str, Check]:
    return {one.about: one for one in doctor.engine_findings(config, command)}


def test_what_an_engine_would_find_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    lines = found(loads("{}"))
    assert {one.verdict for one in lines.values()} == {"pass"}, lines
    assert re.match(r"vllm\S* 0\.\d+", lines["vLLM"].found)
    assert "/run/kvlake/default/attach.sock (" in lines["engines"].found

    elsewhere = found(loads(f"runtime: {{directory: {tmp_path}}}"))["engines"]
    assert elsewhere.verdict == "warn"
    assert f"not in {tmp_path}/default/attach.sock" in elsewhere.found
    assert "`kvlake run` gives them the socket" in elsewhere.remedy


def test_a_sidecar_that_engines_find_first_is_told(
    monkeypatch: pytest.MonkeyPatch, short_directory: Path
) -> None:
    (short_directory / "own").mkdir()
    own = config_in(short_directory / "own")
    with RunningSidecar(config_in(short_directory)) as other:
        sockets = (str(other.path), str(own.runtime.attach_path))
        places.patch(monkeypatch, "sockets_of", lambda _: sockets)
        line = found(own)["engines"]
    assert line.verdict == "warn"
    assert f"{other.path} (a sidecar, pid {os.getpid()})" in line.found
    assert f": {other.path} comes before {own.runtime.attach_path}" in line.found
    line = found(own)["engines"]
    assert (line.verdict, "(none)" in line.found) == ("pass", True)


@pytest.mark.parametrize(
    ("given", "verdict", "remedy"),
    [
        ("kvlake", "pass", ""),
        ("lora_hf_hub_resolver,kvlake", "pass", ""),
        ("lora_hf_hub_resolver", "fail", "set it to lora_hf_hub_resolver,kvlake"),
        ("", "fail", "set it to kvlake, or unset it"),
    ],
)
def test_plugins_that_leave_kvlake_out_are_told(
    commands: Commands, given: str, verdict: str, remedy: str
) -> None:
    ended = commands.run("doctor", VLLM_PLUGINS=given)
    (line,) = [line for line in ended.lines(str(verdict)) if line.startswith("VLLM_PLUGINS")]
    assert remedy in line


def distribution(folder: Path, name: str, version: str, package: str) -> None:
    """Metadata of an installed distribution, and nothing of it."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{package}/__init__.py,,\n")


def test_another_package_of_the_name_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    distribution(tmp_path, "sidecar", "0.7", "sidecar")
    monkeypatch.syspath_prepend(str(tmp_path))
    line = found(loads("{}"))["packages"]
    assert line.verdict == "fail"
    assert "`sidecar` is also a package of sidecar" in line.found
    assert "pip uninstall sidecar" in line.remedy


def test_another_release_of_vllm_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.99.1")
    line = found(loads("{}"))["vLLM"]
    assert (line.verdict, "0.99.1" in line.found) == ("warn", True)
    assert "0.31, 0.32, 0.33" in line.remedy
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    lines = found(loads("{}"))
    assert "not installed in" in lines["vLLM"].found
    assert "VLLM_PLUGINS" not in lines


def test_kvlake_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    (line,) = [one for about, one in found(loads("{}")).items() if about.startswith("vLLM plugin")]
    assert line.verdict == "fail"
    assert "connector.vllm" in line.remedy


def test_the_releases_are_those_of_the_support_page() -> None:
    page = places.page("support.md").read_text()
    releases = re.findall(r"^\| (0\.\d+)\.\d+ \| works", page, re.MULTILINE)
    assert sorted(releases) == sorted(doctor.SUPPORTED)


@pytest.mark.parametrize(
    ("tokens", "command", "said"),
    [
        ("256", "vllm serve m --block-size 32", ""),
        ("100", "vllm serve m --block-size 32", "chunk.tokens=100 is not a multiple of --block-si"),
        ("100", "vllm serve m --block_size=32", "chunk.tokens=100 is not a multiple of --block-si"),
        ("100", "vllm serve m --block-size 50", ""),
        ("100", "vllm serve m --block-size some", ""),
        (None, "vllm serve m --block-size 48", ""),
        ("100", "vllm serve m", "chunk.tokens=100 is not a multiple of 16, as vLLM"),
        ("256", "python server.py", "does not name vllm"),
        ("256", "no-such-program vllm", "no such command; is vLLM installed"),
    ],
)
def test_an_engines_command_is_checked_as_run_does(
    commands: Commands, world: World, tokens: str | None, command: str, said: str
) -> None:
    binaries = world.directory / "bin"
    binaries.mkdir()
    for name in ("vllm", "python"):
        (binaries / name).write_text("#!/bin/sh\n")
        (binaries / name).chmod(0o755)
    file = str(world.config({"chunk": {"tokens": int(tokens)}} if tokens else {}))
    words = ["--config", file, "--", *command.split()]
    path = f"{binaries}:{os.environ['PATH']}"
    doctor = commands.run("doctor", *words, PATH=path)
    assert (doctor.code, doctor.err) == (Exit.NO if said else Exit.OK, ""), doctor
    if said:
        (line,) = doctor.lines("fail")
        run = commands.run("run", *words, PATH=path)
        assert said in line
        assert (run.code, run.err) == (Exit.USAGE, f"kvlake: {line.partition(': ')[2]}\n")
    else:
        assert f"engine command: {command}" in doctor.lines("pass")


def test_chunks_that_fit_no_block_are_told_without_a_command() -> None:
    assert found(loads("chunk: {tokens: 256}"))["chunk.tokens"].verdict == "pass"
    assert found(loads("chunk: {tokens: 100}"))["chunk.tokens"].verdict == "warn"


def test_neither_vllm_nor_torch_is_imported() -> None:
    script = (
        "import sys; from sidecar.cli import main; main(['doctor'])\n"
        "sys.exit(str({'vllm', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=places.ROOT
    )
    assert done.stderr == "set()\n"
