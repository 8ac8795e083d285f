"""Why something is not done, said when that changes and not at every try."""

from __future__ import annotations

import logging


class SaidOnce:
    """Says `what`, and why, to a log."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log, self._what, self._reason = log, what, ""

    def say(self, reason: str) -> None:
        """Why it is so now; "" where it is not."""
        if reason and reason != self._reason:
            self._log.warning("%s: %s", self._what, reason)
        self._reason = reason
