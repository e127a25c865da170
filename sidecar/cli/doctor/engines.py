"""What an engine on this node would find: vLLM, kvlake's connector, and a sidecar.

Owns the checks, which read packages' metadata and the environment, and import neither vLLM nor
torch. What `kvlake run` refuses about an engine's command is its own check
(`sidecar/cli/launch.py`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sidecar.cli.doctor.findings import Check, CheckResult
from sidecar.cli.joined import listener
from sidecar.cli.launch import CONNECTOR, LaunchError, check_command, own_chunk_tokens
from sidecar.protocol import sockets_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sidecar.config.model import Config

SUPPORTED: Final = ("0.31", "0.32", "0.33")
"""Releases of vLLM with which docs/reference/support.md says that kvlake works."""
DISTRIBUTION: Final = "kvlake"
PACKAGES: Final = ("connector", "sidecar", "tiers")
GROUP: Final = "vllm.general_plugins"
PLUGIN: Final = "connector.plugin:register"
BLOCK_TOKENS_LEAST: Final = 16
"""vLLM's block sizes are multiples of it."""


def engine_findings(config: Config, command: Sequence[str]) -> list[Check]:
    """Every check of the engine's side. `command` starts an engine, where one is given."""
    owners = owners_of((*PACKAGES, "vllm"))
    found = [_sockets(config), _names(owners)]
    if importlib.util.find_spec("vllm") is None:
        found.append(
            Check(
                CheckResult.WARN,
                "vLLM",
                f"it is not installed in {sys.prefix}",
                f"install kvlake where it is, and run `kvlake doctor{config.option}` there",
            )
        )
    else:
        found += [_vllm(owners["vllm"]), _entry_point(), _plugins(os.environ)]
    found.append(
        Check(CheckResult.PASS, "PYTHONHASHSEED", "not needed: the connector's keys are its own")
    )
    found.append(_command(config, command) if command else _chunks(config))
    return found


def owners_of(packages: Sequence[str]) -> dict[str, list[str]]:
    """The installed distributions that have each of these packages, by their metadata."""
    owners: dict[str, list[str]] = {package: [] for package in packages}
    for one in importlib.metadata.distributions():
        # As `packages_distributions` does, which takes a second to parse all of them.
        record = "\n" + (one.read_text("RECORD") or "")
        top = (one.read_text("top_level.txt") or "").split()
        for package, names in owners.items():
            has = package in top or f"\n{package}/__init__.py," in record
            if has and one.name not in names:
                names.append(one.name)
    return owners


def _sockets(config: Config) -> Check:
    """Whether an engine that is given no `socket` finds this configuration's sidecar."""
    about, own = "engines", str(config.runtime.attach_path)
    places = {place: _state(place) for place in sockets_of(None)}
    told = ", ".join(f"{place} ({state})" for place, state in places.items())
    told = f"without the option `socket` they look in {told}"
    remedy = f"`kvlake run{config.option}` gives them the socket {own}, or give it yourself"
    if own not in places:
        return Check(CheckResult.WARN, about, f"{told}, not in {own}", remedy)
    before = list(places)[: list(places).index(own)]
    if others := [place for place in before if places[place].startswith("a sidecar")]:
        return Check(CheckResult.WARN, about, f"{told}: {others[0]} comes before {own}", remedy)
    return Check(CheckResult.PASS, about, told)


def _state(place: str) -> str:
    try:
        return f"a sidecar, pid {listener(Path(place)) or 'unknown'}"
    except FileNotFoundError:
        return "none"
    except OSError as error:
        return f"none that answers: {error.strerror or error}"


def _names(owners: Mapping[str, Sequence[str]]) -> Check:
    about = "packages"
    for package in PACKAGES:
        others = sorted(set(owners[package]) - {DISTRIBUTION})
        if others:
            return Check(
                CheckResult.FAIL,
                about,
                f"`{package}` is also a package of {', '.join(others)}, and each may replace the "
                "other's files",
                f"pip uninstall {' '.join(others)}, then install kvlake again, or give each an "
                "environment of its own",
            )
    return Check(CheckResult.PASS, about, f"{', '.join(PACKAGES)} are kvlake's alone")


def _vllm(distributions: Sequence[str]) -> Check:
    if not distributions:
        told = "it is there, but not installed, so its release is not known"
        return Check(CheckResult.WARN, "vLLM", told, f"kvlake works with {', '.join(SUPPORTED)}")
    name = distributions[0]
    version = importlib.metadata.version(name)
    if ".".join(version.split(".")[:2]) in SUPPORTED:
        return Check(CheckResult.PASS, "vLLM", f"{name} {version}")
    told = f"{name} {version}, with which kvlake is not known to work"
    return Check(CheckResult.WARN, "vLLM", told, f"install one of {', '.join(SUPPORTED)}")


def _entry_point() -> Check:
    about = f"vLLM plugin {GROUP}"
    if any(one.value == PLUGIN for one in importlib.metadata.entry_points(group=GROUP)):
        return Check(CheckResult.PASS, about, f"it makes {CONNECTOR} known")
    told = f"vLLM does not know {CONNECTOR}: kvlake is not installed in {sys.prefix}"
    remedy = 'install it, or give "kv_connector_module_path": "connector.vllm"'
    return Check(CheckResult.FAIL, about, told, remedy)


def _plugins(environment: Mapping[str, str]) -> Check:
    given = environment.get("VLLM_PLUGINS")
    if given is None:
        return Check(CheckResult.PASS, "VLLM_PLUGINS", "not set, so vLLM loads every plugin")
    if DISTRIBUTION in given.split(","):
        return Check(CheckResult.PASS, "VLLM_PLUGINS", given)
    told = f"{given!r} leaves kvlake out, so that vLLM does not know {CONNECTOR}"
    better = ",".join([one for one in given.split(",") if one] + [DISTRIBUTION])
    return Check(CheckResult.FAIL, "VLLM_PLUGINS", told, f"set it to {better}, or unset it")


def _command(config: Config, command: Sequence[str]) -> Check:
    try:
        check_command(command, config)
    except LaunchError as error:
        return Check(CheckResult.FAIL, "engine command", str(error))
    return Check(CheckResult.PASS, "engine command", shlex.join(command))


def _chunks(config: Config) -> Check:
    tokens = own_chunk_tokens(config)
    if tokens is None:
        told = "256, or as many as whole blocks of the engine have"
        return Check(CheckResult.PASS, "chunk.tokens", told)
    if tokens % BLOCK_TOKENS_LEAST:
        return Check(
            CheckResult.WARN,
            "chunk.tokens",
            f"{tokens} is not a multiple of {BLOCK_TOKENS_LEAST}, so it is one of no block size",
            "leave it out, or choose a multiple of the engine's block size",
        )
    told = f"{tokens}; it must be a multiple of the engine's block size"
    asked = f"kvlake doctor{config.option} -- vllm serve ..."
    return Check(CheckResult.PASS, "chunk.tokens", told, f"`{asked}` checks it")
