from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from buffer.control.control import Mode
from buffer.errors import (
    CheckpointNow,
    ConfigError,
    Fenced,
    LostRun,
    ModelError,
    PayloadMissing,
    RoleHeld,
    StoreError,
)
from buffer.ids import group_id, new_nonce
from buffer.ledger.ledger import BAD_GROUPS
from buffer.manifest import NotReady
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.weights.shared_folder import FolderSender
from buffer.weights.transport import PublishedWeights
from buffer.wire import group_bytes
from buffer.wire.rollout import FIRST_WEIGHTS, PolicyVersion
from consumer.handle.batch import Batch, Stopped
from consumer.handle.rollout_consumer import RolloutConsumer
from consumer.handle.wait_rules import WaitReason
from tests.consumer.conftest import Trainers, die
from tests.consumer.handle.crew import at_work
from tests.servers import Server, on_both
from tests.waits import until


def write_weights(folder: Path, consumer: RolloutConsumer, step: int) -> PublishedWeights:
    """Write a version of weights as a trainer does."""

    def save(part: Path) -> None:
        save_file({"w": np.full(4, step, np.float32)}, part / "model.safetensors")

    return FolderSender(folder).write(PolicyVersion(consumer.lineage, step), save)


def publish_first(consumer: RolloutConsumer) -> None:
    with TemporaryDirectory() as folder:
        consumer.publish_weights(1, *write_weights(Path(folder), consumer, 1))


def content(batch: Batch) -> list[bytes]:
    return [group_bytes.encode(group) for group in batch.groups]


# -- take and commit ---------------------------------------------------------------------


@on_both
def test_take_blocks_until_groups_are_ready_and_reports_why(run: Run, trainer: Trainers) -> None:
    consumer = trainer(run)

    def end(reason: WaitReason) -> None:
        raise InterruptedError(str(reason))

    with at_work(run, math=2):
        until(lambda: run.buffer.count("math") == 2, "two groups")
        with pytest.raises(InterruptedError) as told:
            consumer.take_batch(1, {"math": 3}, waiting=end)
        with pytest.raises(TimeoutError, match="math 2 of 3"):
            consumer.take_batch(1, {"math": 3}, deadline_s=0.2)
    reason = "waiting for groups: math 2 of 3; of math, 0 wait and 0 run; live workers: 1"
    assert str(told.value) == reason
    with at_work(run, math=3):
        batch = consumer.take_batch(1, {"math": 3})
    assert batch.step == 1
    assert sorted(group.gid for group in batch.groups) == [f"math-{draw:010d}" for draw in range(3)]
    assert [group.gid for group in batch.groups] == batch.manifest.gids


# -- groups that cannot be used ----------------------------------------------------------


def spoil(run: Run, gid: str, data: bytes | None) -> None:
    """Put other bytes where a submitted group was; None: none at all."""
    record = run.record(gid)
    key = run.keys.payload(gid, record["payload"])
    if data is None:
        run.store.client.delete(key)
    else:
        run.store.client.set(key, data)


@pytest.mark.parametrize("data", [b"", b"\xc1 no msgpack", None])
def test_a_group_that_cannot_be_read_is_swapped_and_the_batch_is_the_same_again(
    run: Run, trainer: Trainers, data: bytes | None
) -> None:
    first = trainer(run)
    with at_work(run, math=4):
        until(lambda: run.buffer.count("math") == 4, "four groups")
    bad = f"math-{1:010d}"
    spoil(run, bad, data)
    batch = first.take_batch(1, {"math": 3})
    assert len(batch.groups) == 3
    assert bad not in batch.manifest.gids
    assert [group.gid for group in batch.groups] == batch.manifest.gids
    assert run.dead_letters.reason(bad)["worker"] == "w0"
    die(first)
    again = trainer(run, take_over=True).take_batch(1, {"math": 3})
    assert again.manifest == batch.manifest
    assert content(again) == content(batch)
    assert run.account.fsck().clean


@pytest.mark.parametrize(("data", "is_barred"), [(None, False), (b"\xc1 no msgpack", True)])
def test_what_the_server_has_lost_is_no_fault_of_the_worker(
    run: Run, trainer: Trainers, data: bytes | None, is_barred: bool
) -> None:
    with at_work(run, math=BAD_GROUPS + 1):
        until(lambda: run.buffer.count("math") == BAD_GROUPS + 1, "all groups")
    for number in range(BAD_GROUPS):
        spoil(run, f"math-{number:010d}", data)
    assert len(trainer(run).take_batch(1, {"math": BAD_GROUPS + 1}, strict=False).groups) == 1
    assert any(worker.is_barred for worker in run.fleet.workers()) is is_barred


@pytest.mark.parametrize("failures", [1, 2])
def test_a_batch_that_fails_although_each_of_its_groups_can_be_read_is_tried_twice(
    run: Run, trainer: Trainers, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    consumer, load, left = trainer(run), run.buffer.load, [failures]

    def failing(*args: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise PayloadMissing("all of them together")
        return load(*args)

    monkeypatch.setattr(run.buffer, "load", failing)
    with at_work(run, math=2):
        if failures == 1:
            assert len(consumer.take_batch(1, {"math": 2}).groups) == 2
        else:
            with pytest.raises(PayloadMissing):
                consumer.take_batch(1, {"math": 2})
    assert len(run.dead_letters) == left[0] == 0


def test_a_batch_of_which_nothing_can_be_read_waits_for_other_groups(
    run: Run, trainer: Trainers
) -> None:
    consumer = trainer(run)
    with at_work(run, math=12):
        until(lambda: run.buffer.count("math") == 12, "twelve groups")
    for draw in range(12):
        spoil(run, f"math-{draw:010d}", b"nonsense")
    with pytest.raises(TimeoutError, match="math 0 of 2"):
        consumer.take_batch(1, {"math": 2}, deadline_s=0.2)
    assert len(run.dead_letters) == 12
    assert run.fleet.unbar("w0") == 12
    with at_work(run, math=12):
        batch = consumer.take_batch(1, {"math": 2}, deadline_s=400.0)
        assert len(batch.groups) == 2
        assert consumer.take_batch(1, {"math": 2}).manifest == batch.manifest
    consumer.commit(1, keep=1)
    assert run.account.fsck().clean


# -- restarts ----------------------------------------------------------------------------


@on_both
def test_restart_from_a_checkpoint_delivers_what_follows_byte_for_byte(
    run: Run, trainer: Trainers
) -> None:
    first = trainer(run)
    with at_work(run, math=20):
        batches = {step: first.take_batch(step, {"math": 3}) for step in range(1, 5)}
        first.commit(2, keep=2)
        die(first)
        second = trainer(run, 2, take_over=True)
        for step in (3, 4):
            again = second.take_batch(step, {"math": 99})  # a step that was taken is what it was
            assert again.manifest == batches[step].manifest
            assert content(again) == content(batches[step])
        fresh = second.take_batch(5, {"math": 3})
        assert not set(fresh.manifest.gids) & {
            gid for batch in batches.values() for gid in batch.manifest.gids
        }
    assert second.lineage != first.lineage


# -- the role ----------------------------------------------------------------------------


def test_open_is_refused_while_another_trainer_beats_even_when_its_main_thread_is_busy(
    run: Run, trainer: Trainers
) -> None:
    trainer(run)
    opened = run.control.holder("trainer").seen_ms
    while run.control.holder("trainer").seen_ms < opened + 5 * run.limits.heartbeat_ms:
        for _ in range(10_000):  # pure Python: never gives up the interpreter by itself
            sum(range(1000))
    with pytest.raises(RoleHeld):
        trainer(run)


OPERATIONS: dict[str, Callable[[RolloutConsumer], Any]] = {
    "take": lambda c: c.take_batch(1, {"math": 1}), "commit": lambda c: c.commit(0, keep=0),
    "pause": lambda c: c.pause("keep"), "continue": lambda c: c.continue_(),
    "publish": publish_first, "evaluate": lambda c: c.evaluate("quiz", 1),
    "finish": lambda c: c.finish(), "check": lambda c: c.check_role(),
}  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
def test_first_trainer_is_fenced_on_its_next_operation_when_a_second_one_takes_over(
    run: Run, trainer: Trainers, operation: str
) -> None:
    first = trainer(run)
    trainer(run, take_over=True)
    before = run.control.state()
    with pytest.raises(Fenced):
        OPERATIONS[operation](first)
    assert run.control.state() == before
    assert run.ledger.steps() == (0, 0, 0)


@on_both
def test_a_waiting_take_is_fenced_when_a_second_trainer_takes_over(
    run: Run, trainer: Trainers
) -> None:
    first = trainer(run)
    seconds: list[RolloutConsumer] = []

    def take_over(_: NotReady) -> None:
        if not seconds:
            seconds.append(trainer(run, take_over=True))

    with pytest.raises(Fenced):
        first.take_batch(1, {"math": 1}, waiting=take_over)
    first.close()  # has nothing to give up, and must not close the other one's role
    seconds[0].check_role()


@on_both
def test_heartbeat_reports_a_server_that_refuses(
    server: Server, run: Run, trainer: Trainers, store: Store
) -> None:
    raw: Any = store.client
    raw.acl_setuser(
        "limited",
        enabled=True,
        passwords=["+secret"],
        keys=["*"],
        channels=["*"],
        commands=["+@all"],
    )
    limited = Store(server.url.replace("unix://", "unix://limited:secret@"), deadline_s=2.0)
    try:
        consumer = trainer(Run.open(limited, run.name))
        raw.acl_setuser("limited", commands=["-evalsha", "-eval"])
        until(lambda: consumer.role.lost is not None, "the heartbeat to fail")
        with pytest.raises(StoreError, match="refused"):
            consumer._check()
    finally:
        raw.acl_deluser("limited")
        limited.close()


# -- pause, publish, continue ------------------------------------------------------------


def torn(published: PublishedWeights) -> PublishedWeights:
    with Path(published.address, "model.safetensors").open("ab") as file:
        file.write(b"more")
    return published


def unlisted(published: PublishedWeights) -> PublishedWeights:
    save_file({"w": np.zeros(4)}, Path(published.address, "new.safetensors"))
    return published


def without(name: str) -> Callable[[PublishedWeights], PublishedWeights]:
    def remove(published: PublishedWeights) -> PublishedWeights:
        Path(published.address, name).unlink()
        return published

    return remove


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (torn, "model.safetensors has .* bytes, expected"),
        (unlisted, "new.safetensors is not in the manifest"),
        (without("manifest.json"), "manifest.json"),
        (without("model.safetensors"), "model.safetensors"),
        (lambda published: published._replace(checksum=""), " was published"),
        (lambda published: published._replace(address="/nowhere"), "/nowhere"),
        (lambda published: published._replace(address="redis:l1:4"), "no weights redis:l1:4"),
    ],
)
def test_weights_that_no_worker_could_load_are_not_announced(
    run: Run,
    trainer: Trainers,
    tmp_path: Path,
    spoil: Callable[[PublishedWeights], PublishedWeights],
    reason: str,
) -> None:
    consumer = trainer(run)
    published = spoil(write_weights(tmp_path, consumer, 4))
    with pytest.raises(ModelError, match=reason) as refused:
        consumer.publish_weights(4, *published)
    assert "FolderSender" in refused.value.hint
    assert run.control.state().weights == FIRST_WEIGHTS


@on_both
def test_pause_waits_for_the_receipt_of_every_worker(
    run: Run, trainer: Trainers, tmp_path: Path
) -> None:
    consumer = trainer(run)
    published = write_weights(tmp_path, consumer, 4)
    with at_work(run, math=0) as crew:
        with consumer.paused("keep") as seconds:
            assert (run.control.state().epoch, Mode.KEEP) in crew.epochs
            assert run.control.state().mode is Mode.KEEP
            weights = consumer.publish_weights(4, *published)
        state = run.control.state()
    assert seconds >= 0
    assert (state.mode, state.weights, state.weights_path) == (Mode.RUN, weights, published.address)
    assert weights == (consumer.lineage, 4)


def test_paused_continues_the_run_when_its_body_fails(run: Run, trainer: Trainers) -> None:
    consumer = trainer(run)
    with pytest.raises(OSError, match="disk"), consumer.paused("drain"):
        raise OSError("disk full")
    assert run.control.state().mode is Mode.RUN


def test_pause_is_stopped_while_it_waits_for_a_silent_worker(run: Run, trainer: Trainers) -> None:
    consumer = trainer(run)
    with at_work(run, math=0, silent=True):
        consumer.stop()
        with pytest.raises(Stopped):
            consumer.pause("keep")


# -- evaluation --------------------------------------------------------------------------


@on_both
def test_evaluate_returns_exactly_what_was_asked_for_of_several_tasks_and_again(
    run: Run, trainer: Trainers
) -> None:
    """Each task counts for itself.

    A later evaluation of another task or size requests no more, and gets all.
    """
    consumer = trainer(run)
    with at_work(run, math=0):
        for task, count in (("quiz", 5), ("exam", 3), ("quiz", 2), ("exam", 4)):
            assert {g.task for g in consumer.evaluate(task, count)} == {task}
    audit = {account.task: account for account in run.account.totals().tasks}
    assert (audit["quiz"].enqueued, audit["quiz"].archived) == (7, 7)
    assert (audit["exam"].enqueued, audit["exam"].archived) == (7, 7)
    assert audit["math"].consumed == 0
    assert run.ledger.steps() == (0, 0, 0)


def test_a_background_evaluation_continues_although_another_one_took_its_groups(
    run: Run, trainer: Trainers
) -> None:
    consumer = trainer(run)
    with at_work(run, math=0):
        pending = consumer.begin_evaluation("quiz", 3)
        first = {group.gid for group in consumer.evaluate("quiz", 3)}
        second = {group.gid for group in consumer.finish_evaluation(pending)}
    assert (len(first), len(second), len(first | second)) == (3, 3, 6)


def quiz(*draws: int) -> list[str]:
    return [group_id("quiz", draw) for draw in draws]


@on_both
def test_a_problem_that_fails_for_good_is_part_of_the_result_and_not_replaced(
    run: Run, trainer: Trainers
) -> None:
    consumer = trainer(run)
    with at_work(run, math=0, fails=quiz(2, 5)):
        first = consumer.evaluate("quiz", 4)
        pending = consumer.begin_evaluation("quiz", 4)
        second = consumer.finish_evaluation(pending)
        third = consumer.evaluate("quiz", 4)
    assert ([group.gid for group in first], first.failed) == (quiz(0, 1, 3), {quiz(2)[0]: ""})
    assert ([group.gid for group in second], second.failed) == (quiz(4, 6, 7), {quiz(5)[0]: ""})
    assert ([group.gid for group in third], third.failed) == (quiz(8, 9, 10, 11), {})
    assert run.account.fsck().clean


def test_an_evaluation_leaves_out_what_is_skipped(run: Run, trainer: Trainers) -> None:
    consumer = trainer(run)
    with at_work(run, math=0, fails=quiz(2), skips=quiz(0, 3, 4, 5)):
        found = consumer.evaluate("quiz", 4)
        nothing = consumer.evaluate("quiz", 2)
        last = consumer.evaluate("quiz", 1)
    assert [group.gid for group in found] == quiz(1)
    assert (sorted(found.failed), sorted(found.skipped)) == (quiz(2), quiz(0, 3))
    assert (list(nothing), nothing.failed, sorted(nothing.skipped)) == ([], {}, quiz(4, 5))
    assert ([group.gid for group in last], last.failed, last.skipped) == (quiz(6), {}, set())
    assert run.account.fsck().clean


def test_an_evaluation_of_which_all_fails_ends(run: Run, trainer: Trainers) -> None:
    consumer = trainer(run)
    with at_work(run, math=0, fails=quiz(0, 1)):
        pending = consumer.begin_evaluation("quiz", 2)
        until(lambda: len(run.dead_letters) == 2, "both are dead")
        found = pending.poll()
        assert found is not None
        assert (list(found), sorted(found.failed)) == ([], quiz(0, 1))
        assert [group.gid for group in consumer.evaluate("quiz", 2)] == quiz(2, 3)


def test_what_a_person_requeues_later_is_no_part_of_another_evaluation(
    run: Run, trainer: Trainers
) -> None:
    consumer = trainer(run)
    with at_work(run, math=0, fails=quiz(1)) as crew:
        assert consumer.evaluate("quiz", 3).failed
        crew.fails = ()
        run.jobs.requeue(quiz(1)[0])
        for draws in ((3, 4, 5), (6, 7, 8)):
            found = consumer.evaluate("quiz", 3)
            assert ([group.gid for group in found], found.failed) == (quiz(*draws), {})
    assert run.account.fsck().clean


def test_a_trainer_that_dies_in_an_evaluation_loses_and_doubles_no_problem(
    run: Run, trainer: Trainers
) -> None:
    first = trainer(run)
    with at_work(run, math=0, fails=quiz(1)):
        first.begin_evaluation("quiz", 4)
        until(lambda: len(run.dead_letters) + run.buffer.count("quiz") == 4, "all have ended")
        die(first)
        found = trainer(run, take_over=True).evaluate("quiz", 4)
    assert ([group.gid for group in found], found.failed) == (quiz(0, 2, 3), {quiz(1)[0]: ""})


def test_a_training_task_cannot_be_evaluated(run: Run, trainer: Trainers) -> None:
    with pytest.raises(ConfigError, match="'math' is not for evaluation"):
        trainer(run).begin_evaluation("math", 3)


def test_evaluate_uses_what_an_interrupted_one_left_when_the_weights_are_the_same(
    run: Run, trainer: Trainers
) -> None:
    first = trainer(run)
    with at_work(run, math=0):
        run.evaluations.set_target(first.nonce, "quiz", 0, 4)
        until(lambda: run.buffer.count("quiz") == 4, "the groups of an evaluation")
        left = run.evaluations.take(first.nonce, 1, {"quiz": 4})
        die(first)
        groups = trainer(run, take_over=True).evaluate("quiz", 4)
    assert [g.gid for g in groups] == left.gids  # type: ignore[union-attr]
    assert run.progress("quiz")["enqueued"] == "4"


def test_evaluate_discards_what_older_weights_or_another_task_left(
    run: Run, trainer: Trainers, tmp_path: Path
) -> None:
    consumer = trainer(run)
    with at_work(run, math=0):
        run.evaluations.set_target(consumer.nonce, "exam", 0, 2)
        run.evaluations.set_target(consumer.nonce, "quiz", 0, 3)
        until(lambda: run.buffer.count("quiz") + run.buffer.count("exam") == 5, "all groups")
        run.evaluations.take(consumer.nonce, 1, {"exam": 2})
        with consumer.paused("keep"):
            consumer.publish_weights(7, *write_weights(tmp_path, consumer, 7))
        groups = consumer.evaluate("quiz", 4)
    assert len(groups) == 4
    assert {group.oldest().version for group in groups} == {7}  # type: ignore[union-attr]
    assert run.account.fsck().clean


# -- memory ------------------------------------------------------------------------------


@on_both
def test_full_memory_asks_for_a_checkpoint_and_continues_after_it(
    make_run: Callable[..., Run], trainer: Trainers
) -> None:
    run = make_run(low_bytes=3000, high_bytes=9000)
    consumer, checkpoints = trainer(run), []

    def checkpoint() -> None:
        checkpoints.append(run.ledger.steps()[0])
        consumer.commit(checkpoints[-1], keep=checkpoints[-1])

    with at_work(run, math=100):
        for step in range(1, 51):
            consumer.take_batch(step, {"math": 2}, checkpoint=checkpoint)
            # those that were running at the mark still come
            assert run.memory.count().held < 18_000
            if len(checkpoints) == 2:
                break
    assert len(checkpoints) == 2
    assert run.account.fsck().clean


def test_full_memory_is_an_error_without_a_way_to_write_a_checkpoint(
    make_run: Callable[..., Run], trainer: Trainers
) -> None:
    consumer = trainer(make_run(low_bytes=3000, high_bytes=9000))

    def take_on() -> None:
        for step in range(1, 11):
            consumer.take_batch(step, {"math": 2})

    with (
        at_work(consumer._run, math=100),
        pytest.raises(CheckpointNow, match="not committed") as caught,
    ):
        take_on()
    assert "commit" in caught.value.hint


@on_both
def test_a_server_that_came_back_empty_is_a_lost_run_and_not_another_trainer(
    run: Run, trainer: Trainers
) -> None:
    consumer = trainer(run)
    producer = new_nonce()
    run.control.open_producer(producer)
    for key in run.store.client.scan_iter(f"rmq:{{{run.name}}}:*"):
        run.store.client.delete(key)
    with pytest.raises(LostRun, match="its data was lost") as lost:
        consumer.take_batch(1, {"math": 1}, deadline_s=400.0)
    assert "regenerate=True" in lost.value.hint
    with pytest.raises(LostRun):
        run.control.renew_role("producer", producer)
