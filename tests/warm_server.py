"""What the server of `tests/warm.py` imports first, and nobody else does.

A process's title lies where the kernel put its command line and environment. It must be set before
anything else moves these; then its forks can set theirs, as vLLM does.

Its imports make no garbage. Its forks enable the collector again.
"""

from __future__ import annotations

import gc

import setproctitle

gc.disable()

setproctitle.setproctitle("kvlake: warm server of the tests")
