"""Carries out what the core decides: copies, reads, writes, slots and the shared index."""
