"""The checks that `kvlake serve` makes when it starts, made without starting.

Owns their list, and how a running sidecar changes them. Each check is a function that `serve`
calls, too, and its error is shown unchanged.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sidecar.cli.client import SidecarClient, SidecarNotReady, url_of
from sidecar.cli.console import NoAnswer
from sidecar.cli.doctor.findings import Check, failed, passed, warning
from sidecar.data.host_pool import check_host, placement_of
from sidecar.errors import StartError
from sidecar.events.curve_socket import bound
from sidecar.observe import http
from sidecar.service import runtime_dir as runtimedir
from sidecar.service.start_checks import events_key, http_token, shortages
from sidecar.service.store_stack import open_store
from tiers.errors import TierError
from tiers.pool.lock import lock_path_of, read_owner
from tiers.pool.numa import sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.config.model import Config

STATUS_SECONDS_MAX: Final = 10.0


@dataclass(frozen=True, slots=True)
class Running:
    """A sidecar that has this configuration's runtime directory."""

    pid: int
    """0 if it is not known."""
    has_ports: bool
    """Whether it answers at this configuration's HTTP address."""


def startup_findings(config: Config) -> list[Check]:
    """What would keep `serve` from starting, in its order, and what it would warn about."""
    where = str(config.file or "built-in defaults; --config FILE names another")
    found = [passed("configuration", where)]
    running = _directory(config, found)
    found += _secrets(config)
    if running is not None and running.has_ports:
        found.append(passed("ports", "they are those of the sidecar that runs"))
    else:
        found += _ports(config)
    found.append(_host(config, running))
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


def _directory(config: Config, found: list[Check]) -> Running | None:
    """Check the runtime directory; the sidecar that has it, if one runs."""
    runtime = config.runtime
    about = f"runtime.directory {runtime.directory}"
    try:
        runtimedir.check(
            runtime.directory,
            runtime.name,
            shared=bool(runtime.allow_uids),
            strict_parents=runtime.strict_parents,
        )
    except runtimedir.AlreadyServed as error:
        found.append(passed(about, "a sidecar has its sockets there"))
        running, line = _running(config, error.pid)
        found.append(line)
        return running
    except StartError as error:
        found.append(failed(about, str(error)))
    else:
        found.append(passed(about, "nobody else can replace what is in it"))
    return None


def _running(config: Config, pid: int) -> tuple[Running, Check]:
    """Ask the sidecar that has the runtime directory for its status."""
    about = f"sidecar {config.runtime.name}"
    runs = f"it runs (pid {pid or 'unknown'})"
    try:
        url = url_of(config)
        status = SidecarClient(url, STATUS_SECONDS_MAX, http_token(config)).get()
    except SidecarNotReady as error:
        return Running(pid, has_ports=True), warning(about, f"{runs}: {error}")
    except NoAnswer as error:
        return Running(pid, has_ports=False), warning(about, f"{runs}: {error}")
    except StartError:
        # The line of that check says why.
        text = f"{runs}; without the token of http.token_file it cannot be asked how it is"
        return Running(pid, has_ports=False), warning(about, text)
    if status.get("pid") != pid or status.get("name") != config.runtime.name:
        text = f"{runs}, and {url} is that of another, {status.get('name')!r}"
        return Running(pid, has_ports=False), warning(
            about, text, "was it started with another http.port?"
        )
    return Running(pid, has_ports=True), _health(config, about, runs, status)


def _health(config: Config, about: str, runs: str, status: dict[str, Any]) -> Check:
    engines = {one.get("engine_id") for one in status.get("sessions", [])}
    text = f"{runs}: {status.get('state')}, {len(engines)} engines attached"
    problems = [one.get("reason", one.get("code")) for one in status.get("problems", [])]
    if problems:
        remedy = f"`kvlake status{config.option}` says more"
        return warning(about, f"{text}: {'; '.join(problems)}", remedy)
    return passed(about, text)


def _secrets(config: Config) -> list[Check]:
    used = {
        "http.token_file": (config.http.token_file, http_token),
        "events.curve_secret_key_file": (
            config.events.curve_secret_key_file if config.events.enabled else None,
            events_key,
        ),
    }
    return [
        _checked(f"{setting} {path}", "it is this user's alone", lambda: read(config))  # noqa: B023 (called at once)
        for setting, (path, read) in used.items()
        if path is not None
    ]


def _ports(config: Config) -> list[Check]:
    events = config.events
    endpoints: dict[str, str] = {}
    if events.enabled:
        endpoints["events.endpoint"] = events.endpoint
        endpoints["events.replay_endpoint"] = events.replay_endpoint
    with contextlib.ExitStack() as held:

        def listen() -> None:
            for one in http.listen_on(config.http.host, config.http.port):
                held.push(one)

        # All at the same time: two of them may be the same.
        found = [_checked(f"http.port {config.http.port}", "it is free", listen)]
        for field, endpoint in endpoints.items():
            if endpoint.startswith("tcp://"):
                bind = bound(field, endpoint)
                found.append(
                    _checked(f"{field} {endpoint}", "it is free", lambda: held.enter_context(bind))  # noqa: B023 (called at once)
                )
        return found


def _host(config: Config, running: Running | None) -> Check:
    about = f"host.directory {config.host.directory}"
    owner = read_owner(lock_path_of(config.pool_path))
    if running is not None and running.pid and owner is not None and owner.pid == running.pid:
        return passed(about, "the sidecar that runs has its pool there")
    good = f"there is room for host.size={config.host.size}, and nobody has that pool"
    return _checked(about, good, lambda: check_host(config))


async def store_finding(config: Config) -> Check:
    """Whether the store can be opened and does what a sidecar needs."""
    if config.store is None:
        return passed("store", "none configured")
    try:
        store = open_store(config.store)
    except StartError as error:
        return failed("store", str(error))
    try:
        await store.probe()
    except TierError as error:
        return failed(f"store {store.url}", str(error))
    finally:
        await store.close()
    return passed(f"store {store.url}", "writes, reads, lists and deletes")


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
    text = f"new pages of the pool go to {_named(placement.nodes)}"
    pages = _pages_of(config.pool_path)
    if not pages:
        return passed(about, text)
    text += f"; of {sum(pages.values())} pages of the pool that is there, " + ", ".join(
        f"{count} are on {_named((node,))}" for node, count in pages.items()
    )
    if set(pages) <= set(placement.nodes):
        return passed(about, text)
    remedy = f"stop the sidecar and run `kvlake pool remove{config.option}`"
    return warning(about, text, remedy)


def _named(nodes: tuple[int, ...]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"


def _pages_of(path: Path) -> dict[int, int]:
    """Pages of a pool's file by node; empty if there is none, or it is not ours."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            return sample(np.frombuffer(mapping, dtype=np.uint8))
    except (OSError, ValueError, BufferError):
        return {}
