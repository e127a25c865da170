"""`kvlake doctor`: what would keep a sidecar from starting here, or an engine from its cache.

Owns the order of the checks, how a running sidecar changes them, and the line of each. First come
those of this node: what `kvlake serve` checks when it starts, its store, NUMA and GPUs. A check of
a start is a function that `serve` calls, too, and its error is shown unchanged. Then comes what an
engine on this node would find: vLLM, kvlake's connector, and a sidecar. These read the metadata of
packages and the environment, and import neither vLLM nor torch. An engine's command is checked as
`kvlake run` does it (`sidecar/cli/run/engine_command.py`).

Invariant: nothing on the node is changed. No directory, file or lock is left, and a running sidecar
is not disturbed. An object is written to the store, and deleted, unless `store.write` is off; a
port is bound for a moment, and a GPU is used for a moment, with a context of its own.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import itertools
import logging
import mmap
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import anyio
import numpy as np

from sidecar.cli.client import SidecarClient, SidecarNotReady, url_of
from sidecar.cli.console import CommandError, NoAnswer, Options, load_config, say
from sidecar.cli.run import listener
from sidecar.cli.run.engine_command import (
    BLOCK_TOKENS_STEP,
    CONNECTOR,
    check_command,
    own_chunk_tokens,
    shown,
)
from sidecar.config.model import Config
from sidecar.data.host_pool import check_host, placement_of
from sidecar.errors import StartError
from sidecar.events.curve_socket import bound
from sidecar.exits import Exit
from sidecar.logs import LOGGER
from sidecar.observe import http
from sidecar.protocol import sockets_of
from sidecar.service import runtime_dir as runtimedir
from sidecar.service.start_checks import shortages
from sidecar.service.store_stack import open_store
from tiers.cuda.device import Device
from tiers.cuda.driver import Driver
from tiers.cuda.errors import CudaFailed
from tiers.errors import TierError
from tiers.pool.lock import lock_path_of, read_owner
from tiers.pool.numa import sample
from tiers.store.object_tier import PROBE_FOLDER

SUPPORTED: Final = ("0.31", "0.32", "0.33")
"""Releases of vLLM with which docs/reference/support.md says that kvlake works."""
DISTRIBUTION: Final = "kvlake"
PACKAGES: Final = ("connector", "sidecar", "tiers")
GROUP: Final = "vllm.general_plugins"
PLUGIN: Final = "connector.plugin:register"
STATUS_SECONDS_MAX: Final = 10.0
_INFLIGHT_BYTES: Final = 32 << 20
_SCRATCH_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was checked, what was found, and what to do unless it passed."""

    verdict: Literal["pass", "warn", "fail"]
    about: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.verdict:4}  {self.about}: {self.found}"
        return f"{line}; {self.remedy}" if self.remedy else line


passed: Final = functools.partial(Check, "pass")
warning: Final = functools.partial(Check, "warn")
failed: Final = functools.partial(Check, "fail")


def startup_findings(config: Config) -> list[Check]:
    """What would keep `serve` from starting, in its order, and what it would warn about."""
    where = str(config.file or "built-in defaults; --config FILE names another")
    runtime = config.runtime
    about = f"runtime.directory {runtime.directory}"
    found = [passed("configuration", where)]
    pid = 0
    has_ports: bool | None = False
    try:
        runtimedir.check(runtime)
    except runtimedir.AlreadyServed as error:
        pid = error.pid
        line, has_ports = _running(config, pid)
        found += [passed(about, "a sidecar has its sockets there"), line]
    except StartError as error:
        found.append(failed(about, str(error)))
    else:
        found.append(passed(about, "nobody else can replace what is in it"))
    found += _secrets(config)
    if has_ports:
        found.append(passed("ports", "they are those of the sidecar that runs"))
    else:
        own = "nothing to do if it is that of the sidecar that runs, which could not be asked"
        for one in _ports(config):
            unknown = has_ports is None and one.verdict == "fail"
            found.append(replace(one, verdict="warn", remedy=own) if unknown else one)
    about = f"host.directory {config.host.directory}"
    owner = read_owner(lock_path_of(config.pool_path))
    if pid and owner is not None and owner.pid == pid:
        found.append(passed(about, "the sidecar that runs has its pool there"))
    else:
        good = f"there is room for host.size={config.host.size}, and nobody has that pool"
        found.append(_checked(about, good, lambda: check_host(config)))
    short = shortages(config)
    found += [warning(one.about, one.found, one.remedy) for one in short]
    if not short:
        enough = "memory and open files are enough, and host.directory is in memory"
        found.append(passed("machine", enough))
    return found


def _checked(about: str, good: str, check: Callable[[], object]) -> Check:
    try:
        check()
    except StartError as error:
        return failed(about, str(error))
    return passed(about, good)


def _running(config: Config, pid: int) -> tuple[Check, bool | None]:
    """The state of the sidecar that has the runtime directory, and whether it has the ports.

    `pid` is 0 if it is not known. None: it could not be asked, so that its ports are not known.
    """
    about = f"sidecar {config.runtime.name}"
    text = f"it runs (pid {pid or 'unknown'})"
    try:
        url = url_of(config)
        status = SidecarClient(url, STATUS_SECONDS_MAX, config.http.secret_token()).get()
    except NoAnswer as error:
        return warning(about, f"{text}: {error}"), isinstance(error, SidecarNotReady) or None
    except StartError:
        # The line of that check says why.
        unasked = "without the token of http.token_file it cannot be asked how it is"
        return warning(about, f"{text}; {unasked}"), None
    if status.get("pid") != pid or status.get("name") != config.runtime.name:
        text += f", and {url} is that of another, {status.get('name')!r}"
        return warning(about, text, "was it started with another http.port?"), False
    engines = {one.get("engine_id") for one in status.get("sessions", [])}
    text += f": {status.get('state')}, {len(engines)} engines attached"
    problems = [one.get("reason", one.get("code")) for one in status.get("problems", [])]
    if problems:
        remedy = f"`kvlake status{config.option}` says more"
        return warning(about, f"{text}: {'; '.join(problems)}", remedy), True
    return passed(about, text), True


def _secrets(config: Config) -> list[Check]:
    http_file, events = config.http.token_file, config.events
    events_file = events.curve_secret_key_file if events.enabled else None
    return [
        _checked(f"{setting} {path}", "it is this user's alone", read)
        for setting, path, read in (
            ("http.token_file", http_file, config.http.secret_token),
            ("events.curve_secret_key_file", events_file, events.secret_key),
        )
        if path is not None
    ]


def _ports(config: Config) -> list[Check]:
    events = config.events
    endpoints = {"endpoint": events.endpoint, "replay_endpoint": events.replay_endpoint}
    with contextlib.ExitStack() as held:

        def listen() -> None:
            for one in http.listen_on(config.http.host, config.http.port):
                held.push(one)

        # All at the same time: two of them may be the same.
        found = [_checked(f"http.port {config.http.port}", "it is free", listen)]
        for name, endpoint in endpoints.items():
            if events.enabled and endpoint.startswith("tcp://"):
                field = f"events.{name}"
                bind = functools.partial(held.enter_context, bound(field, endpoint))
                found.append(_checked(f"{field} {endpoint}", "it is free", bind))
        return found


async def store_finding(config: Config) -> Check:
    """Whether the store can be opened and does what a sidecar needs of it."""
    if config.store is None:
        return passed("store", "none configured")
    try:
        store = open_store(config.store)
    except StartError as error:
        return failed("store", str(error))
    about = f"store {store.url}"
    try:
        if config.store.write == "off":
            # Read-only credentials are enough.
            await store.list(PROBE_FOLDER)
            return passed(about, "lists; store.write is off, so no object was written or read")
        if (await store.probe()).creates:
            return passed(about, "writes, reads, lists and deletes")
        found = (
            "it cannot create an object without replacing one: its catalog is not compacted, "
            "`kvlake gc` refuses it, and no bound on it holds"
        )
        return warning(about, found, "bound it with a lifecycle rule of the store's own")
    except TierError as error:
        return failed(about, str(error))
    finally:
        await store.close()


def numa_finding(config: Config, root: Path = Path("/")) -> Check:
    """Whether new pages of the pool are allocated on the right nodes."""
    about = "NUMA"
    try:
        placement = placement_of(config, root)
    except StartError as error:
        return failed(about, str(error))
    if placement.refused:
        remedy = "or start the sidecar with numactl --membind=N, N the nodes of its GPUs"
        return warning(about, placement.reason, remedy)
    if not placement.nodes:
        return passed(about, f"the pool is not placed: {placement.reason}")
    text = f"new pages of the pool go to node {', '.join(map(str, placement.nodes))}"
    if pages := _pages_of(config.pool_path):
        text += f"; of {sum(pages.values())} pages of the pool that is there, "
        text += ", ".join(f"{count} are on node {node}" for node, count in pages.items())
    if set(pages) <= set(placement.nodes):
        return passed(about, text)
    remedy = f"stop the sidecar and run `kvlake pool remove{config.option}`"
    return warning(about, text, remedy)


def _pages_of(path: Path) -> dict[int, int]:
    """Pages of a pool's file by node; empty if there is none, or it is not ours."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            return sample(np.frombuffer(mapping, dtype=np.uint8))
    except (OSError, ValueError, BufferError):
        return {}


# --- GPUs ----------------------------------------------------------------------------------------


def gpu_findings(config: Config) -> list[Check]:
    """Every check for engines on GPUs."""
    found = [_locked_memory(config)]
    # For comparison with the engine's: they cannot be checked from here.
    names = [Path(f"/proc/self/ns/{kind}").readlink().name for kind in ("ipc", "pid")]
    found.append(
        passed(
            "namespaces", f"{' '.join(names)}; GPU engines may be in others, with other process ids"
        )
    )
    try:
        driver = Driver()
        count = int(driver.call("cuDeviceGetCount"))
    except CudaFailed as error:
        return [*found, warning("GPUs", str(error), "nothing to do for engines on CPUs")]
    found.append(passed("GPUs", f"{count}, driver API {driver.call('cuDriverGetVersion')}"))
    for ordinal in range(count):
        try:
            found += _gpu(driver, ordinal)
        except CudaFailed as error:
            found.append(failed(f"GPU {ordinal}", str(error)))
    if count > 1:
        pairs = [
            (one, other)
            for one, other in itertools.permutations(range(count), 2)
            if not driver.call("cuDeviceCanAccessPeer", one, other)
        ]
        # For information: each worker's memory is mapped on its own device.
        found.append(passed("peer access", f"missing between {pairs or 'none'}"))
    return found


def _locked_memory(config: Config) -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit in (resource.RLIM_INFINITY, -1) or limit >= config.host.size:
        return passed("locked memory", "the limit allows all of host.size")
    return warning(
        "locked memory",
        f"the limit is {limit} bytes, and GPUs need all {config.host.size} of host.size pinned",
        "set ulimit -l unlimited (LimitMEMLOCK=infinity) if pinning fails; CPU engines need none",
    )


def _gpu(driver: Driver, ordinal: int) -> list[Check]:
    about = f"GPU {ordinal} ({driver.name(ordinal)})"
    if " MIG " in f" {driver.name(ordinal)} ":
        return [failed(about, "a slice (MIG) cannot be shared", "use a whole GPU")]
    stream_writes = driver.attribute("CAN_USE_64_BIT_STREAM_MEM_OPS", ordinal)
    exports = driver.attribute("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", ordinal)
    device = Device(
        driver,
        driver.uuid(ordinal),
        to_device_bytes_max=_INFLIGHT_BYTES,
        to_host_bytes_max=_INFLIGHT_BYTES,
    )
    newer = "use a newer driver or device"
    features = (
        ("fences written by streams", stream_writes, newer),
        ("memory exported as descriptors (VMM)", exports, newer),
        ("batch copies", device.calibration.batches, "use a driver of CUDA 12.8"),
    )
    try:
        return [
            *(
                passed(about, f"{what}: yes") if has else warning(about, f"{what}: no", remedy)
                for what, has, remedy in features
            ),
            _strided(device, about),
            _ipc(driver, about),
        ]
    finally:
        device.close()


def _strided(device: Device, about: str) -> Check:
    if not device.calibration.planes:
        reason = "; ".join(device.calibration.reasons)
        return warning(about, f"2D copies: no ({reason})", "nothing: batches do it")
    rates = "; ".join(
        f"{name} {', '.join(f'{width} {rate}' for width, rate in one.items())}"
        for name, one in device.calibration.describe_rates().items()
    )
    return passed(about, f"GB/s of runs at a distance, batch/2D: {rates}")


def _ipc(driver: Driver, about: str) -> Check:
    address = driver.call("cuMemAlloc", _SCRATCH_BYTES)
    try:
        driver.call("cuIpcGetMemHandle", address)
    except CudaFailed as error:
        return failed(about, f"IPC handles: {error}")
    finally:
        driver.call("cuMemFree", address)
    return passed(about, "IPC handles: yes")


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
        return f"a sidecar, pid {listener(Path(place)).pid or 'unknown'}"
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
    return passed("engine command", shown(command))


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
