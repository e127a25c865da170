"""Decisions of the sidecar: events and the time go in, commands come out. No I/O, no clock."""
