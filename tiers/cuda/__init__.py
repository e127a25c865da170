"""GPU memory: the only package that touches CUDA, through the driver API.

Importing it starts nothing: the driver is loaded and initialized by `Driver()`, in the process that
asks for it, never before a fork.
"""
