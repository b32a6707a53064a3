"""Small statistics."""


def median(values):
    """The middle value; of an even number of values the mean of the two in the middle."""
    if not values:
        raise ValueError("no values")
    values = sorted(values)
    middle = len(values) // 2
    if len(values) % 2:
        return values[middle]
    return (values[middle - 1] + values[middle]) / 2


def spread(values):
    """Largest less smallest value."""
    return max(values) - min(values)
