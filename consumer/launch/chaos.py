"""`--chaos`: kill a worker, the trainer and the server, at different moments of a real run.

All by SIGKILL. The run must end with the same account: nothing lost, nothing trained twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from buffer.embedded import EmbeddedServer
from consumer.launch.child import Child


@dataclass(frozen=True, slots=True)
class Strike:
    """Something that dies when the trainer has taken `step` batches."""

    step: int
    what: str
    strike: Callable[[], None]


class Chaos:
    """The strikes of one run, each delivered once."""

    def __init__(self, strikes: list[Strike]) -> None:
        self._pending = strikes
        self.delivered: list[Strike] = []

    @classmethod
    def plan(cls, steps: int, workers: list[Child], trainer: Child, server: EmbeddedServer | None) -> Chaos:
        """A worker at a fifth of the steps, the trainer at two, the server at three, another worker at four fifths."""
        strikes = [
            Strike(max(1, steps // 5), f"SIGKILL to {workers[0].name}", workers[0].kill),
            Strike(max(2, steps * 2 // 5), "SIGKILL to the trainer", trainer.kill),
        ]
        if server is not None:
            strikes.append(Strike(max(3, steps * 3 // 5), "SIGKILL to the server, then a restart", lambda: _crash(server)))
        strikes.append(Strike(max(4, steps * 4 // 5), f"SIGKILL to {workers[-1].name}", workers[-1].kill))
        return cls(strikes)

    def look(self, taken: int) -> list[str]:
        """Deliver what is due; returns what to tell people."""
        due = [strike for strike in self._pending if strike.step <= taken]
        for strike in due:
            strike.strike()
            self._pending.remove(strike)
            self.delivered.append(strike)
        return [f"chaos at step {taken}: {strike.what}" for strike in due]


def _crash(server: EmbeddedServer) -> None:
    server.kill()
    server.start()
