"""The `kvlake` command: options, help, exit codes.

Owns the command line and how a result is printed. What a command does is elsewhere: `server.py`,
`launch.py`, `status.py`, `inspection.py`, `config.py`, `demo`. Those are imported when they are
needed, so that `kvlake --help` is quick and the connector's environment, which lacks the
sidecar's packages, gets a sentence rather than a traceback.

What the exit code says stands in `exits.py`.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

from sidecar.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sidecar.config import Config
    from sidecar.server import ServerInfo

_DESCRIPTION: Final = """\
kvlake keeps vLLM's KV cache in host memory and in object stores, so that a prompt prefix that was
computed once is not computed again, by any engine that reaches the same sidecar or bucket.
"""
_EPILOG: Final = """\
first steps:
  kvlake demo                                  see a hit on this machine, without a GPU
  kvlake run -- vllm serve MODEL               an engine with a sidecar, in one command
  kvlake status                                what the sidecar holds and does

`kvlake COMMAND --help` tells more about each command. Exit codes: 0 done, 1 the answer is no,
2 change the command or the configuration, 3 the sidecar could not start, 4 it stopped with chunks
unwritten, 5 a second signal ended it, 70 a bug (docs/operations.md has the table). `run` ends with
the engine's own code.
"""
_THREAD_POOLS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_PR_SET_PDEATHSIG: Final = 1


# argparse has no public names for what `add_subparsers` returns, nor for what takes options.
_Commands: TypeAlias = Any
_Options: TypeAlias = Any
_T = TypeVar("_T")


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


def _load(path: Path | None) -> Config:
    from sidecar.config import ConfigError, load
    from sidecar.redaction import conceal

    try:
        config = load(path)
    except ConfigError as error:
        raise UsageError(
            "\n".join(("the configuration cannot be used:", *error.problems))
        ) from error
    conceal(config.secrets())
    return config


# --- commands ------------------------------------------------------------------------------------


def _serve(options: argparse.Namespace) -> int:
    if options.parent_pid is not None:
        _end_with_parent(options.parent_pid)
    # Before numpy or pyarrow are imported, which read it then. The engine beside this process
    # wants the cores, and pools that spin on them made hits several times slower.
    for name in _THREAD_POOLS:
        os.environ[name] = "1"
    config = _load(options.config)
    import anyio

    from sidecar import logs
    from sidecar.attach import StartError
    from sidecar.server import serve

    logs.configure(config.log.level, config.log.format)

    def ready(info: ServerInfo) -> None:
        # What is there now stays. Looking through all of it, time and again, held the event loop
        # up for 70 ms.
        gc.collect()
        gc.freeze()
        if options.ready_fd is not None:
            line = {"http_url": info.http_url, "attach": str(info.attach_path)}
            os.write(options.ready_fd, json.dumps(line).encode() + b"\n")
            os.close(options.ready_fd)

    async def main() -> int:
        return await serve(config, ready=ready)

    try:
        return anyio.run(main)
    except StartError as error:
        raise NotStarted(str(error)) from error


def _end_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGTERM when the parent ends, however it ends."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise UsageError(f"--parent-pid {parent_pid} ended before the sidecar had started")


def _run(options: argparse.Namespace) -> int:
    from sidecar.launch import LaunchError, run, serve_command

    config = _load(options.config)
    try:
        return run(config, serve_command(options.config), cast("list[str]", options.command))
    except LaunchError as error:
        raise (NotStarted if error.code is Exit.START else UsageError)(str(error)) from error


def _demo(options: argparse.Namespace) -> int:
    from sidecar import demo

    if options.model_only is not None:
        path = demo.write_model(options.model_only)
        say(f"kvlake run -- vllm serve {path} --dtype bfloat16 --block-size 32")
        return Exit.OK

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    # As Ctrl-C does: its engines, servers and folder go before it does.
    signal.signal(signal.SIGTERM, end)
    return int(demo.main(json=options.json) or Exit.OK)


def _status(options: argparse.Namespace) -> int:
    from sidecar.secretfiles import SecretFileError, read_secret
    from sidecar.status import StatusError, fetch, render, url_of

    try:
        config = None if options.url else _load(options.config)
        url = options.url if config is None else url_of(config)
        token = "" if config is None else config.http.secret_token()
        if options.token_file is not None:
            token = read_secret(options.token_file, "--token-file")
        document = fetch(url, options.timeout, token)
    except SecretFileError as error:
        raise UsageError(str(error)) from error
    except StatusError as error:
        complain(str(error))
        return Exit.NO
    say(json.dumps(document, indent=2) if options.json else render(document))
    return Exit.OK


def _doctor(options: argparse.Namespace) -> int:
    import logging

    import anyio

    from sidecar.doctor import Verdict, examine
    from sidecar.logs import LOGGER

    # Its lines say the same.
    logging.getLogger(LOGGER).setLevel(logging.ERROR)
    findings = anyio.run(examine, _load(options.config))
    for finding in findings:
        say(str(finding))
    return Exit.NO if any(one.verdict is Verdict.FAIL for one in findings) else Exit.OK


def _inspect(options: argparse.Namespace) -> int:
    from sidecar.inspection import inspect_file

    store = None if options.config is None else _load(options.config).store
    access, storage_options = (store.access, store.storage_options) if store else (None, None)
    findings = [inspect_file(place, access, storage_options) for place in options.places]
    if options.json:
        say(json.dumps([finding.document() for finding in findings], indent=2))
    else:
        say("\n".join(finding.text() for finding in findings))
    return Exit.OK if all(finding.intact for finding in findings) else Exit.NO


def _pool_show(options: argparse.Namespace) -> int:
    from sidecar.pools import describe, render

    try:
        document = describe(_load(options.config).pool_path)
    except OSError as error:
        raise UsageError(f"the pool cannot be read: {error}") from error
    say(json.dumps(document, indent=2) if options.json else render(document))
    return Exit.OK


def _pool_remove(options: argparse.Namespace) -> int:
    from sidecar.units import approximate_size
    from tiers.errors import PoolError
    from tiers.pool_file import remove_pool

    path = _load(options.config).pool_path
    try:
        freed_bytes = remove_pool(path)
    except (PoolError, OSError) as error:
        complain(str(error))
        return Exit.NO
    say(f"{path}: {approximate_size(freed_bytes)} given back" if freed_bytes else f"{path}: none")
    return Exit.OK


def _du(options: argparse.Namespace) -> int:
    from sidecar import storecommands

    document = _on_store(lambda: storecommands.du(_load(options.config), options.namespace))
    say(json.dumps(document, indent=2) if options.json else storecommands.du_text(document))
    return Exit.OK


def _ls(options: argparse.Namespace) -> int:
    from sidecar import storecommands, storelisting

    key = options.key.lower()
    wanted = storelisting.Wanted(options.namespace, key, options.tenant, options.limit)
    config = _load(options.config)
    _on_store(lambda: storecommands.ls(config, wanted, say, as_json=options.json))
    return Exit.OK


def _gc(options: argparse.Namespace) -> int:
    from sidecar import storecommands
    from sidecar.storelisting import Listing, TenantNames

    config, victims = _load(options.config), None
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
    from sidecar.storecommands import StoreCommandError

    try:
        return command()
    except StoreCommandError as error:
        raise UsageError(str(error)) from error


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


def _keygen(options: argparse.Namespace) -> int:
    import zmq

    from sidecar.secretfiles import SecretFileError, write_secret

    public, secret = zmq.curve_keypair()
    try:
        write_secret(options.out, secret.decode())
    except SecretFileError as error:
        raise UsageError(str(error)) from error
    say(f"{options.out}: a new secret, readable by its owner only")
    say(f"As a CURVE key, its public part is {public.decode()}")
    return Exit.OK


def _config_check(options: argparse.Namespace) -> int:
    _load(options.file)
    say(f"{options.file}: ok")
    return Exit.OK


def _config_show(options: argparse.Namespace) -> int:
    from sidecar.config import show

    say(show(_load(options.file)))
    return Exit.OK


def _config_schema(options: argparse.Namespace) -> int:
    del options
    from sidecar.config import schema

    say(schema())
    return Exit.OK


# --- the command line ----------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Every command with its options."""
    top = argparse.ArgumentParser(
        prog="kvlake",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"kvlake {_version()}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_running(commands)
    _add_looking(commands)
    _add_store(commands)
    _add_doctor(commands)
    _add_keygen(commands)
    _add_pool(commands)
    _add_tenant(commands)
    _add_config(commands)
    return top


def _add_running(commands: _Commands) -> None:
    run = commands.add_parser(
        "run",
        help="start a sidecar, then vLLM beside it",
        description="Start a sidecar, wait until it serves, then start vLLM with the connector's "
        "options added to its command line. Signals go to vLLM, a sidecar that dies is started "
        "again, and the exit code is vLLM's.",
        usage="kvlake run [-h] [--config FILE] -- vllm serve MODEL ...",
        epilog="example: kvlake run --config configs/default.yaml -- vllm serve MODEL --port 8000",
    )
    _add_config_option(run)
    run.set_defaults(command_function=_run)

    serve = commands.add_parser(
        "serve",
        help="run the sidecar alone",
        description="Run the sidecar until it gets SIGTERM or SIGINT. Engines attach to its "
        "socket by themselves, also when they were started earlier.",
    )
    _add_config_option(serve)
    # For `kvlake run`: a byte is written when the sidecar serves; the sidecar ends with the pid.
    serve.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    serve.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    serve.set_defaults(command_function=_serve)

    demo = commands.add_parser(
        "demo",
        help="show a hit from host memory and from an object store",
        description="Make a small model, compute a long prompt once, and serve it to a second "
        "engine from host memory and from a bucket. Runs on this machine, without a GPU.",
    )
    demo.add_argument("--json", action="store_true", help="print the measurements as JSON")
    demo.add_argument(
        "--model-only",
        metavar="DIR",
        type=Path,
        help="only write the demo's model and tokenizer to DIR, to serve it yourself",
    )
    demo.set_defaults(command_function=_demo)


def _add_looking(commands: _Commands) -> None:
    status = commands.add_parser(
        "status",
        help="show what a running sidecar holds and does",
        description="Ask a running sidecar for its tiers, hits, rates and attached engines.",
    )
    where = status.add_mutually_exclusive_group()
    _add_config_option(where)
    where.add_argument("--url", help="address of the sidecar, such as http://127.0.0.1:9321")
    status.add_argument(
        "--timeout", type=float, default=5.0, metavar="SECONDS", help="longest wait (default: 5)"
    )
    status.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="the token of http.token_file (default: that of the configuration)",
    )
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
    _add_config_option(inspect, help_text="reach URLs as its section store says")
    inspect.add_argument("--json", action="store_true", help="print it as JSON")
    inspect.set_defaults(command_function=_inspect)


def _add_store(commands: _Commands) -> None:
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
        "--limit", type=int, default=1000, metavar="N", help="at most so many (default: 1000)"
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
        _add_config_option(command)
        command.add_argument("--json", action="store_true", help="print it as JSON")
        command.set_defaults(command_function=function)


def _add_doctor(commands: _Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="look at this machine as a sidecar would: memory, GPUs, limits, the store",
        description=(
            "Check room and limits for host memory, the GPUs and what their driver can do, and the "
            "store, by writing and deleting one object. One line each: pass, warn or fail."
        ),
    )
    _add_config_option(doctor)
    doctor.set_defaults(command_function=_doctor)


def _add_keygen(commands: _Commands) -> None:
    keygen = commands.add_parser(
        "keygen",
        help="make a secret: a key for jobs over TCP, or a token for HTTP",
        description="Write a new random secret to a file that only its owner can read, for "
        "runtime.curve_secret_key_file or http.token_file. A file that is there is not replaced.",
    )
    keygen.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to write it")
    keygen.set_defaults(command_function=_keygen)


def _add_pool(commands: _Commands) -> None:
    pool = commands.add_parser(
        "pool",
        help="show or remove the host memory that a stopped sidecar kept",
        description="A sidecar that stops keeps its host memory, so that the next one of the same "
        "name starts warm (host.after_stop). Run this as the sidecar's user, with its --config.",
    )
    actions = pool.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print where it is, how large, and what it holds")
    _add_config_option(show)
    show.add_argument("--json", action="store_true", help="print it as JSON")
    show.set_defaults(command_function=_pool_show)
    remove = actions.add_parser(
        "remove", help="give it back; ends with 1 where a sidecar uses it, or it is not kvlake's"
    )
    _add_config_option(remove)
    remove.set_defaults(command_function=_pool_remove)


def _add_tenant(commands: _Commands) -> None:
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


def _add_config(commands: _Commands) -> None:
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


def _add_config_option(
    to: _Options,
    help_text: str = "the sidecar's YAML file (default: built-in defaults)",
) -> None:
    to.add_argument("--config", type=Path, metavar="FILE", help=help_text)


def _version() -> str:
    try:
        return importlib.metadata.version("kvlake")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one command line; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Everything after the first `--` is the engine's command, whatever it looks like.
    own = words[: words.index("--")] if words[:1] == ["run"] and "--" in words else words
    options = parser().parse_args(own)
    options.command = words[len(own) + 1 :]
    try:
        return int(options.command_function(options))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("sidecar", "connector", "tiers"):
            raise
        complain(
            f"{package} is not installed; the sidecar's packages are an extra: "
            'pip install "kvlake[sidecar]" (and s3, gcs or azure for that store)'
        )
        return Exit.USAGE
    except UsageError as error:
        complain(str(error))
        return error.code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader (`| head`) had enough. Standard output goes nowhere now, also at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except Exception as error:
        from sidecar.logs import story_whole

        complain(f"a bug ended this command, please report it:\n{story_whole(error)}")
        return Exit.INTERNAL


if __name__ == "__main__":
    sys.exit(main())
