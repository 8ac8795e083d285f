"""Slows down a worker of which every try fails.

Its code or its machine may be broken while others work: without a pause between its claims, it
would use up the tries of all groups. A single success ends the pauses.
"""

from __future__ import annotations

FREE_FAILURES = 16
"""Failures in a row that cause no pause."""

FIRST_S = 1.0
LONGEST_S = 30.0
"""The longest pause; it takes some 20 more failures to grow to this."""


class FailureBackoff:
    """Counts the failures in a row of one worker, and says how long it claims nothing after them.

    Times are in seconds of the monotonic clock.
    """

    def __init__(self) -> None:
        self._in_row = 0
        self._pause_s = FIRST_S
        self._until_s = 0.0

    def failed(self, now_s: float) -> None:
        """Count a failed try."""
        self._in_row += 1
        if self._in_row > FREE_FAILURES:
            self._pause_s = min(LONGEST_S, self._pause_s * 1.2)
            self._until_s = now_s + self._pause_s

    def succeeded(self) -> None:
        """Count a try that gave a result."""
        self._in_row = 0
        self._pause_s = FIRST_S
        self._until_s = 0.0

    def must_pause(self, now_s: float) -> bool:
        """Return whether nothing is claimed now."""
        return now_s < self._until_s
