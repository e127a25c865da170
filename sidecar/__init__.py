"""kvlake's sidecar: the process beside vLLM."""
