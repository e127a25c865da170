"""`kvlake config`, `kvlake keygen` and `kvlake tenant id`: the configuration and its secrets."""

import os
import sys
from pathlib import Path

from sidecar.cli.console import CommandError, Options, load_config, say
from sidecar.config.model import schema, show
from sidecar.config.secret_files import write_secret
from sidecar.errors import StartError
from sidecar.protocol import tenant_id


def main(options: Options) -> None:
    """Carry out one of them."""
    if options.action == "schema":
        say(schema())
    elif options.action == "show":
        say(show(load_config(options.file)))
    elif options.action == "check":
        load_config(options.file)
        say(f"{options.file}: ok")
    elif options.action == "keygen":
        _make_secret(options.out)
    else:
        _say_tenant_id(options.env)


def _make_secret(path: Path) -> None:
    """Write a CURVE secret key, which can also be a token; print the public key."""
    import zmq

    public, secret = zmq.curve_keypair()
    while b"$" in public:
        # `$$` and `${` have a meaning in configuration files.
        public, secret = zmq.curve_keypair()
    try:
        write_secret(path, secret.decode())
    except StartError as error:
        raise CommandError(str(error)) from error
    say(f"{path}: a new secret, readable by its owner only")
    say(f"As a CURVE key, its public part is {public.decode()}")


def _say_tenant_id(variable: str | None) -> None:
    """Print the id of a salt that comes from standard input or an environment variable."""
    where = f"environment variable {variable}" if variable else "first line of standard input"
    try:
        salt = os.environ.get(variable, "") if variable else sys.stdin.readline().rstrip("\r\n")
        if not salt:
            raise CommandError(f"the {where} is empty; it must hold the cache salt")
        say(tenant_id(salt).hex())
    except UnicodeError as error:
        raise CommandError(f"the {where} is not valid text ({error}); it must be UTF-8") from error
