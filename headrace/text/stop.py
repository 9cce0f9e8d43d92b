"""Stop strings in a stream of text, wherever the pieces are cut.

Each stop string has its own small automaton: `matched` counts how many of its first characters are the last
characters seen (Knuth, Morris, Pratt). The largest count is how much text must be held back, because it may
still turn out to be the start of a stop string; everything before it can go out at once.

    stop "END", text "the E" -> out "the ", held "E"; then "ight" -> out "Eight", or "ND" -> stopped, out ""
"""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Cuts one sequence's text at the first stop string.

    The match that is complete first wins; of several that end at the same character, the first in the list.
    The result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool = False) -> None:
        """Raises ValueError for an empty stop string."""
        if not all(stop):
            raise ValueError("a stop string is empty")
        self._stop = tuple(stop)
        self._include_in_output = include_in_output
        self._fallbacks = [_fallback(s) for s in self._stop]
        self._matched = [0] * len(self._stop)
        self._held = ""
        self.hit: str | None = None
        """The stop string that ended the text, None while there is none."""

    def add(self, text: str, check: bool = True) -> tuple[str, str | None]:
        """Text that may go out now, and the stop string found, if any.

        After a hit everything is swallowed. With `check` False (before `min_tokens`) the text passes
        unlooked-at, together with what was held, and cannot be part of a match.
        """
        if self.hit is not None or not self._stop:
            return ("" if self._stop else text), self.hit
        seen = self._held + text
        if not check:
            self._matched = [0] * len(self._stop)
            self._held = ""
            return seen, None
        start = len(self._held)
        for end, character in enumerate(text, start + 1):
            for index, wanted in enumerate(self._stop):
                matched = self._matched[index]
                while matched and wanted[matched] != character:
                    matched = self._fallbacks[index][matched]
                if wanted[matched] == character:
                    matched += 1
                if matched == len(wanted):
                    self.hit = wanted
                    self._held = ""
                    return seen[: end if self._include_in_output else end - matched], wanted
                self._matched[index] = matched
        kept = len(seen) - max(self._matched)
        self._held = seen[kept:]
        return seen[:kept], None

    def flush(self) -> str:
        """The text still held when the sequence ended for another reason."""
        held, self._held = self._held, ""
        return held


def _fallback(wanted: str) -> list[int]:
    """Entry n: length of the longest proper beginning of wanted[:n] that is also its ending."""
    table = [0] * (len(wanted) + 1)
    length = 0
    for n in range(1, len(wanted)):
        while length and wanted[length] != wanted[n]:
            length = table[length]
        if wanted[length] == wanted[n]:
            length += 1
        table[n + 1] = length
    return table
