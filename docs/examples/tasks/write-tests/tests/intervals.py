"""Closed intervals of whole numbers, as pairs (low, high) with low <= high."""


def merge(intervals):
    """The same numbers as few, sorted intervals. Intervals that touch, such as (1, 2) and (3, 4), become one."""
    merged = []
    for low, high in sorted(intervals):
        if low > high:
            raise ValueError(f"({low}, {high}) is no interval")
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def size(intervals):
    """How many different numbers there are in them."""
    return sum(high - low + 1 for low, high in merge(intervals))
