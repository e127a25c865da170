"""Wrappers of an object tier, a file each: retries, deadlines, limits, counters.

Each class is an `ObjectTier` around an `ObjectTier` and does one thing. The caller chooses the
order, which matters: a `Deadline` around `Retrying` bounds all attempts together, and one inside it
bounds each attempt; with `ConcurrencyLimited` inside, either includes the wait for a turn;
`Metered` counts what its caller sees.
"""
