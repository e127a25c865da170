"""Exit codes of the `kvlake` command: the one place where they are given out; and ending with one.

Invariants:

* A number, once released, keeps its meaning; service managers and scripts decide by it whether a
  restart can help. The table for operators is in docs/reference/cli.md.
* A process that `leave` was called in ends with its code, whatever threads were left behind.
"""

from __future__ import annotations

import enum
import logging
import os
import sys
import threading
import time
from typing import Final

LEAVE_SECONDS_MAX: Final = 1.0
"""How long a process that is done waits for its threads."""

_logger = logging.getLogger("kvlake.exits")


class Exit(enum.IntEnum):
    """How a `kvlake` command ended. `kvlake run` ends with the engine's code instead."""

    OK = 0
    """Done; for the sidecar: stopped, and nothing was lost."""
    NO = 1
    """The answer is no: a damaged file, a sidecar that cannot be reached."""
    USAGE = 2
    """The command line or the configuration must be changed; another try ends the same way."""
    START = 3
    """The sidecar found no room, port, lock or right to start with; a later try may do better."""
    LOSS = 4
    """The sidecar stopped before all was written, or before others were told of all that was."""
    AT_ONCE = 5
    """A second signal ended the sidecar without a drain."""
    INTERNAL = 70
    """A bug: the log has the traceback. (EX_SOFTWARE of sysexits.h.)"""


def leave(code: int) -> int:
    """Give `code` back, and see to it that the process ends with it.

    Python waits, at its end, for every thread but daemons; one that hangs in the kernel (a listing
    that was left behind, on a mount whose server is gone) would keep the process for ever. Where
    such threads are left after `LEAVE_SECONDS_MAX`, the process ends without them, as a kill would.
    Those of an executor that have nothing to do are told to end by Python itself, in that time.

    For the last thing that a process does: what is to be closed is closed, all that is to be
    printed was printed.
    """
    if _threads_left():
        threading.Thread(target=_end, args=(code,), name="kvlake-end", daemon=True).start()
    return code


def _threads_left() -> int:
    main = threading.main_thread()
    return sum(not (one.daemon or one is main) for one in threading.enumerate())


def _end(code: int) -> None:
    time.sleep(LEAVE_SECONDS_MAX)
    # Past its threads, Python is at its last steps, and takes what time they need.
    if not (left := _threads_left()):
        return
    try:
        _logger.warning(
            "ended without %d threads whose calls do not come back: is this a mount whose server "
            "is gone?",
            left,
        )
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
