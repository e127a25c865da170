"""The scheduler role: decides what each request loads and what is stored of it; one per engine.

`role.py` takes the calls of vLLM's scheduler. Owns requests, lookups and outstanding stores. Does
not own the connection to the sidecar (`connector/client.py`) nor keys (`connector/identity`).
"""
