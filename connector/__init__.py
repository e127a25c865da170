"""The connector inside vLLM's processes: thin, synchronous, never blocking, never raising.

Import `connector.vllm` for the class that vLLM loads. The other modules know nothing of vLLM's
base classes, so that they can be tested, and read, without an engine.
"""
