"""The store's catalogs as this sidecar sees them: written, followed, reconciled, collected."""
