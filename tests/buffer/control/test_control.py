"""The control state: trainer and operator apart, epochs, weights (I7, I10)."""

from __future__ import annotations

import operator
import select
from collections.abc import Callable
from contextlib import closing
from functools import partial

import pytest
import redis

from buffer.control.control import ControlState, Mode, Role
from buffer.control.control_line import ControlConnection
from buffer.control.progress import Leftovers
from buffer.control.task_status import ProduceBatchStatus, batch_status
from buffer.errors import (
    LostRun,
    PauseTimeout,
    RoleHeld,
    RunDamaged,
    RunExists,
    RunNotFound,
    SchemaVersionError,
)
from buffer.ids import new_nonce
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from buffer.run import record
from buffer.run.continuation import Start
from buffer.run.run import Run
from buffer.run.settings import LiveSettings
from buffer.wire.rollout import PolicyVersion
from tests.buffer.scene import FIRST, LIMITS, Scene

ALL = ("eval", "resume", "fresh")


@pytest.mark.parametrize(
    ("operator", "trainer", "mode"),
    [
        (Mode.KEEP, Mode.ABORT, Mode.ABORT), (Mode.DRAIN, Mode.ABORT, Mode.ABORT),
        (Mode.ABORT, Mode.KEEP, Mode.ABORT), (Mode.KEEP, Mode.DRAIN, Mode.DRAIN),
        (Mode.RUN, Mode.KEEP, Mode.KEEP), (Mode.DRAIN, Mode.FINISH, Mode.FINISH),
    ],
)  # fmt: skip
def test_the_stricter_of_two_holders_rules(
    scene: Scene, operator: Mode, trainer: Mode, mode: Mode
) -> None:
    nonce = scene.open_trainer()
    scene.run.control.set_mode("operator", operator)
    assert scene.run.control.set_mode("trainer", trainer, nonce=nonce).mode is mode


def test_a_server_that_lost_the_end_of_a_pause_learns_it_from_the_trainers_heartbeat(
    scene: Scene,
) -> None:
    """Else the trainer would wait for groups, and the workers for the trainer, for ever."""
    control, nonce = scene.run.control, scene.open_trainer()
    opened = scene.raw.hgetall(scene.keys.control)
    control.set_mode("trainer", Mode.ABORT, nonce=nonce)
    paused = scene.raw.hgetall(scene.keys.control)
    control.set_mode("trainer", Mode.RUN, nonce=nonce)
    for lost in (paused, opened):
        scene.raw.delete(scene.keys.control)
        scene.raw.hset(scene.keys.control, mapping=lost)
        state = control.renew_role("trainer", nonce)
        assert (state.mode, state.lanes) == (Mode.RUN, ALL)
        assert control.renew_role("trainer", nonce).epoch == state.epoch
    late = Run.open(scene.store, scene.name).control  # as of an earlier change
    control.set_mode("trainer", Mode.KEEP, nonce=nonce)
    assert late.renew_role("trainer", nonce).mode is Mode.KEEP
    # a new trainer begins to count again
    following = new_nonce()
    scene.run.trainers.open(following, step=0, lineage="l2", take_over=True)
    before = scene.raw.hgetall(scene.keys.control)
    late.set_mode("trainer", Mode.RUN, nonce=following)
    scene.raw.hset(scene.keys.control, mapping=before)
    scene.raw.hdel(scene.keys.control, "trainer_change")
    assert late.renew_role("trainer", following).mode is Mode.RUN


def test_continue_ends_the_pause_of_a_trainer_that_is_gone_and_of_no_other(
    make_scene: Callable[..., Scene],
) -> None:
    """It died between pause and continue: nobody else would ever let the run go on."""
    scene = make_scene(role_timeout_ms=60_000)
    nonce = scene.open_trainer()
    set_mode = scene.run.control.set_mode
    set_mode("trainer", Mode.ABORT, nonce=nonce)
    set_mode("operator", Mode.KEEP)
    assert set_mode("operator", Mode.RUN, orphan=True).mode is Mode.ABORT  # it lives
    scene.raw.hset(scene.keys.control, "trainer_seen_ms", scene.now_ms() - 60_001)
    assert set_mode("operator", Mode.RUN).mode is Mode.ABORT  # and nobody asked for that
    state = set_mode("operator", Mode.RUN, orphan=True)
    assert (state.mode, state.lanes) == (Mode.RUN, ALL)
    # it was only slow: what it does next is done as ever
    assert set_mode("trainer", Mode.KEEP, nonce=nonce).mode is Mode.KEEP
    scene.run.control.renew_role("trainer", nonce, closing=True)
    assert set_mode("operator", Mode.RUN, orphan=True).mode is Mode.RUN


def test_a_finished_run_is_not_continued_by_an_operator(scene: Scene) -> None:
    nonce = scene.open_trainer()
    scene.run.control.set_mode("trainer", Mode.FINISH, nonce=nonce)
    scene.run.control.renew_role("trainer", nonce, closing=True)
    assert scene.run.control.set_mode("operator", Mode.RUN, orphan=True).mode is Mode.FINISH


@pytest.mark.parametrize("role", ["trainer", "producer"])
def test_role_of_a_dead_holder_is_free_although_the_clock_was_stepped_back(
    scene: Scene, role: Role
) -> None:
    def opened() -> None:
        scene.open_trainer() if role == "trainer" else scene.run.control.open_producer(new_nonce())

    opened()
    seen_ms = scene.now_ms() + 3_600_000
    scene.raw.hset(scene.keys.control, f"{role}_seen_ms", seen_ms)
    assert not scene.run.control.holder(role).is_alive
    opened()
    with pytest.raises(RoleHeld):
        opened()


def test_a_run_that_is_created_while_another_process_opens_it_is_not_damaged(
    store: Store, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = record.read_hash

    def create_after(store: Store, what: str, key: str) -> dict[str, str]:
        monkeypatch.setattr(record, "read_hash", read)
        fields = read(store, what, key)
        if not fields:
            monkeypatch.setattr(record, "read_hash", read)
            Run.create(store, run_name, new_nonce(), LIMITS)
        return fields

    monkeypatch.setattr(record, "read_hash", create_after)
    assert Run.open(store, run_name).name == run_name


def test_a_line_hears_of_a_pause_and_its_receipt_counts_once_nothing_is_held(scene: Scene) -> None:
    if scene.run.store.url.startswith("memory:"):
        pytest.skip("a server in memory has no socket")
    scene.enqueue(1)
    (job,) = scene.claim()
    heard: list[int] = []
    answered: list[tuple[str, int, int]] = []

    def hear(count: int) -> None:
        while len(heard) + len(answered) < count:
            assert select.select([line], [], [], 60)[0]
            line.receive(
                lambda state: heard.append(state.epoch),
                lambda *what: answered.append((what[0].mode, *what[1:])),
            )

    with closing(ControlConnection(scene.store, scene.keys, "w0", scene.worker())) as line:
        line.send_receipt(0, known_epoch=1)
        hear(1)
        epoch = scene.pause(Mode.ABORT)
        hear(2)
        assert heard == [epoch]
        line.send_receipt(epoch, known_epoch=epoch)
        hear(3)
        assert scene.run.receipts.silent() == ["w0"]
        scene.run.jobs.release("w0", job, "handback")
        line.send_receipt(epoch, known_epoch=epoch)
        hear(4)
        assert scene.run.receipts.silent() == []
        assert answered == [
            (Mode.RUN, 0, 1),
            (Mode.ABORT, epoch, epoch),
            (Mode.ABORT, epoch, epoch),
        ]


def test_a_line_of_a_worker_that_was_replaced_or_cut_off_says_so(scene: Scene) -> None:
    if scene.run.store.url.startswith("memory:"):
        pytest.skip("a server in memory has no socket")
    scene.worker()
    answers: list[object] = []
    with closing(ControlConnection(scene.store, scene.keys, "w0", new_nonce())) as line:
        line.send_receipt(1, known_epoch=1)
        while not answers:
            assert select.select([line], [], [], 60)[0]
            line.receive(answers.append, lambda *what: answers.append(what))
        assert answers == [(None, 1, 1)]
        scene.run.store.client.client_kill_filter(_type="pubsub")
        assert select.select([line], [], [], 60)[0]
        with pytest.raises(redis.ConnectionError, match="closed the connection"):
            line.receive(answers.append, lambda *what: answers.append(what))


def test_bell_wakes_whoever_waits_and_is_bounded(scene: Scene) -> None:
    bell = scene.keys.wake_up("producer")
    scene.pause()
    assert scene.store.wait(bell, 5)
    assert not scene.store.wait(bell, 0.0)
    scene.raw.rpush(bell, *["1"] * 63)
    for mode in (Mode.DRAIN, Mode.ABORT, Mode.KEEP):
        scene.pause(mode)
    assert scene.raw.llen(bell) == 64


def test_run_is_made_once_and_known_by_its_nonce(scene: Scene) -> None:
    run = scene.run
    again = Run.create(scene.store, scene.name, run.nonce, RunLimits(lease_ms=777), FIRST, "/w")
    assert again.limits.lease_ms == 777
    opened = Run.open(scene.store, scene.name)
    assert (opened.nonce, opened.limits) == (run.nonce, again.limits)
    before = scene.dump()
    with pytest.raises(RunExists, match=scene.name):
        Run.create(scene.store, scene.name, new_nonce(), LIMITS, FIRST, "/w")
    assert scene.dump() == before
    assert scene.name in Run.names(scene.store)


def test_run_that_is_missing_or_of_another_schema_is_not_opened(scene: Scene) -> None:
    with pytest.raises(RunNotFound, match="nowhere"):
        Run.open(scene.store, "nowhere")
    scene.raw.hset(scene.keys.meta, "schema", "99")
    with pytest.raises(SchemaVersionError, match="99"):
        Run.open(scene.store, scene.name)


def test_control_is_never_made_on_a_server_without_the_run(scene: Scene) -> None:
    scene.raw.unlink(scene.keys.meta, scene.keys.control)
    with pytest.raises(LostRun):
        scene.run.control.set_mode("operator", Mode.DRAIN)
    with pytest.raises(RunNotFound):
        scene.run.control.state()
    assert scene.raw.exists(scene.keys.control) == 0


@pytest.mark.parametrize("left", ["control", "ledger:train"])
def test_what_is_left_of_a_run_without_its_meta_is_no_new_run(scene: Scene, left: str) -> None:
    scene.open_trainer()
    scene.raw.unlink(*(scene.keys.prefix + name for name in scene.dump() if name != left))
    before = scene.dump()
    with pytest.raises(RunDamaged, match="meta is gone"):
        Run.create(scene.store, scene.name, scene.run.nonce, LIMITS, FIRST, "/w")
    assert scene.dump() == before != {}


def test_create_run_leaves_a_run_finished_that_has_nothing_left_to_do(scene: Scene) -> None:
    scene.open_trainer()
    scene.run.control.set_mode("trainer", Mode.FINISH, nonce=scene.trainer)
    scene.run.set(LiveSettings(steps=LIMITS.steps + 5))
    for done, mode in ((LIMITS.steps + 5, Mode.FINISH), (LIMITS.steps, Mode.RUN)):
        start = Start(is_done=partial(operator.ge, done))
        Run.create(scene.store, scene.name, scene.run.nonce, LIMITS, FIRST, "/w", start=start)
        assert scene.run.control.state().mode is mode


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


STATUS = ProduceBatchStatus
TASKS = {"math": TaskLimits(), "quiz": TaskLimits(eval_of="math")}


def state(mode: Mode = Mode.RUN, lanes: tuple[str, ...] = ALL, version: int = 4) -> ControlState:
    return ControlState(1, mode, lanes, PolicyVersion("l", version), "", "")


def test_tokens_that_expire_earlier_expire_the_batch_earlier() -> None:
    limits = RunLimits(stale_threshold=4, token_threshold=2, tasks=TASKS)
    assert batch_status(state(), 6, limits) is STATUS.NORMAL
    assert batch_status(state(), 7, limits) is STATUS.EXPIRED_BATCH


def test_the_strictest_task_of_a_batch_decides_when_its_weights_are_too_old() -> None:
    strict = TaskLimits(stale_threshold=1)
    limits = RunLimits(stale_threshold=4, tasks={**TASKS, "code": strict})
    assert [batch_status(state(), step, limits) for step in (5, 6)] == [
        STATUS.NORMAL,
        STATUS.EXPIRED_BATCH,
    ]
    strict.weight = 0.0
    assert batch_status(state(), 6, limits) is STATUS.NORMAL


@pytest.mark.parametrize("mode", [Mode.ABORT, Mode.DRAIN, Mode.KEEP])
def test_pause_comes_before_expiry_and_the_end_before_a_pause(mode: Mode) -> None:
    limits = RunLimits(stale_threshold=1)
    for lanes in ((), ("eval",)):
        assert batch_status(state(mode, lanes), 99, limits) is STATUS.UPDATE_WEIGHT_AND_ABORT
    assert batch_status(state(Mode.FINISH, ()), 99, limits) is STATUS.FINISH


def test_progress_counts_what_the_scripts_moved(scene: Scene) -> None:
    scene.open_trainer()
    before = scene.run.read_progress()
    scene.ready(0, 0, 0)
    scene.enqueue(1)
    scene.submit(scene.claim()[0], filtered=True)
    scene.take(1, math=2)
    progress = scene.run.read_progress()
    math = progress.since(before)["math"]
    assert (progress.next_consumer_step, math.consumed, math.filtered, math.enqueued) == (
        2,
        2,
        1,
        4,
    )
    assert (math.raw_rewards_sum, math.raw_rewards_count) == (8.0, 8)
    assert (math.produced_samples, math.produced_tokens, math.target) == (8, 16, 1000)
    assert progress.leftovers["math"] == Leftovers(completed=1, aborted=0, expired=0)
    assert set(progress.tasks) == {"math", "code"}
