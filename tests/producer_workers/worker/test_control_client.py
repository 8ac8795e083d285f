"""What a worker believes of what it hears (I10): answers always, hints only when they are newer."""

from __future__ import annotations

from buffer.control.control import ControlState, Mode
from buffer.model.rollout import PolicyVersion
from producer_workers.worker.control_client import HeardControl


def state(epoch: int, mode: Mode = Mode.KEEP) -> ControlState:
    return ControlState(epoch, mode, (), PolicyVersion("l1", 0), "", "")


def heard_at(epoch: int) -> tuple[HeardControl, list[int]]:
    changes: list[int] = []
    heard = HeardControl(lambda: changes.append(heard.epoch))
    heard.hear_answer(state(epoch), asked=0)
    changes.clear()
    return heard, changes


def test_hint_is_taken_once_and_only_when_it_is_newer() -> None:
    heard, changes = heard_at(5)
    for epoch in (6, 6, 4):
        heard.hear_hint(state(epoch))
    assert heard.epoch == 6
    assert changes == [6]


def test_hint_before_the_first_answer_is_not_taken() -> None:
    heard = HeardControl(lambda: None)
    heard.hear_hint(state(3))
    assert heard.state is None


def test_answer_to_a_question_from_before_a_hint_does_not_undo_it() -> None:
    heard, changes = heard_at(5)
    asked = heard.epoch
    heard.hear_hint(state(6))
    heard.hear_answer(state(5, Mode.RUN), asked)
    assert heard.epoch == 6
    assert changes == [6]


def test_answer_of_a_server_that_rolled_back_is_taken() -> None:
    heard, changes = heard_at(9)
    heard.hear_answer(state(2), asked=9)
    assert heard.epoch == 2
    assert changes == [2]


def test_worker_obeys_only_the_epoch_that_it_carried_out() -> None:
    heard, _ = heard_at(5)
    heard.ack = 5
    assert heard.obeyed
    heard.hear_hint(state(6))
    assert not heard.obeyed
