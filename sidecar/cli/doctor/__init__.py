"""`kvlake doctor`: what would keep a sidecar from starting here, or an engine from its cache.

Owns the order of the checks, and those of what an engine on this node would find: vLLM, kvlake's
connector, and a sidecar. They read the metadata of packages and the environment, and import neither
vLLM nor torch. An engine's command is checked as `kvlake run` does it
(`sidecar/cli/run/engine_command.py`). The checks of the node are in `node.py`.

Invariant: nothing on the node is changed. No directory, file or lock is left, and a running sidecar
is not disturbed. An object is written to the store, and deleted; a port is bound for a moment.
"""

import importlib.metadata
import importlib.util
import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import anyio

from sidecar.cli.console import CommandError, Options, load_config, say
from sidecar.cli.doctor.node import (
    Check,
    failed,
    gpu_findings,
    numa_finding,
    passed,
    startup_findings,
    store_finding,
    warning,
)
from sidecar.cli.run import listener
from sidecar.cli.run.engine_command import (
    BLOCK_TOKENS_STEP,
    CONNECTOR,
    check_command,
    own_chunk_tokens,
)
from sidecar.config.model import Config
from sidecar.exits import Exit
from sidecar.logs import LOGGER
from sidecar.protocol import sockets_of

SUPPORTED: Final = ("0.31", "0.32", "0.33")
"""Releases of vLLM with which docs/reference/support.md says that kvlake works."""
DISTRIBUTION: Final = "kvlake"
PACKAGES: Final = ("connector", "sidecar", "tiers")
GROUP: Final = "vllm.general_plugins"
PLUGIN: Final = "connector.plugin:register"


def main(options: Options) -> Exit:
    """Print every check; the answer is a no if any of them failed."""
    # The checks say the same as the log.
    logging.getLogger(LOGGER).setLevel(logging.ERROR)
    config = load_config(options.config)
    found = [
        *startup_findings(config),
        anyio.run(store_finding, config),
        numa_finding(config),
        *gpu_findings(config),
        *engine_findings(config, options.command),
    ]
    for one in found:
        say(str(one))
    return Exit.NO if any(one.verdict == "fail" for one in found) else Exit.OK


def engine_findings(config: Config, command: Sequence[str]) -> list[Check]:
    """Every check of the engine's side. `command` starts an engine, where one is given."""
    owners = owners_of((*PACKAGES, "vllm"))
    found = [_sockets(config), _names(owners)]
    if importlib.util.find_spec("vllm") is None:
        found.append(
            warning(
                "vLLM",
                f"it is not installed in {sys.prefix}",
                f"install kvlake where it is, and run `kvlake doctor{config.option}` there",
            )
        )
    else:
        found += [_vllm(owners["vllm"]), _entry_point(), _plugins(os.environ)]
    found.append(passed("PYTHONHASHSEED", "not needed: the connector's keys are its own"))
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
    """Whether an engine without the option `socket` finds this configuration's sidecar."""
    about, own = "engines", str(config.runtime.attach_path)
    places = {place: _state(place) for place in sockets_of(None)}
    states = ", ".join(f"{place} ({state})" for place, state in places.items())
    text = f"without the option `socket` they look in {states}"
    remedy = f"`kvlake run{config.option}` gives them the socket {own}, or give it yourself"
    if own not in places:
        return warning(about, f"{text}, not in {own}", remedy)
    before = list(places)[: list(places).index(own)]
    if others := [place for place in before if places[place].startswith("a sidecar")]:
        return warning(about, f"{text}: {others[0]} comes before {own}", remedy)
    return passed(about, text)


def _state(place: str) -> str:
    try:
        return f"a sidecar, pid {listener(Path(place)) or 'unknown'}"
    except FileNotFoundError:
        return "none"
    except OSError as error:
        return f"none that answers: {error.strerror or error}"


def _names(owners: Mapping[str, Sequence[str]]) -> Check:
    for package in PACKAGES:
        if others := sorted(set(owners[package]) - {DISTRIBUTION}):
            return failed(
                "packages",
                f"`{package}` is also a package of {', '.join(others)}, and each may replace the "
                "other's files",
                f"pip uninstall {' '.join(others)}, then install kvlake again, or give each an "
                "environment of its own",
            )
    return passed("packages", f"{', '.join(PACKAGES)} are kvlake's alone")


def _vllm(distributions: Sequence[str]) -> Check:
    if not distributions:
        text = "it is there, but not installed, so its release is not known"
        return warning("vLLM", text, f"kvlake works with {', '.join(SUPPORTED)}")
    name = distributions[0]
    version = importlib.metadata.version(name)
    if ".".join(version.split(".")[:2]) in SUPPORTED:
        return passed("vLLM", f"{name} {version}")
    text = f"{name} {version}, with which kvlake is not known to work"
    return warning("vLLM", text, f"install one of {', '.join(SUPPORTED)}")


def _entry_point() -> Check:
    about = f"vLLM plugin {GROUP}"
    if any(one.value == PLUGIN for one in importlib.metadata.entry_points(group=GROUP)):
        return passed(about, f"it makes {CONNECTOR} known")
    text = f"vLLM does not know {CONNECTOR}: kvlake is not installed in {sys.prefix}"
    remedy = 'install it, or give "kv_connector_module_path": "connector.vllm"'
    return failed(about, text, remedy)


def _plugins(environment: Mapping[str, str]) -> Check:
    given = environment.get("VLLM_PLUGINS")
    if given is None:
        return passed("VLLM_PLUGINS", "not set, so vLLM loads every plugin")
    if DISTRIBUTION in given.split(","):
        return passed("VLLM_PLUGINS", given)
    text = f"{given!r} leaves kvlake out, so that vLLM does not know {CONNECTOR}"
    better = ",".join([one for one in given.split(",") if one] + [DISTRIBUTION])
    return failed("VLLM_PLUGINS", text, f"set it to {better}, or unset it")


def _command(config: Config, command: Sequence[str]) -> Check:
    try:
        check_command(command, config)
    except CommandError as error:
        return failed("engine command", str(error))
    return passed("engine command", shlex.join(command))


def _chunks(config: Config) -> Check:
    about, tokens = "chunk.tokens", own_chunk_tokens(config)
    if tokens is None:
        return passed(about, "256, or as many as whole blocks of the engine have")
    if tokens % BLOCK_TOKENS_STEP:
        return warning(
            about,
            f"{tokens} is not a multiple of {BLOCK_TOKENS_STEP}, so it is one of no block size",
            "leave it out, or choose a multiple of the engine's block size",
        )
    text = f"{tokens}; it must be a multiple of the engine's block size"
    return passed(about, text, f"`kvlake doctor{config.option} -- vllm serve ...` checks it")
