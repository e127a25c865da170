"""`kvlake config`: check, show or describe a configuration file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.cli.console import load_config, say
from sidecar.config.model import schema, show
from sidecar.exits import Exit

if TYPE_CHECKING:
    import argparse


def main(options: argparse.Namespace) -> int:
    """`check`, `show` or `schema`."""
    if options.action == "schema":
        say(schema())
    elif options.action == "show":
        say(show(load_config(options.file)))
    else:
        load_config(options.file)
        say(f"{options.file}: ok")
    return Exit.OK
