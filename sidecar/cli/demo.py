"""`kvlake demo`: the scenes of `sidecar/demo/` in a folder of their own, or the model alone."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import tempfile
from pathlib import Path

from sidecar.cli.console import CommandError, Options, complain, say
from sidecar.demo.model import write_model
from sidecar.demo.processes import ProcessFailed
from sidecar.demo.scenes import Demo, Output
from sidecar.exits import Exit


def main(options: Options) -> Exit:
    """Run the demo, or only write its model. The folder is removed unless something failed."""
    if options.model_only is not None:
        try:
            path = write_model(options.model_only)
        except OSError as error:
            raise CommandError(
                f"--model-only {options.model_only}: {error.strerror}; name a folder that exists "
                "or can be created"
            ) from error
        say(f"kvlake run -- vllm serve {path} --dtype bfloat16 --block-size 32")
        return Exit.OK

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    # As Ctrl-C does: its engines, servers and folder are removed first.
    signal.signal(signal.SIGTERM, end)
    folder = Path(tempfile.mkdtemp(prefix="kvlake-demo-"))
    demo, problem = Demo(folder, Output(quiet=options.json)), ""
    try:
        demo.run()
        if not demo.results.good:
            problem = "a scene failed"
    except ProcessFailed as error:
        problem = str(error)
    except (KeyboardInterrupt, SystemExit):
        # Who ends it does not look for logs.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if options.json:
        say(json.dumps(dataclasses.asdict(demo.results)))
    if problem:
        complain(f"{problem}\nlogs are in {folder}", "\nkvlake demo failed")
        return Exit.NO
    shutil.rmtree(folder, ignore_errors=True)
    return Exit.OK
