"""The command line of `kvlake`: every command with its options and help.

Does not own what a command does: `module` names the module that has its `main(options)`.

Invariant: no secret is an option, because other users of the machine can see command lines.
"""

import argparse
import difflib
import math
import re
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias
from urllib.parse import urlsplit

from sidecar import version

PORT_MAX: Final = 65_535
_DESCRIPTION: Final = """\
kvlake keeps vLLM's KV cache in host memory and in object stores, so that a prompt prefix that was
computed once is not computed again, by any engine that reaches the same sidecar or bucket.
"""
_EPILOG: Final = """\
first steps:
  kvlake demo                                  see a hit on this machine, without a GPU
  kvlake run -- vllm serve MODEL               an engine with a sidecar, in one command
  kvlake status                                what the sidecar holds and does

`kvlake COMMAND --help` explains each command. Exit codes: 0 done, 1 the answer is no, 2 change the
command or the configuration, 3 the sidecar could not start, 4 it stopped with chunks unwritten,
5 a second signal ended it, 70 a bug (docs/reference/cli.md has the table). `run` ends with the
engine's own code.
"""
# argparse has no public name for the result of `add_subparsers`, nor for what takes options.
_Commands: TypeAlias = Any


class _Parser(argparse.ArgumentParser):
    """Suggests the nearest command for an unknown one."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if unknown:
            known = re.findall(r"[\w-]+", unknown[2])
            near = difflib.get_close_matches(unknown[1], known, n=1, cutoff=0.5)
            suggestion = f"did you mean `{near[0]}`? " if near else ""
            message = f"no command `{unknown[1]}`; {suggestion}the commands are {', '.join(known)}"
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """Every command with its options."""
    top = _Parser(
        prog="kvlake",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"kvlake {version()}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_process_commands(commands)
    _add_node_commands(commands)
    _add_cache_commands(commands)
    _add_config_commands(commands)
    return top


def _option(*names: str, **settings: Any) -> argparse.ArgumentParser:
    """An option that several commands take, as a parent of their parsers."""
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument(*names, **settings)
    return parent


_CONFIG_HELP: Final = "the sidecar's YAML file (default: built-in defaults)"
_CONFIG: Final = _option("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
_JSON: Final = _option("--json", action="store_true", help="print it as JSON")
_NAMESPACE_HELP: Final = "the namespace, by its first digits"
_NAMESPACE: Final = _option("--namespace", metavar="DIGITS", help=_NAMESPACE_HELP)


def _command(to: _Commands, name: str, module: str = "", **texts: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = to.add_parser(name, **texts)
    command.set_defaults(module=f"sidecar.cli.{module or name}", action=name)
    return command


def _actions(to: _Commands, name: str, **texts: Any) -> _Commands:
    """A command that only has further commands."""
    command = to.add_parser(name, **texts)
    return command.add_subparsers(title="actions", metavar="ACTION", required=True)


def _add_process_commands(commands: _Commands) -> None:
    """Commands that start processes."""
    run = _command(
        commands,
        "run",
        help="start a sidecar, then vLLM beside it",
        description="Start a sidecar, wait until it serves, then start vLLM with the connector's "
        "options added to its command line. Signals go to vLLM, a sidecar that dies is started "
        "again, and the exit code is vLLM's. A sidecar that serves already is joined; it drains "
        "when the last engine is gone.",
        usage="kvlake run [-h] [--config FILE] [--optional] -- vllm serve MODEL ...",
        epilog="example: kvlake run --config configs/default.yaml -- vllm serve MODEL --port 8000",
        parents=[_CONFIG],
    )
    run.add_argument(
        "--optional",
        action="store_true",
        help="start the engine also if the sidecar cannot be started, and retry the sidecar",
    )
    serve = _command(
        commands,
        "serve",
        help="run the sidecar alone",
        description="Run the sidecar until it gets SIGTERM or SIGINT. Engines attach to its "
        "socket by themselves, also those that were started earlier.",
        parents=[_CONFIG],
    )
    # For `kvlake run`: where to write a line when the sidecar serves, and which process it serves.
    serve.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    serve.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    demo = _command(
        commands,
        "demo",
        help="show a hit from host memory and from an object store",
        description="Make a small model, compute a long prompt once, and serve it to a second "
        "engine from host memory and from a bucket. Runs on this machine, without a GPU.",
        parents=[_JSON],
    )
    demo.set_defaults(module="sidecar.demo.scenes")
    demo.add_argument(
        "--model-only",
        metavar="DIR",
        type=Path,
        help="only write the demo's model and tokenizer to DIR, to serve it yourself",
    )


def _add_node_commands(commands: _Commands) -> None:
    """Commands about one node."""
    status = _command(
        commands,
        "status",
        help="show what a running sidecar holds and does",
        description="Ask a running sidecar for its tiers, traffic, loads and attached engines.",
        parents=[_JSON],
    )
    where = status.add_mutually_exclusive_group()
    where.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
    _add_sidecar_options(status, where=where)
    explain = _command(
        commands,
        "explain",
        help="show where a prompt's tokens came from, and why some were computed",
        description="Ask a running sidecar for the last prompts of its engines: how many tokens "
        "came from which tier, why the others were computed, and what would change that.",
        parents=[_JSON],
    )
    explain.add_argument(
        "request_id", nargs="?", metavar="REQUEST_ID", help="vLLM's id of a request"
    )
    explain.add_argument(
        "--prompt",
        metavar="FILE",
        help="look a prompt up chunk by chunk: text, a list of token ids in JSON, or the body of a "
        "request to vLLM's API; - for standard input",
    )
    explain.add_argument(
        "--engine",
        type=_address,
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="with --prompt: the vLLM server that makes tokens of text (default: %(default)s)",
    )
    explain.add_argument(
        "--last",
        type=_count,
        default=1,
        metavar="N",
        help="how many prompts, at most 1000 (default: 1)",
    )
    where = explain.add_mutually_exclusive_group()
    where.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
    _add_sidecar_options(explain, where=where)
    record = _command(
        commands,
        "record",
        "explain",
        help="write down which chunks prompts have, to replay them",
        description="Ask a running sidecar every second for the chunks of the prompts of its "
        "engines, and write a line of JSON for each. There is nothing in it of what prompts say. "
        "`make replay TRACES=FILE` in kvlake's repository shows what each policy of eviction, and "
        "more memory, would make of them.",
    )
    record.add_argument("file", metavar="FILE", help="a new file; - for standard output")
    record.add_argument(
        "--seconds",
        type=_seconds,
        default=3600.0,
        metavar="N",
        help="how long (default: 3600; Ctrl-C ends it before)",
    )
    where = record.add_mutually_exclusive_group()
    where.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
    _add_sidecar_options(record, where=where)
    top = _command(
        commands,
        "top",
        help="watch whether the cache helps, is healthy, and what is in it",
        description="Ask one or more running sidecars every second, and draw the answers. Keys: 1 "
        "to 3 for the pages, s for the order of several sidecars, p to pause, q to quit.",
        parents=[_JSON],
    )
    top.add_argument(
        "--url",
        type=_sidecar_address,
        action="append",
        help="address of a sidecar; may be repeated",
    )
    top.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
    top.set_defaults(targets=None)
    _add_drawing_options(top)
    fleet = _command(
        commands,
        "fleet",
        "top",
        help="watch many sidecars, a line each, the worst first",
        description="As `kvlake top` for all sidecars that a file or a name in DNS lists.",
        parents=[_JSON],
    )
    fleet.add_argument(
        "--targets",
        required=True,
        metavar="FILE|dns:NAME:PORT",
        help="a file with one HOST:PORT a line, or a name with an address for each sidecar",
    )
    fleet.set_defaults(url=None, config=None)
    _add_drawing_options(fleet, timeout=1.0)
    inspect = _command(
        commands,
        "inspect",
        help="show what a stored chunk file holds, and whether it is intact",
        description="Read chunk files (.arrow), print what they hold, and check header, footer "
        "and checksum. The exit code is 1 if any of them is damaged or is no chunk file.",
        parents=[_JSON],
    )
    inspect.add_argument(
        "places", nargs="+", metavar="FILE_OR_URL", help="a path, or a URL such as s3://bucket/..."
    )
    inspect.add_argument(
        "--config", type=Path, metavar="FILE", help="access URLs by its section store"
    )
    _command(
        commands,
        "doctor",
        help="check this machine for a sidecar and engines",
        description="Check all that `kvlake serve` checks when it starts (directories, ports, "
        "keys, host memory, limits), the store, by writing and deleting one object, the GPUs and "
        "what their driver supports, and what an engine would find. With an engine's command "
        "after --, check that as `kvlake run` does. One line each: pass, warn or fail; the exit "
        "code is 1 if anything failed. Nothing on the node is changed.",
        usage="kvlake doctor [-h] [--config FILE] [-- vllm serve MODEL ...]",
        parents=[_CONFIG],
    )
    actions = _actions(
        commands,
        "pool",
        help="show or remove the host memory that a stopped sidecar kept",
        description="A sidecar that stops keeps its host memory, so that the next one of the same "
        "name starts warm (host.after_stop). Run this as the sidecar's user, with its --config.",
    )
    show = "print its path, size and contents"
    _command(actions, "show", "pool", help=show, parents=[_CONFIG, _JSON])
    remove = "free it; ends with 1 if a sidecar uses it, or it is not kvlake's"
    _command(actions, "remove", "pool", help=remove, parents=[_CONFIG])


def _add_cache_commands(commands: _Commands) -> None:
    """Commands about what is cached."""
    tier = _option("--host", action="store_true", help="host memory, even if there is a store")
    where = tier.add_mutually_exclusive_group()
    where.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
    _add_sidecar_options(tier, where=where)
    _command(
        commands,
        "du",
        "contents",
        help="show what is cached, by namespace, model and tenant",
        description="Read the store's catalog and sum up its chunks; nothing is listed or "
        "changed. If the configuration has no store, or with --host or --url, ask the running "
        "sidecar what its host memory holds.",
        parents=[tier, _JSON, _NAMESPACE],
    )
    ls = _command(
        commands,
        "ls",
        "contents",
        help="list the namespaces that are cached, or the chunks of one",
        description="List the store's namespaces, or the chunks of one of them with the URLs of "
        "its objects, from its catalog. If the configuration has no store, or with --host or "
        "--url, list what the host memory of the running sidecar holds.",
        parents=[tier, _JSON],
    )
    ls.add_argument("namespace", nargs="?", metavar="NAMESPACE", help=_NAMESPACE_HELP)
    ls.add_argument("--key", default="", metavar="DIGITS", help="only keys with this prefix")
    ls.add_argument("--tenant", default="", metavar="NAME", help="only this tenant, by name or id")
    ls.add_argument(
        "--limit", type=_count, default=1000, metavar="N", help="largest number (default: 1000)"
    )
    gc = _command(
        commands,
        "gc",
        help="keep the object store within its limits, now",
        description="Compact the catalog, withdraw what exceeds store.ttl, store.size_max, "
        "store.objects_max and the tenants' store_ttl, store_max and store_objects_max, and delete "
        "what was withdrawn at least store.gc.grace ago. Sidecars do the same by themselves.",
        parents=[_CONFIG, _JSON, _NAMESPACE],
    )
    for name, text in {
        "--dry-run": "show what would be removed; change nothing",
        "--list": "with --dry-run: every chunk that would be withdrawn, and why",
        "--wait": "wait for store.gc.grace, and delete what was withdrawn",
    }.items():
        gc.add_argument(name, action="store_true", help=text)


def _add_config_commands(commands: _Commands) -> None:
    """Commands about configuration."""
    keygen = _command(
        commands,
        "keygen",
        "config",
        help="make a secret: a key for KV events over TCP, or a token for HTTP",
        description="Write a new random secret to a file that only its owner can read, for "
        "events.curve_secret_key_file or http.token_file. An existing file is not replaced.",
    )
    keygen.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")
    actions = _actions(
        commands,
        "tenant",
        help="name a tenant without its secret",
        description="The cache salt of its requests, a secret, identifies a tenant. Configuration "
        "and catalog use an id that is made from it.",
    )
    named = _command(
        actions,
        "id",
        "config",
        help="print the id of a cache salt",
        description="Print the id of a cache salt. The salt is read from standard input or from "
        "an environment variable, never from the command line, where other users of the machine "
        "could see it.",
    )
    named.add_argument("--env", metavar="NAME", help="read it from this variable instead")
    actions = _actions(
        commands,
        "config",
        help="check, show or describe a configuration file",
        description="Work with the sidecar's configuration. configs/default.yaml explains every "
        "setting.",
    )
    check = _command(actions, "check", "config", help="check a file, and say what to fix")
    check.add_argument("file", type=Path, metavar="FILE")
    show = _command(
        actions,
        "show",
        "config",
        help="print the configuration with its defaults filled in, secrets masked",
    )
    show.add_argument("file", type=Path, metavar="FILE", nargs="?")
    _command(actions, "schema", "config", help="print the JSON schema of the file, for editors")


def _add_sidecar_options(to: argparse.ArgumentParser, *, where: Any) -> None:
    """How a running sidecar is asked. `where` takes the option for its address.

    No command takes `--config` beside it: the token of a configuration is for that sidecar only.
    """
    where.add_argument(
        "--url", type=_sidecar_address, help="address of the sidecar, such as http://127.0.0.1:9321"
    )
    _add_asking_options(to)


def _add_drawing_options(to: argparse.ArgumentParser, timeout: float = 5.0) -> None:
    to.add_argument("--once", action="store_true", help="print one picture and end")
    to.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="(default: 1)"
    )
    _add_asking_options(to, timeout)


def _add_asking_options(to: argparse.ArgumentParser, timeout: float = 5.0) -> None:
    to.add_argument(
        "--timeout",
        type=_seconds,
        default=timeout,
        metavar="SECONDS",
        help=f"longest wait for a connection, and for the answer (default: {timeout:g})",
    )
    to.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="the token of http.token_file (default: that of --config, where one is given)",
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0, such as 2.5")
    return value


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, 0 or more")
    return int(text)


def _sidecar_address(text: str) -> str:
    """The address of a sidecar, which speaks HTTP without TLS."""
    if text.startswith("https:"):
        # The token would be sent to it without encryption.
        raise argparse.ArgumentTypeError(
            f"{text!r}: commands do not speak TLS; write http://HOST:PORT of the sidecar itself"
        )
    return _address(text)


def _address(text: str) -> str:
    if not re.match(r"https?://[^/]", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no address; write http://HOST:PORT")
    try:
        wrong = "port 0" if urlsplit(text).port == 0 else ""
    except ValueError as error:
        # Also of brackets without an IPv6 address in them.
        wrong = str(error)
    if wrong:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no address: {wrong}; write http://HOST:PORT, PORT from 1 to {PORT_MAX}"
        )
    return text
