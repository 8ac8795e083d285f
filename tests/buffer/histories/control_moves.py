"""Who pauses a run and who continues it, and producers that replace each other (I3, I7, I10)."""

from __future__ import annotations

from typing import Any

import pytest

from buffer.control.control import Mode
from buffer.errors import Fenced, RoleHeld
from buffer.groups.claim import Enqueued
from buffer.ids import new_nonce
from tests.buffer.histories.model import ALL_LANES
from tests.buffer.histories.world import World


class ControlMoves(World):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.old_producers: list[str] = []

    def pause(self, who: Any, mode: str, lanes: str) -> None:
        """The operator and the trainer hold the run apart: what both leave open is open."""
        nonce = self.scene.trainer if who == "trainer" else ""
        before = self.scene.run.control.state().epoch
        state = self.scene.run.control.set_mode(who, Mode(mode), lanes=lanes, nonce=nonce)
        self.open_lanes[who] = ALL_LANES if mode == "run" else frozenset(lanes.split())
        self.modes[who] = Mode(mode)
        assert set(state.lanes) == self.lanes
        assert state.mode == self.mode
        assert state.epoch > before

    def go_on(self) -> None:
        for who in [who for who, lanes in self.open_lanes.items() if lanes != ALL_LANES]:
            self.pause(who, "run", "")

    def change_producer(self, is_left: bool) -> None:
        """The next one opens when the last has gone, or by force; it goes on where the cursor is."""
        control = self.scene.run.control
        old = self.scene.producer
        control.renew_role("producer", old, closing=is_left)
        if not is_left:
            with pytest.raises(RoleHeld):
                control.open_producer(new_nonce())
        self.scene.open_producer(take_over=not is_left)
        self.old_producers.append(old)

    def zombie_producer(self, task: str, which: int) -> None:
        if not self.old_producers:
            return
        nonce = self.old_producers[which % len(self.old_producers)]
        jobs = self.scene.run.jobs
        before = self.totals()
        for call in (
            lambda: jobs.enqueue(nonce, new_nonce(), task, self.tasks[task].cursor, [0], 1000),
            lambda: jobs.reissue(nonce, task, "aborted", 1000),
            lambda: jobs.next_draw(nonce, task),
            lambda: self.scene.run.control.renew_role("producer", nonce),
        ):
            with pytest.raises(Fenced):
                call()
        assert self.totals() == before

    def enqueue_behind_the_cursor(self, task: str, back: int) -> None:
        """A producer that believes in an older cursor draws nothing twice."""
        cursor = self.tasks[task].cursor
        if back > cursor:
            return
        done = self.scene.run.jobs.enqueue(
            self.scene.producer, new_nonce(), task, cursor - back, [0], 1000
        )
        assert done == Enqueued(0, cursor)
