"""A sidecar that leaks: `sidecar.cli` with a thread that opens a descriptor and never closes it.

For the test of the soak itself: a harness that does not see this sees nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from sidecar.cli import main

LEAK_SECONDS = 0.5


def _leak() -> None:
    while True:
        os.open("/dev/null", os.O_RDONLY)
        time.sleep(LEAK_SECONDS)


if __name__ == "__main__":
    threading.Thread(target=_leak, daemon=True).start()
    sys.exit(main())
