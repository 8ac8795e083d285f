"""A producer that dies between any two of its calls to the server: the next one continues (I3)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from buffer.redis.store import Store
from buffer.wire.rollout import Status
from producer_workers.producer.producer import Producer
from tests.buffer.scene import rollout
from tests.pipeline.mixture import Mixture

CHANGES = {
    "batch_size": 7,
    "stale_threshold": 2,
    "on_straggler": "retry",
    "tail_batch_trigger_size": 2,
}


class Killed(BaseException):
    """A SIGKILL as seen from inside: no handler catches it."""


def prepare(make_mixture: Callable[..., Mixture]) -> Mixture:
    """Return a run whose next round reissues from every pool, and draws prompts."""
    mixture = make_mixture(CHANGES)
    with mixture.manager.opened():
        mixture.rounds(2)
    mixture.take(1)
    mixture.publish(1)
    weights = mixture.run.control.state().weights
    for status in (Status.EXPIRED, Status.EXPIRED, Status.ABORTED):
        mixture.run.buffer.put("math", [[rollout(status, weights)]])
    return mixture


def produce(mixture: Mixture, manager: Producer) -> None:
    """Until there is nothing to do."""
    with manager.opened(take_over=True):
        while manager.round(mixture.run.control.state()):
            pass


def outcome(mixture: Mixture) -> dict[str, Any]:
    """Return all that producing decides: the jobs by queue, and the cursors."""
    scene = mixture.scene
    tasks = mixture.run.limits.tasks
    lines = {
        (task, lane): sorted(scene.stream(lane, task))
        for task in tasks
        for lane in ("resume", "fresh")
    }
    cursors = {task: mixture.run.jobs.cursor(task) for task in tasks}
    return {"lines": lines, "cursors": cursors}


@pytest.mark.slow
def test_the_next_producer_ends_what_one_began_that_died_at_any_call(
    make_mixture: Callable[..., Mixture], monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = prepare(make_mixture)
    produce(undisturbed, undisturbed.new_manager())
    expected = outcome(undisturbed)
    assert len(expected["lines"]["math", "resume"]) == 3
    for at in count(1):
        mixture = prepare(make_mixture)
        with monkeypatch.context() as patch:
            kill_before_call(patch, at)
            died = dies(mixture)
        if not died:
            assert at > 15  # a round makes at least this many calls
            return
        produce(mixture, mixture.new_manager())
        assert outcome(mixture) == expected, f"died before call {at}"
        mixture.scene.check()


def dies(mixture: Mixture) -> bool:
    try:
        produce(mixture, mixture.new_manager())
    except Killed:
        return True
    return False


def kill_before_call(patch: pytest.MonkeyPatch, at: int) -> None:
    """Raise Killed where this thread would make its `at`-th call; the one before it is done."""
    ask = Store.retrying
    calls = count(1)
    me = threading.get_ident()

    def retrying(store: Store, *args: Any, **options: Any) -> Any:
        if threading.get_ident() == me and next(calls) == at:
            raise Killed
        return ask(store, *args, **options)

    patch.setattr(Store, "retrying", retrying)
