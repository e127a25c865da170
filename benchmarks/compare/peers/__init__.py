"""kvlake beside plain vLLM, vLLM's own offloading and LMCache, on one machine.

Every arm is an OpenAI server with the cache that belongs to it. All of them are alive at once, take
turns on the same core, and get the same requests from tools that others wrote. `make compare` runs
it; `docs/evidence/compare.md` is its result.
"""
