"""Groups that a pause waits for, because they were interrupted too often already (`tail_batch_max_tries`).

Without it, a response that takes longer than the time between two updates starts again for ever. With it, it is made
under weights that grow old meanwhile, and its pause is as long as it takes, up to a bound.
"""

from __future__ import annotations

from collections.abc import Iterable

from buffer.job import Job
from buffer.limits import RunLimits


class Protection:
    """For one worker. An abort of one control epoch waits for half of `pause_timeout_s`: who waited for the whole of it
    would be fenced, and lose everything that it holds."""

    def __init__(self, limits: RunLimits) -> None:
        self._limits = limits
        self._epoch, self._ends_s = 0, 0.0

    def spared(self, epoch: int, jobs: Iterable[Job], now_s: float) -> set[str]:
        """The gids that the abort of `epoch` shall not interrupt now. `now_s`: any clock that only goes forward."""
        if epoch != self._epoch:
            self._epoch, self._ends_s = epoch, now_s + self._limits.pause_timeout_s / 2
        if now_s >= self._ends_s:
            return set()
        return {job.gid for job in jobs if self._is_protected(job)}

    def _is_protected(self, job: Job) -> bool:
        most = self._limits.tail_tries(job.task)
        return most is not None and job.aborts >= most
