"""What is known of attached engines: sessions, namespaces, mapped memory, GPUs."""
