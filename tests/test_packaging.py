"""What is installed, under which names, and that the parts that must be light are."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import places

PROJECT = tomllib.loads((places.ROOT / "pyproject.toml").read_text())


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9_-]", line)[0].lower().replace("_", "-") for line in requirements}


@pytest.mark.parametrize("package", ["connector", "sidecar", "tiers"])
def test_the_generic_names_are_ours(package: str) -> None:
    # Other projects could install the same top-level name. An editable install is not in
    # `packages_distributions`, so the module itself is asked as well.
    owners = importlib.metadata.packages_distributions().get(package, [])
    assert set(owners) <= {"kvlake"}
    where = importlib.import_module(package).__file__
    assert where is not None
    assert Path(where) == places.ROOT / package / "__init__.py"


def test_only_the_three_packages_are_installed() -> None:
    assert PROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == [
        "connector", "connector.*", "sidecar", "sidecar.*", "tiers", "tiers.*",
    ]  # fmt: skip


def test_every_folder_with_code_is_a_package() -> None:
    for package in ("connector", "sidecar", "tiers"):
        for file in (places.ROOT / package).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), file


def test_the_distribution_is_what_it_says() -> None:
    about = importlib.metadata.metadata("kvlake")
    assert about["Name"] == "kvlake"
    assert about["License-Expression"] == "Apache-2.0"
    assert "Apache License" in (places.ROOT / "LICENSE").read_text()


def test_the_connector_needs_little_beside_vllm() -> None:
    assert names_of(PROJECT["project"]["dependencies"]) == {"msgspec", "numpy", "pyzmq"}


def test_the_extras_are_there() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"sidecar", "s3", "gcs", "azure", "demo", "fuzz", "dev"} <= set(extras)
    assert {"anyio", "pyarrow", "pydantic", "fsspec"} <= names_of(extras["sidecar"])


def test_the_console_script_and_the_plugin_are_registered() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts", name="kvlake")
    assert [script.value for script in scripts] == [PROJECT["project"]["scripts"]["kvlake"]]
    assert callable(scripts["kvlake"].load())
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvlake")
    assert [plugin.value for plugin in plugins] == [
        PROJECT["project"]["entry-points"]["vllm.general_plugins"]["kvlake"]
    ]
    (plugin,) = plugins
    assert callable(plugin.load())


def test_what_vllm_runs_in_every_process_imports_nothing_heavy() -> None:
    script = (
        "import connector.plugin, sidecar.protocol.codec, sys, json\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    heavy = {
        "vllm",
        "torch",
        "pyarrow",
        "pydantic",
        "anyio",
        "asyncio",
        "aiohttp",
        "fsspec",
        "yaml",
    }
    assert heavy.isdisjoint(json.loads(done.stdout))


def test_the_package_is_marked_as_typed() -> None:
    for package in ("connector", "sidecar", "tiers"):
        assert (places.ROOT / package / "py.typed").exists()
