"""What the sidecar shows of itself over HTTP: metrics, health, status."""
