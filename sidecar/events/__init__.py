"""KV cache events: what the sidecar publishes, and what engines publish."""
