"""Commands that prepare or check what a configuration says: `keygen`, `tenant` and `config`.

Owns their options. Invariant: no secret is taken from, or shown on, the command line.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.cli.console import Commands, UsageError, load_config, say
from sidecar.exits import Exit

if TYPE_CHECKING:
    import argparse


def add_keygen(commands: Commands) -> None:
    """`keygen`."""
    keygen = commands.add_parser(
        "keygen",
        help="make a secret: a key for KV events over TCP, or a token for HTTP",
        description="Write a new random secret to a file that only its owner can read, for "
        "events.curve_secret_key_file or http.token_file. A file that is there is not replaced.",
    )
    keygen.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to write it")
    keygen.set_defaults(command_function=_keygen)


def add_tenant(commands: Commands) -> None:
    """`tenant` with its action."""
    tenant = commands.add_parser(
        "tenant",
        help="name a tenant without its secret",
        description="Tenants are told apart by the cache salt of their requests, which is a "
        "secret. Configuration and catalog call them by an id that is made from it.",
    )
    actions = tenant.add_subparsers(title="actions", metavar="ACTION", required=True)
    named = actions.add_parser(
        "id",
        help="print the id that belongs to a cache salt",
        description="Print the id that belongs to a cache salt. The salt is read from standard "
        "input or from an environment variable, never from the command line, where other users "
        "of the machine could see it.",
    )
    named.add_argument("--env", metavar="NAME", help="read it from this variable instead")
    named.set_defaults(command_function=_tenant_id)


def add_config(commands: Commands) -> None:
    """`config` with its actions."""
    config = commands.add_parser(
        "config",
        help="check, show or describe a configuration file",
        description="Work with the sidecar's configuration. configs/default.yaml explains every "
        "setting.",
    )
    actions = config.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="say whether a file is valid, and what to fix if not")
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(command_function=_config_check)
    show = actions.add_parser(
        "show", help="print the configuration with its defaults filled in, secrets masked"
    )
    show.add_argument("file", type=Path, metavar="FILE", nargs="?")
    show.set_defaults(command_function=_config_show)
    schema = actions.add_parser("schema", help="print the JSON schema of the file, for editors")
    schema.set_defaults(command_function=_config_schema)


def _keygen(options: argparse.Namespace) -> int:
    import zmq

    from sidecar.config.secret_files import SecretFileError, write_secret

    public, secret = zmq.curve_keypair()
    while b"$" in public:
        # A configuration file takes `$$` and `${` for something else.
        public, secret = zmq.curve_keypair()
    try:
        write_secret(options.out, secret.decode())
    except SecretFileError as error:
        raise UsageError(str(error)) from error
    say(f"{options.out}: a new secret, readable by its owner only")
    say(f"As a CURVE key, its public part is {public.decode()}")
    return Exit.OK


def _tenant_id(options: argparse.Namespace) -> int:
    from sidecar.protocol import tenant_id

    if options.env is not None:
        salt = os.environ.get(options.env, "")
        where = f"environment variable {options.env}"
    else:
        salt = sys.stdin.readline().rstrip("\r\n")
        where = "first line of standard input"
    if not salt:
        raise UsageError(f"the {where} is empty; it must hold the cache salt")
    say(tenant_id(salt).hex())
    return Exit.OK


def _config_check(options: argparse.Namespace) -> int:
    load_config(options.file)
    say(f"{options.file}: ok")
    return Exit.OK


def _config_show(options: argparse.Namespace) -> int:
    from sidecar.config.model import show

    say(show(load_config(options.file)))
    return Exit.OK


def _config_schema(options: argparse.Namespace) -> int:
    del options
    from sidecar.config.model import schema

    say(schema())
    return Exit.OK
