"""The running sidecar: handshakes, dispatch, readiness, checks of its surroundings."""
