"""What makes KV of one engine right in another: weights, adapters, configuration, ranks."""
