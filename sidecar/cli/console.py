"""What every command has in common: how it speaks, how it fails, where its configuration is.

Owns what goes to standard output and standard error, and the errors that end in an exit code. Does
not own the codes (`sidecar/exits.py`).
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from sidecar.exits import Exit

if TYPE_CHECKING:
    from sidecar.cli.status import SidecarAddress
    from sidecar.config.model import Config

# argparse has no public names for what `add_subparsers` returns, nor for what takes options.
Commands: TypeAlias = Any
Options: TypeAlias = Any


class UsageError(Exception):
    """The command cannot be carried out as it was given; the message says what to change."""

    code = Exit.USAGE


class NotStarted(UsageError):
    """What the sidecar needs to start is not to be had here and now."""

    code = Exit.START


def say(text: str) -> None:
    """One result to standard output."""
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")


def complain(text: str) -> None:
    """One message to standard error."""
    sys.stderr.write(f"kvlake: {text}\n")


def load_config(path: Path | None) -> Config:
    """The configuration, its secrets kept out of what is said. Raises `UsageError`."""
    from sidecar.config.model import ConfigError, load
    from sidecar.redaction import conceal

    try:
        config = load(path)
    except ConfigError as error:
        raise UsageError(
            "\n".join(("the configuration cannot be used:", *error.problems))
        ) from error
    conceal(config.secrets())
    return config


def add_config_option(
    to: Options,
    help_text: str = "the sidecar's YAML file (default: built-in defaults)",
) -> None:
    """`--config`, as every command that reads the configuration has it."""
    to.add_argument("--config", type=Path, metavar="FILE", help=help_text)


def seconds(text: str) -> float:
    """Type of an option: a number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0, such as 2.5")
    return value


def count(text: str) -> int:
    """Type of an option: a whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, 0 or more")
    return int(text)


def address(text: str) -> str:
    """Type of an option: where an HTTP server is."""
    if not re.match(r"https?://[^/]", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no address; write http://HOST:PORT")
    return text


def add_sidecar_options(to: Options, *, where: Options) -> None:
    """How a running sidecar is asked: `where` it is, the longest wait, and its token."""
    where.add_argument(
        "--url", type=address, help="address of the sidecar, such as http://127.0.0.1:9321"
    )
    to.add_argument(
        "--timeout", type=seconds, default=5.0, metavar="SECONDS", help="longest wait (default: 5)"
    )
    to.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="the token of http.token_file (default: that of the configuration)",
    )


def sidecar_of(options: argparse.Namespace) -> SidecarAddress:
    """The running sidecar that these options name. Raises `UsageError`, `StatusError`."""
    from sidecar.cli.status import SidecarAddress, url_of
    from sidecar.config.secret_files import SecretFileError, read_secret

    try:
        config = None if options.url else load_config(options.config)
        url = options.url if config is None else url_of(config)
        token = "" if config is None else config.http.secret_token()
        if options.token_file is not None:
            token = read_secret(options.token_file, "--token-file")
    except SecretFileError as error:
        raise UsageError(str(error)) from error
    return SidecarAddress(url, options.timeout, token)
