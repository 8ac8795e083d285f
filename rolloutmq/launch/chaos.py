"""`rolloutmq run --chaos`: kill processes of the run at planned steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from buffer.redis.server.embedded import EmbeddedServer
from rolloutmq.launch.child import Child


@dataclass(frozen=True, slots=True)
class Strike:
    """A process to kill once the trainer has taken `step` batches.

    `strike` kills it and returns whether it was alive.
    """

    step: int
    what: str
    strike: Callable[[], bool]


class Chaos:
    """The strikes of one run, each delivered once, all by SIGKILL."""

    def __init__(self, strikes: list[Strike]) -> None:
        self._pending = strikes
        self._planned = len(strikes)

    @classmethod
    def plan(
        cls, steps: int, workers: list[Child], trainer: Child, server: EmbeddedServer | None
    ) -> Chaos:
        """Plan a strike at each fifth of the steps: a worker, the trainer, the server, a worker."""
        strikes = [
            Strike(max(1, steps // 5), f"SIGKILL to {workers[0].name}", workers[0].kill),
            Strike(max(2, steps * 2 // 5), "SIGKILL to the trainer", trainer.kill),
        ]
        if server is not None:
            what = "SIGKILL to the server, then a restart"
            strikes.append(Strike(max(3, steps * 3 // 5), what, lambda: _crash(server)))
        strikes.append(
            Strike(max(4, steps * 4 // 5), f"SIGKILL to {workers[-1].name}", workers[-1].kill)
        )
        return cls(strikes)

    def strike(self, taken: int) -> list[str]:
        """Deliver the next strike if it is due and hits a live process; return what to report."""
        # one at a time, so that each hits a run that has recovered from the one before
        if not self._pending or self._pending[0].step > taken or not self._pending[0].strike():
            return []
        return [f"chaos at step {taken}: {self._pending.pop(0).what}"]

    @property
    def outcome(self) -> str:
        return (
            f"chaos: {self._planned - len(self._pending)} of {self._planned} strikes were delivered"
        )


def _crash(server: EmbeddedServer) -> bool:
    server.kill()
    server.start()
    return True
