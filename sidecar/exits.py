"""Exit codes of the `kvlake` command: the one place where they are given out.

Invariant: a number, once released, keeps its meaning; service managers and scripts decide by it
whether a restart can help. The table for operators is in docs/operations.md.
"""

from __future__ import annotations

import enum


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
