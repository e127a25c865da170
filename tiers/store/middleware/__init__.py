"""Wrappers of an object tier, a file each: retries, deadlines, limits, counters.

Each class is an `ObjectTier` around an `ObjectTier` and does one thing. The caller that stacks them
chooses the order, and the order has a meaning: a `Deadline` around `Retrying` bounds all attempts
together, and one inside it bounds each attempt; `Limited` inside either makes waiting for a turn
count; `Metered` sees what its own caller sees.
"""
