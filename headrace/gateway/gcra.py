"""A rate of so many units a minute, kept as one integer (GCRA): exact, no timer, no history of requests.

The bucket holds `limit` units and empties at `limit` units a minute. Counted in ticks, of which one unit is
`PERIOD_NS` and a nanosecond takes away `limit`, everything is an integer:

    limit 60 a minute      level after 3 requests at once = 3 units; 1 s later 2 units; room = 60 - level

Tokens are not known beforehand. An estimate is reserved, which takes room and does not drain; when the request is
done the reservation goes and what was really used comes in. So the sum of the two never exceeds the limit at
admission, and a reservation that was too high gives all of its room back.
"""

from __future__ import annotations

PERIOD_NS = 60 * 10**9


class Rate:
    """Units a minute. All `now_ns` are of one monotonic clock."""

    __slots__ = ("_empty_at", "limit", "reserved")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reserved = 0
        """Units that running requests may still use."""
        self._empty_at = 0  # ticks: the time at which the bucket will be empty, times `limit`

    def wait_ns(self, units: int, now_ns: int) -> int | None:
        """0 = `units` fit now. Otherwise how long until they do, at the latest of what is known; None = never."""
        if units > self.limit:
            return None
        over = self._level(now_ns) + (units + self.reserved - self.limit) * PERIOD_NS
        return -(-over // self.limit) if over > 0 else 0

    def take(self, units: int, now_ns: int) -> None:
        """Use units now, whether there is room or not."""
        self._empty_at = max(self._empty_at, now_ns * self.limit) + units * PERIOD_NS

    def remaining(self, now_ns: int) -> int:
        """Units that fit now."""
        return self.room(now_ns)[0]

    def room(self, now_ns: int) -> tuple[int, int]:
        """Units that fit now, and how many nanoseconds it takes until all fit again: if nothing more comes, and
        reservations are used in full."""
        taken = self._level(now_ns) + self.reserved * PERIOD_NS
        left = self.limit - -(-taken // PERIOD_NS)
        return left if left > 0 else 0, -(-taken // self.limit)

    def change_limit(self, limit: int, now_ns: int) -> None:
        """Another limit from now on; what is used stays used."""
        level = self._level(now_ns)
        self.limit = limit
        self._empty_at = now_ns * limit + level

    def _level(self, now_ns: int) -> int:
        level = self._empty_at - now_ns * self.limit
        return level if level > 0 else 0
