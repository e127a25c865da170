"""The checks that `kvlake serve` makes when it starts, made without starting.

Owns their list, and how a running sidecar changes them. Each check is a function that `serve`
calls, too, and its error is shown unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from sidecar.cli.client import SidecarClient, SidecarNotReady, url_of
from sidecar.cli.console import NoAnswer
from sidecar.cli.doctor.findings import Check, failed, passed, warning
from sidecar.data.host_pool import check_host, placement_of
from sidecar.errors import StartError
from sidecar.events.curve_socket import bound
from sidecar.observe import http
from sidecar.service import runtime_dir as runtimedir
from sidecar.service.start_checks import shortages
from sidecar.service.store_stack import open_store
from tiers.errors import TierError
from tiers.pool.lock import lock_path_of, read_owner
from tiers.pool.numa import sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.config.model import Config

STATUS_SECONDS_MAX: Final = 10.0


def startup_findings(config: Config) -> list[Check]:
    """What would keep `serve` from starting, in its order, and what it would warn about."""
    where = str(config.file or "built-in defaults; --config FILE names another")
    runtime = config.runtime
    about = f"runtime.directory {runtime.directory}"
    found = [passed("configuration", where)]
    pid, has_ports = 0, False
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
        found += _ports(config)
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


def _running(config: Config, pid: int) -> tuple[Check, bool]:
    """The state of the sidecar that has the runtime directory, and whether it has the HTTP port.

    `pid` is 0 if it is not known.
    """
    about = f"sidecar {config.runtime.name}"
    text = f"it runs (pid {pid or 'unknown'})"
    try:
        url = url_of(config)
        status = SidecarClient(url, STATUS_SECONDS_MAX, config.http.secret_token()).get()
    except NoAnswer as error:
        return warning(about, f"{text}: {error}"), isinstance(error, SidecarNotReady)
    except StartError:
        # The line of that check says why.
        unasked = "without the token of http.token_file it cannot be asked how it is"
        return warning(about, f"{text}; {unasked}"), False
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
