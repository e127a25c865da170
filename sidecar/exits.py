"""Exit codes of the `kvlake` command, the signals that stop it, and ending the process.

Invariants:

* A released number keeps its meaning: service managers and scripts decide by it whether a restart
  can help. The table for operators is in docs/reference/cli.md.
* A process that called `leave` ends with its code, even if threads hang.
"""

import enum
import logging
import os
import sys
import threading
import time
from signal import SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2
from typing import Final

STOP_SIGNALS: Final = (SIGTERM, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2)
"""Signals that start a drain. By default the last three end a process at once."""
LEAVE_SECONDS_MAX: Final = 1.0
"""How long an ending process waits for its threads."""

_logger = logging.getLogger("kvlake.exits")


class Exit(enum.IntEnum):
    """How a `kvlake` command ended. `kvlake run` ends with the engine's code instead."""

    OK = 0
    """Done; for the sidecar: stopped, and nothing was lost."""
    NO = 1
    """The answer is no: a damaged file, a sidecar or store that cannot be reached."""
    USAGE = 2
    """The command line or the configuration must be changed; a retry ends the same way."""
    START = 3
    """The sidecar found no room, port, lock or right to start with; a retry may succeed."""
    LOSS = 4
    """The sidecar stopped before all was written, or before others were notified of all writes."""
    AT_ONCE = 5
    """A second signal ended the sidecar without a drain."""
    INTERNAL = 70
    """A bug: the log has the traceback. (EX_SOFTWARE of sysexits.h.)"""


def leave(code: int) -> int:
    """Return `code`, and make sure that the process ends with it.

    At its end Python waits for all threads but daemons. One that hangs in the kernel (in a mount
    whose server is gone) would keep the process for ever. If such threads are left after
    `LEAVE_SECONDS_MAX`, the process ends without them, as if killed. Call it last, when everything
    is closed and printed.
    """
    if _threads_left():
        threading.Thread(target=_end, args=(code,), name="kvlake-end", daemon=True).start()
    return code


def _threads_left() -> int:
    main = threading.main_thread()
    return sum(not (one.daemon or one is main) for one in threading.enumerate())


def _end(code: int) -> None:
    time.sleep(LEAVE_SECONDS_MAX)
    # Without threads, Python is in its last steps, which may take longer.
    if left := _threads_left():
        try:
            _logger.warning(
                "ended without %d threads whose calls do not come back: is this a mount whose "
                "server is gone?",
                left,
            )
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
