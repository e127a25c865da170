"""kvlake's sidecar: the process beside vLLM (docs/architecture.md)."""
