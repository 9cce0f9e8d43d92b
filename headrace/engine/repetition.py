"""Whether a sequence has begun to say the same thing over and over.

    max_pattern_size 3, min_count 3      ... 8 1 2 1 2 1 2      ends in "1 2" three times: repetition

Only generated tokens count, and only the end is looked at: every token is a chance to look again.
"""

from __future__ import annotations

from headrace.protocol.ipc import RepetitionDetection


def repeats(token_ids: list[int], start: int, rule: RepetitionDetection) -> bool:
    """Whether token_ids[start:] end in one pattern of an allowed size, `min_count` times in a row."""
    length = len(token_ids) - start
    count = rule.min_count
    if length < count * rule.min_pattern_size:
        return False
    last = token_ids[-1]
    for size in range(rule.min_pattern_size, min(rule.max_pattern_size, length // count) + 1):
        # Equal to itself shifted by one pattern: then all its patterns are equal. The last token rules most sizes out.
        if token_ids[-1 - size] == last and token_ids[-size * (count - 1) :] == token_ids[-size * count : -size]:
            return True
    return False
