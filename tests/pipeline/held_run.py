"""A run that a test holds at a step, and lets go on by some steps.

What waits is an agent loop: each group whose draw belongs to a later step is claimed, and sampled
only when the test allows it. So the run cannot be faster than its test, whatever the machine; its
trainer waits for a batch, and every process of it can be stopped, killed and started as ever.

The hold is exact as long as no group is given up for good: the first N batches need the first
N * batch draws. `[worker] concurrency` must be larger than what may be in flight, or groups that
wait would keep a slot from one that may go on.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from buffer.ids import split_group_id
from buffer.wire.rollout import RolloutState, Status
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.engines.base import Engine

LOOK_S = 0.02


class Hold:
    """The number of draws that may be sampled, in a file which all processes of the run read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def allow(self, draws: int) -> None:
        part = self.file.with_suffix(".part")
        part.write_text(str(draws), encoding="utf-8")
        part.rename(self.file)

    def allows(self, draw: int) -> bool:
        return draw < int(self.file.read_text(encoding="utf-8"))


class HeldLoop(SingleTurnAgentLoop):
    """In a config: `agent_loop_options = { hold = "FILE" }`."""

    def __init__(self, *, hold: str, **parts: Any) -> None:
        super().__init__(**parts)
        self._hold = Hold(Path(hold))
        self._interrupted = asyncio.Event()

    def interrupt(self) -> None:
        """Give up the groups that wait now, in a pause or when the worker leaves."""
        self._interrupted.set()
        self._interrupted = asyncio.Event()

    async def generate_group(
        self, states: list[RolloutState], engine: Engine, gid: str
    ) -> list[RolloutState]:
        interrupted = self._interrupted
        while not self._hold.allows(split_group_id(gid)[1]):
            if interrupted.is_set():
                for state in states:
                    if state.status is not Status.COMPLETED:
                        self._abort(state)
                return states
            await asyncio.sleep(LOOK_S)
        return await super().generate_group(states, engine, gid)
