"""Sockets between engines and the sidecar."""
