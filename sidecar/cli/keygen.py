"""`kvlake keygen`: a new secret in a file of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import zmq

from sidecar.cli.console import CommandError, say
from sidecar.config.secret_files import SecretFileError, write_secret
from sidecar.exits import Exit

if TYPE_CHECKING:
    import argparse


def main(options: argparse.Namespace) -> int:
    """Write a CURVE secret key, which can also be a token; print the public key."""
    public, secret = zmq.curve_keypair()
    while b"$" in public:
        # `$$` and `${` have a meaning in configuration files.
        public, secret = zmq.curve_keypair()
    try:
        write_secret(options.out, secret.decode())
    except SecretFileError as error:
        raise CommandError(str(error)) from error
    say(f"{options.out}: a new secret, readable by its owner only")
    say(f"As a CURVE key, its public part is {public.decode()}")
    return Exit.OK
