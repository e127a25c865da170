"""`kvlake tenant id`: the id of a cache salt."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from sidecar.cli.console import CommandError, say
from sidecar.exits import Exit
from sidecar.protocol import tenant_id

if TYPE_CHECKING:
    import argparse


def main(options: argparse.Namespace) -> int:
    """Print the id of a salt that comes from standard input or an environment variable."""
    if options.env is not None:
        salt = os.environ.get(options.env, "")
        where = f"environment variable {options.env}"
    else:
        salt = sys.stdin.readline().rstrip("\r\n")
        where = "first line of standard input"
    if not salt:
        raise CommandError(f"the {where} is empty; it must hold the cache salt")
    say(tenant_id(salt).hex())
    return Exit.OK
