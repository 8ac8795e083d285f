"""How long pauses took, as a histogram: seconds from `pause()` to the last receipt.

pause/count p50_s p99_s        of all pauses of this trainer; percentiles are of the newest 1,000
pause/le_<seconds>             how many took at most so long, as Prometheus counts
"""

from __future__ import annotations

from collections import deque

BOUNDS_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0, 300.0)


class PauseTimes:
    """Pauses of one trainer; what it holds does not grow with their number."""

    def __init__(self) -> None:
        self.count = 0
        self._at_most = dict.fromkeys(BOUNDS_S, 0)
        self._newest: deque[float] = deque(maxlen=1000)

    def add(self, seconds: float) -> None:
        self.count += 1
        self._newest.append(seconds)
        for bound_s in BOUNDS_S:
            self._at_most[bound_s] += seconds <= bound_s

    def metrics(self) -> dict[str, float]:
        """Nothing before the first pause. p50 and p99 as in `task/p50_s`: elements at n // 2 and int(0.99 n)."""
        if not self._newest:
            return {}
        times = sorted(self._newest)
        named = {f"pause/le_{bound_s:g}": float(count) for bound_s, count in self._at_most.items()}
        percentiles = {"pause/p50_s": times[len(times) // 2], "pause/p99_s": times[int(0.99 * len(times))]}
        return {"pause/count": float(self.count), **percentiles, **named}
