"""Commands on the object store: `du`, `ls` and `gc`.

Owns their options. What they do is in `sidecar/cli/store.py` and `ls.py`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeVar

from sidecar.cli.console import (
    Commands,
    UsageError,
    add_config_option,
    count,
    load_config,
    say,
)
from sidecar.exits import Exit

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

_T = TypeVar("_T")


def add_store(commands: Commands) -> None:
    """`du`, `ls` and `gc`."""
    du = commands.add_parser(
        "du",
        help="show what the object store holds, by namespace and tenant",
        description="Read the store's catalog and count what it offers. Nothing is listed or "
        "changed.",
    )
    ls = commands.add_parser(
        "ls",
        help="list the chunks in the object store",
        description="List the store's namespaces, or the chunks of one of them, from its catalog.",
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
        command.add_argument("--json", action="store_true", help="print it as JSON")
        command.set_defaults(command_function=function)


def _du(options: argparse.Namespace) -> int:
    from sidecar.cli import store as storecommands

    document = _on_store(lambda: storecommands.du(load_config(options.config), options.namespace))
    say(json.dumps(document, indent=2) if options.json else storecommands.du_text(document))
    return Exit.OK


def _ls(options: argparse.Namespace) -> int:
    from sidecar.cli import ls as storelisting
    from sidecar.cli import store as storecommands

    key = options.key.lower()
    wanted = storelisting.ListingFilter(options.namespace, key, options.tenant, options.limit)
    config = load_config(options.config)
    _on_store(lambda: storecommands.ls(config, wanted, say, as_json=options.json))
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
