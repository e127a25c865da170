"""The host pool: slots of host memory in files that outlive the sidecar."""
