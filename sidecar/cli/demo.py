"""`kvlake demo`: its options, and the model alone. The scenes are in `sidecar/demo/`."""

from __future__ import annotations

import signal

from sidecar.cli.console import CommandError, Options, say
from sidecar.demo import scenes
from sidecar.demo.model import write_model


def main(options: Options) -> int:
    """Run the demo, or only write its model."""
    if options.model_only is not None:
        try:
            path = write_model(options.model_only)
        except OSError as error:
            raise CommandError(
                f"--model-only {options.model_only}: {error.strerror}; name a folder that exists "
                "or can be created"
            ) from error
        say(f"kvlake run -- vllm serve {path} --dtype bfloat16 --block-size 32")
        return 0

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    # As Ctrl-C does: its engines, servers and folder are removed first.
    signal.signal(signal.SIGTERM, end)
    return scenes.run(as_json=options.json)
