"""vLLM is imported here once: its own imports warn, and the house turns warnings into errors."""

from __future__ import annotations

import os
import warnings

# Before vLLM is imported: it sets up its logging then.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.core.sched.scheduler
    import vllm.v1.structured_output
    import vllm.v1.worker.utils  # noqa: F401
