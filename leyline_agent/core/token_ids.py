"""What lists of token ids have in common."""

from __future__ import annotations

from array import array


def common_prefix(left: array[int], right: array[int]) -> int:
    """Return the length of the common prefix, by halving: slices of arrays compare at memory speed."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low
