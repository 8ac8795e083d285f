"""Waiting for receipts: one policy for silent and dead workers (I10)."""

from __future__ import annotations

import pytest

from buffer.control.control import Mode
from buffer.errors import PauseTimeout
from tests.buffer.scene import Scene


class Interrupted(Exception):
    """Raised by a caller that waits no longer."""


def test_a_silent_worker_is_named_and_a_dead_one_is_not_waited_for(scene: Scene) -> None:
    scene.worker("w0"), scene.worker("w1")
    scene.pause()
    state = scene.run.control.state()
    scene.beat([], "w0", ack=state.epoch)
    with pytest.raises(PauseTimeout, match="from w1") as refused:
        scene.run.receipts.wait(state, timeout_s=0.0)
    assert "rolloutmq fence" in refused.value.command_hint
    scene.raw.zadd(scene.keys.workers, {"w1": 1})
    assert scene.run.receipts.wait(state, timeout_s=0.0) < 10.0


def test_a_silent_worker_is_fenced_where_the_caller_asks_for_it(scene: Scene) -> None:
    scene.enqueue(1)
    scene.claim(worker="w0")
    scene.pause(Mode.DRAIN)
    scene.run.receipts.wait(fences=True, timeout_s=0.0)
    assert scene.raw.exists(scene.keys.worker("w0")) == 0
    assert len(scene.stream("resume")) == 1
    scene.check()


def test_a_wait_shows_who_is_silent_and_ends_when_the_caller_raises(scene: Scene) -> None:
    scene.worker("w0")
    seen: list[list[str]] = []

    def watch(silent: list[str]) -> None:
        seen.append(silent)
        if len(seen) == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        scene.run.receipts.wait(scene.run.control.set_mode("operator", Mode.KEEP), watch=watch)
    assert seen == [["w0"], ["w0"]]


def test_without_a_state_the_newest_epoch_counts(scene: Scene) -> None:
    scene.worker("w0")
    old = scene.run.control.set_mode("operator", Mode.KEEP)

    def change_and_confirm(silent: list[str]) -> None:
        if silent:
            state = scene.run.control.set_mode("operator", Mode.RUN)
            scene.beat([], "w0", ack=state.epoch)

    scene.run.receipts.wait(watch=change_and_confirm)
    assert scene.run.control.state().epoch == old.epoch + 1
