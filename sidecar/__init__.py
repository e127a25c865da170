"""kvlake's sidecar: the process beside vLLM."""

import importlib.metadata


def version() -> str:
    """The installed release."""
    try:
        return importlib.metadata.version("kvlake")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
