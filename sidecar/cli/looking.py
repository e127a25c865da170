"""Commands that look at one node: `status`, `inspect`, `doctor` and `pool`.

Owns their options and which of their answers is a no. What they tell is made elsewhere:
`sidecar/cli/status.py`, `inspect.py`, `doctor.py` and `pool.py`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sidecar.cli.console import (
    Commands,
    UsageError,
    add_config_option,
    add_sidecar_options,
    complain,
    load_config,
    say,
    sidecar_of,
)
from sidecar.exits import Exit

if TYPE_CHECKING:
    import argparse


def add_looking(commands: Commands) -> None:
    """`status` and `inspect`."""
    status = commands.add_parser(
        "status",
        help="show what a running sidecar holds and does",
        description="Ask a running sidecar for its tiers, traffic, loads and attached engines.",
    )
    where = status.add_mutually_exclusive_group()
    add_config_option(where)
    add_sidecar_options(status, where=where)
    status.add_argument("--json", action="store_true", help="print it as JSON")
    status.set_defaults(command_function=_status)

    inspect = commands.add_parser(
        "inspect",
        help="show what a stored chunk file holds, and whether it is intact",
        description="Read chunk files (.arrow), print what they hold, and check header, footer "
        "and checksum. The exit code is 1 if any of them is damaged or is no chunk file.",
    )
    inspect.add_argument(
        "places", nargs="+", metavar="FILE_OR_URL", help="a path, or a URL such as s3://bucket/..."
    )
    add_config_option(inspect, help_text="reach URLs as its section store says")
    inspect.add_argument("--json", action="store_true", help="print it as JSON")
    inspect.set_defaults(command_function=_inspect)


def add_doctor(commands: Commands) -> None:
    """`doctor`."""
    doctor = commands.add_parser(
        "doctor",
        help="say what would keep a sidecar from starting here, and an engine from its cache",
        description=(
            "Check all that `kvlake serve` checks when it starts (directories, ports, keys, host "
            "memory, limits), the store, by writing and deleting one object, the GPUs and what "
            "their driver can do, and what an engine would find. With an engine's command after "
            "--, that as well, as `kvlake run` does. One line each: pass, warn or fail; the exit "
            "code is 1 if anything failed. Nothing on the node is changed."
        ),
        usage="kvlake doctor [-h] [--config FILE] [-- vllm serve MODEL ...]",
    )
    add_config_option(doctor)
    doctor.set_defaults(command_function=_doctor)


def add_pool(commands: Commands) -> None:
    """`pool` with its actions."""
    pool = commands.add_parser(
        "pool",
        help="show or remove the host memory that a stopped sidecar kept",
        description="A sidecar that stops keeps its host memory, so that the next one of the same "
        "name starts warm (host.after_stop). Run this as the sidecar's user, with its --config.",
    )
    actions = pool.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print where it is, how large, and what it holds")
    add_config_option(show)
    show.add_argument("--json", action="store_true", help="print it as JSON")
    show.set_defaults(command_function=_pool_show)
    remove = actions.add_parser(
        "remove", help="give it back; ends with 1 where a sidecar uses it, or it is not kvlake's"
    )
    add_config_option(remove)
    remove.set_defaults(command_function=_pool_remove)


def _status(options: argparse.Namespace) -> int:
    from sidecar.cli.status import StatusError, render

    try:
        document = sidecar_of(options).ask("/status")
    except StatusError as error:
        complain(str(error))
        return Exit.NO
    say(json.dumps(document, indent=2) if options.json else render(document))
    return Exit.OK


def _inspect(options: argparse.Namespace) -> int:
    from sidecar.cli.inspect import inspect_file

    store = None if options.config is None else load_config(options.config).store
    access, storage_options = (store.access, store.storage_options) if store else (None, None)
    findings = [inspect_file(place, access, storage_options) for place in options.places]
    if options.json:
        say(json.dumps([finding.document() for finding in findings], indent=2))
    else:
        say("\n".join(finding.text() for finding in findings))
    return Exit.OK if all(finding.intact for finding in findings) else Exit.NO


def _doctor(options: argparse.Namespace) -> int:
    import logging

    import anyio

    from sidecar.cli.doctor import CheckResult, examine
    from sidecar.logs import LOGGER

    # Its lines say the same.
    logging.getLogger(LOGGER).setLevel(logging.ERROR)
    findings = anyio.run(examine, load_config(options.config), options.command)
    for finding in findings:
        say(str(finding))
    return Exit.NO if any(one.verdict is CheckResult.FAIL for one in findings) else Exit.OK


def _pool_show(options: argparse.Namespace) -> int:
    from sidecar.cli.pool import describe, render

    try:
        document = describe(load_config(options.config).pool_path)
    except OSError as error:
        raise UsageError(f"the pool cannot be read: {error}") from error
    say(json.dumps(document, indent=2) if options.json else render(document))
    return Exit.OK


def _pool_remove(options: argparse.Namespace) -> int:
    from tiers.errors import PoolError
    from tiers.pool.file import remove_pool
    from tiers.sizes import approximate_size

    path = load_config(options.config).pool_path
    try:
        freed_bytes = remove_pool(path)
    except (PoolError, OSError) as error:
        complain(str(error))
        return Exit.NO
    say(f"{path}: {approximate_size(freed_bytes)} given back" if freed_bytes else f"{path}: none")
    return Exit.OK
