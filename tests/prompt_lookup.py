"""Prompt lookup as a plain search, the reference for all its forms."""

from collections.abc import Sequence


def search(text: Sequence[int], k: int, shortest: int, longest: int) -> list[int]:
    """Return the tokens after the last earlier occurrence of the longest suffix that has one."""
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[len(text) - size :]:
                period = text[end:]
                return [period[i % len(period)] for i in range(k)]
    return []


def match_length(text: Sequence[int], longest: int) -> int:
    """Return the length of the longest suffix that has occurred before, by trying every end."""
    last = len(text) - 1
    best = 0
    for end in range(last):
        size = 0
        while size < longest and size <= end and text[end - size] == text[last - size]:
            size += 1
        best = max(best, size)
    return best
