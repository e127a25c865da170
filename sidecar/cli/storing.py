"""Commands on what is cached: `du`, `ls` and `gc`.

Owns their options, and whether `du` and `ls` are about the store or host memory. What they do is in
`sidecar/cli/store.py`, `ls.py` and `host_listing.py`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeVar

from sidecar.cli.console import (
    Commands,
    UsageError,
    add_config_option,
    add_sidecar_options,
    complain,
    count,
    load_config,
    say,
    sidecar_of,
)
from sidecar.exits import Exit

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from sidecar.cli.host_listing import HostAnswer
    from sidecar.cli.status import SidecarAddress
    from sidecar.config.model import Config

_T = TypeVar("_T")


def add_store(commands: Commands) -> None:
    """`du`, `ls` and `gc`."""
    du = commands.add_parser(
        "du",
        help="show what is cached, by namespace, model and tenant",
        description="Read the store's catalog and count what it offers; nothing is listed or "
        "changed. Where the configuration has no store, or with --host or --url, ask the running "
        "sidecar what its host memory holds.",
    )
    ls = commands.add_parser(
        "ls",
        help="list the namespaces that are cached, or the chunks of one",
        description="List the store's namespaces, or the chunks of one of them with the URLs of "
        "its objects, from its catalog. Where the configuration has no store, or with --host or "
        "--url, list what the host memory of the running sidecar holds.",
    )
    ls.add_argument("--key", default="", metavar="DIGITS", help="only keys that begin with this")
    ls.add_argument("--tenant", default="", metavar="NAME", help="only of this tenant, or its id")
    ls.add_argument(
        "--limit", type=count, default=1000, metavar="N", help="at most so many (default: 1000)"
    )
    gc = commands.add_parser(
        "gc",
        help="keep the object store within its bounds, now",
        description="Compact the catalog, withdraw what is beyond store.ttl, store.size_max, "
        "store.objects_max and the tenants' store_ttl, store_max and store_objects_max, and delete "
        "what was withdrawn at least store.gc.grace ago. Sidecars do the same by themselves.",
    )
    gc.add_argument("--dry-run", action="store_true", help="say what would go; change nothing")
    gc.add_argument(
        "--list", action="store_true", help="with --dry-run: every chunk that would go, and why"
    )
    gc.add_argument(
        "--wait", action="store_true", help="wait for store.gc.grace, and delete what was withdrawn"
    )
    for command, function in ((du, _du), (ls, _ls), (gc, _gc)):
        of = "the namespace, by its first digits"
        if command is ls:
            command.add_argument("namespace", nargs="?", metavar="NAMESPACE", help=of)
        else:
            command.add_argument("--namespace", metavar="DIGITS", help=of)
        add_config_option(command)
        if command is not gc:
            command.add_argument(
                "--host", action="store_true", help="host memory, also where there is a store"
            )
            add_sidecar_options(command, where=command)
        command.add_argument("--json", action="store_true", help="print it as JSON")
        command.set_defaults(command_function=function)


def _du(options: argparse.Namespace) -> int:
    from sidecar.cli import host_listing as hostlisting
    from sidecar.cli import store as storecommands

    config = load_config(options.config)
    if _of_host(options, config):
        return _on_host(lambda sidecar: hostlisting.du(sidecar, options.namespace), options)
    document = _on_store(lambda: storecommands.du(config, options.namespace))
    say(json.dumps(document, indent=2) if options.json else storecommands.du_text(document))
    return Exit.OK


def _ls(options: argparse.Namespace) -> int:
    from sidecar.cli import host_listing as hostlisting
    from sidecar.cli import ls as storelisting
    from sidecar.cli import store as storecommands

    key = options.key.lower()
    wanted = storelisting.ListingFilter(options.namespace, key, options.tenant, options.limit)
    config = load_config(options.config)
    if _of_host(options, config):
        return _on_host(lambda sidecar: hostlisting.ls(sidecar, wanted), options)
    _on_store(lambda: storecommands.ls(config, wanted, say, as_json=options.json))
    return Exit.OK


def _of_host(options: argparse.Namespace, config: Config) -> bool:
    return bool(options.host or options.url or config.store is None)


def _on_host(command: Callable[[SidecarAddress], HostAnswer], options: argparse.Namespace) -> int:
    """Ask the sidecar; `command` gives lines of text or of JSON, as they come."""
    from sidecar.cli.status import QuestionRefused, StatusError

    try:
        answer = command(sidecar_of(options))
        for line in answer.as_json() if options.json else answer.as_text():
            say(line)
    except QuestionRefused as error:
        raise UsageError(str(error)) from error
    except StatusError as error:
        asked = options.host or options.url
        why = "" if asked else "the configuration has no store, so host memory is asked for: "
        complain(f"{why}{error}")
        return Exit.NO
    return Exit.OK


def _gc(options: argparse.Namespace) -> int:
    from sidecar.cli import store as storecommands
    from sidecar.cli.ls import Listing, TenantNames

    config, victims = load_config(options.config), None
    if options.list and not options.dry_run:
        raise UsageError("--list tells what would go: give it together with --dry-run")
    if options.list:
        victims = Listing(say, TenantNames(config), as_json=options.json, bounds=True)
        victims.open({}, "victims")
    document = _on_store(
        lambda: storecommands.gc(
            config,
            dry_run=options.dry_run,
            wait=options.wait,
            namespace=options.namespace,
            victims=victims,
        )
    )
    if victims is not None:
        victims.close(document)
    if victims is not None and not options.json:
        say("")
    if victims is None or not options.json:
        say(json.dumps(document, indent=2) if options.json else storecommands.gc_text(document))
    return Exit.OK


def _on_store(command: Callable[[], _T]) -> _T:
    from sidecar.cli.store import StoreCommandError

    try:
        return command()
    except StoreCommandError as error:
        raise UsageError(str(error)) from error
