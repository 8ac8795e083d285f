"""`--chaos`: kill a worker, the trainer and the server, at different moments of a real run.

All by SIGKILL. The run must end with the same account: nothing lost, nothing trained twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from buffer.server.embedded import EmbeddedServer
from consumer.launch.child import Child


@dataclass(frozen=True, slots=True)
class Strike:
    """Something that dies once the trainer has taken `step` batches. `strike` says whether it was alive."""

    step: int
    what: str
    strike: Callable[[], bool]


class Chaos:
    """The strikes of one run, each delivered once."""

    def __init__(self, strikes: list[Strike]) -> None:
        self._pending = strikes
        self._planned = len(strikes)

    @classmethod
    def plan(cls, steps: int, workers: list[Child], trainer: Child, server: EmbeddedServer | None) -> Chaos:
        """A worker at a fifth of the steps, the trainer at two, the server at three, another worker at four fifths."""
        strikes = [
            Strike(max(1, steps // 5), f"SIGKILL to {workers[0].name}", workers[0].kill),
            Strike(max(2, steps * 2 // 5), "SIGKILL to the trainer", trainer.kill),
        ]
        if server is not None:
            what = "SIGKILL to the server, then a restart"
            strikes.append(Strike(max(3, steps * 3 // 5), what, lambda: _crash(server)))
        strikes.append(Strike(max(4, steps * 4 // 5), f"SIGKILL to {workers[-1].name}", workers[-1].kill))
        return cls(strikes)

    def look(self, taken: int) -> list[str]:
        """Deliver the next strike if it is due and hits something; returns what to tell people."""
        # one at a time, so that each meets a run that has seen the one before
        if not self._pending or self._pending[0].step > taken or not self._pending[0].strike():
            return []
        return [f"chaos at step {taken}: {self._pending.pop(0).what}"]

    @property
    def outcome(self) -> str:
        return f"chaos: {self._planned - len(self._pending)} of {self._planned} strikes were delivered"


def _crash(server: EmbeddedServer) -> bool:
    server.kill()
    server.start()
    return True
