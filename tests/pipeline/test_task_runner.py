from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from buffer.control.control import Mode
from buffer.errors import TaskStopped
from buffer.groups.job_queue import JobQueue
from buffer.job import Job
from buffer.run.settings import LiveSettings, LiveTaskSettings
from buffer.wire.group import GROUP_TIME
from buffer.wire.rollout import RolloutState
from consumer.handle.rollout_consumer import RolloutConsumer
from consumer.handle.wait_rules import WaitReason
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.config.distribution import Fixed
from producer_workers.config.engine import SimulatedConfig
from producer_workers.config.producing import WorkerSection
from producer_workers.judges.judge import FunctionJudge
from producer_workers.producer.producer import Producer
from producer_workers.worker.task_runner import TaskRunner, not_all_equal
from producer_workers.worker.worker import Worker
from tests.buffer.scene import FIRST
from tests.pipeline.mixture import TASKS, Mixture
from tests.pipeline.produce import make_producer
from tests.pipeline.yard import SOME, TASK, Letters, WatchedEngine, Yard
from tests.servers import KINDS
from tests.waits import until

on_both = pytest.mark.parametrize("make_yard", KINDS, indirect=True)


def produce(yard: Yard, producer: Producer) -> dict[str, int]:
    """Produce once; return where groups are."""
    producer.round(yard.run.control.renew_role("producer", producer.nonce))
    return yard.stages()


@on_both
async def test_filtered_groups_are_counted_with_their_raw_rewards_and_made_up_for(
    yard: Yard, tmp_path: Path
) -> None:
    def even_rows_only(states: Sequence[RolloutState]) -> bool:
        return int(states[0].extra["row"]) % 2 == 0

    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{n}", "answer": f"{n}"}) + "\n" for n in range(40))
    )
    producer = make_producer(yard.run, path, share=6)
    yard.run.control.open_producer(producer.nonce, take_over=True)
    worker = yard.worker(is_valid_sample=even_rows_only, judge=lambda **_: 0.5)
    async with yard.working(worker):
        await yard.until(lambda: produce(yard, producer).get("completed", 0) >= 6)
    places = yard.stages()
    counters = yard.counters()
    assert places["completed"] == 6
    assert places["filtered"] > 0
    assert counters["raw_rewards_count"] == 2 * sum(places.values())
    yard.check()


class Sides(SingleTurnAgentLoop):
    """Gives rollouts a role by their index."""

    async def generate_group(self, *arguments: Any) -> list[RolloutState]:
        states = await super().generate_group(*arguments)
        for state in states:
            state.role = ("left", "right")[state.index % 2]
        return states


@on_both
async def test_a_group_is_kept_for_a_trained_role_with_different_scores_and_fails_without_one(
    yard: Yard,
) -> None:
    """The scores of the left are equal; those of the right differ."""

    def judge(*, state: RolloutState, **_: Any) -> float:
        return float(state.index) if state.index % 2 else 0.5

    made: dict[str, str] = {}
    for roles, place in ((["left"], "filtered"), (["right"], "completed"), (["rihgt"], "dead")):
        (gid,) = yard.enqueue(1, tokens=(5, 6, 7, 8))
        worker = yard.worker(
            loop=Sides, judge=judge, is_valid_sample=not_all_equal, train_roles=roles
        )
        made[place] = gid
        async with yard.working(worker):
            await yard.until_stages(**dict.fromkeys(made, 1))
    group = yard.group(made["completed"])
    assert group.in_training.tolist() == [False, True] * 2
    assert group.mask.tolist() == [0] * 5 + [1] * 6 + [0] * 7 + [1] * 8
    assert "train_roles = ['rihgt']" in str(yard.run.dead_letters.reason(made["dead"]))
    yard.check()


@on_both
async def test_a_group_over_its_time_limit_fails_its_tries_and_frees_the_engine(yard: Yard) -> None:
    slow = yard.enqueue(1, tokens=(2000, 1))
    yard.enqueue(2, tokens=(1, 1))  # they need no time
    async with yard.working(yard.worker(token_s=1.0, group_time_limit_s=0.3)) as engine:
        await yard.until_stages(dead=1, completed=2)
        assert engine.unfinished() == 0
    assert "took longer than 0.3 s" in str(yard.run.dead_letters.reason(slow[0]))
    yard.check()


@on_both
async def test_a_try_that_is_claimed_before_the_one_before_has_ended_keeps_its_tokens(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(jobs: JobQueue, worker: str, job: Job, *rest: Any) -> str:
        stage = release(jobs, worker, job, *rest)
        while stage == "waiting" and yard.records()[0]["stage"] == "waiting":
            time.sleep(0.01)
        time.sleep(0.1)  # in which the next try could sample
        return stage

    release = JobQueue.release
    monkeypatch.setattr(JobQueue, "release", late)
    yard.enqueue(1, tokens=(2000, 1))
    async with yard.working(yard.worker(token_s=1.0, group_time_limit_s=0.3)):
        await yard.until_stages(dead=1)
    yard.check()


@on_both
async def test_a_trainer_waits_for_a_stopped_task_until_it_is_resumed_unless_that_is_final(
    yard: Yard, tmp_path: Path
) -> None:
    def broken(**_: object) -> float:
        raise ValueError("no verifier")

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}"}) + "\n" for n in range(40)))
    producer = make_producer(yard.run, path, share=2)
    yard.run.set(LiveSettings(tasks={TASK: LiveTaskSettings(max_consecutive_failures=4)}))
    yard.run.control.open_producer(producer.nonce, take_over=True)
    async with yard.working(yard.worker(judge=broken)):
        await yard.until(
            lambda: produce(yard, producer) and yard.run.task_stops.of(TASK).is_stopped
        )
        for _ in range(5):
            assert await asyncio.to_thread(producer.round, yard.run.control.state()) == 0
    reason = r"task sums is stopped: \d+ tries in a row failed: judge .* ValueError"
    consumer = RolloutConsumer(yard.run, nonce=yard.trainer)
    with pytest.raises(TimeoutError, match=reason):
        consumer.take_batch(1, {TASK: 2}, deadline_s=0.2)
    yard.run.task_stops.are_final = True
    with pytest.raises(TaskStopped, match=reason) as caught:
        consumer.take_batch(1, {TASK: 2})
    assert "rolloutmq resume --task sums" in str(caught.value.hint)
    yard.run.task_stops.are_final = False

    waits: list[WaitReason] = []
    async with yard.working(yard.worker()):
        taken = asyncio.create_task(
            asyncio.to_thread(consumer.take_batch, 1, {TASK: 2}, waiting=waits.append)
        )
        await yard.until(lambda: waits and waits[-1].stopped)
        assert not await asyncio.to_thread(producer.round, yard.run.control.state())
        yard.run.jobs.resume_task(TASK)
        await yard.until(lambda: produce(yard, producer) and taken.done())
        assert len((await taken).groups) == 2
    yard.check()


def right(**_: object) -> float:
    return 1.0


def mixed_worker(
    mixture: Mixture,
    engine: WatchedEngine,
    *,
    partial: Collection[str] = (),
    judges: Mapping[str, Callable[..., Any]] | None = None,
    concurrency: int = 8,
) -> Worker:
    def runner(task: str) -> TaskRunner:
        judge = FunctionJudge("test", (judges or {}).get(task, right))
        is_partial = task in partial
        loop = SingleTurnAgentLoop(
            judge=judge, tokenizer=Letters(), eos_ids={100}, partial_rollout=is_partial
        )
        return TaskRunner(loop, is_partial)

    runners = {task: runner(task) for task in TASKS}
    limits = WorkerSection(concurrency=concurrency, drain_timeout_s=0.0)
    return Worker(mixture.run, engine, runners, limits, worker_id="w0")


async def until_placed(mixture: Mixture, task: str, place: str, groups: int) -> None:
    await asyncio.to_thread(until, lambda: mixture.stages(task).get(place, 0) >= groups)


async def test_partial_rollout_is_a_matter_of_each_task(
    make_mixture: Callable[..., Mixture],
) -> None:
    """One worker, one pause: math keeps its tokens, code starts again from its prompts."""
    mixture = make_mixture()
    config = SimulatedConfig(response_tokens=Fixed(value=50), vocab_size=100)
    engine = WatchedEngine(config, FIRST, held=True)
    worker = mixed_worker(mixture, engine, partial=frozenset({"math"}))
    with mixture.manager.opened():
        assert mixture.round() == 7
        await engine.start()
        work = asyncio.create_task(worker.run())
        while engine.unfinished() < 14:
            await asyncio.sleep(0.02)
        engine.make(SOME)
        state = await asyncio.to_thread(mixture.run.control.set_mode, "operator", Mode.ABORT)
        await asyncio.to_thread(mixture.run.receipts.wait, state, timeout_s=400.0)
        worker.stop()
        await work
    read = mixture.run.buffer.get
    assert [(group.lengths > 0).all() for group in read(9, "math", "aborted")] == [True] * 5
    assert [(group.lengths == 0).all() for group in read(9, "code", "aborted")] == [True] * 2
    mixture.scene.check()


def test_a_judge_that_hangs_holds_up_its_own_task_alone_and_no_engine(
    make_mixture: Callable[..., Mixture],
) -> None:
    """Let more groups of math wait for their judge than there are slots, but not all of them.

    Code goes through.
    """
    mixture = make_mixture({"batch_size": 28})
    gate = asyncio.Event()
    quick = Fixed(value=0.0)
    engine = WatchedEngine(
        SimulatedConfig(response_tokens=Fixed(value=2), token_s=quick, first_token_s=quick), FIRST
    )

    async def hang(**_: object) -> float:
        await gate.wait()
        return 1.0

    worker = mixed_worker(mixture, engine, judges={"math": hang}, concurrency=2)

    async def scenario() -> int:
        await engine.start()
        work = asyncio.create_task(worker.run())
        await until_placed(mixture, "code", "completed", 8)
        await until_placed(mixture, "math", "running", 3)
        waiting = mixture.stages("math")["running"]
        gate.set()
        await until_placed(mixture, "math", "completed", 20)
        worker.stop()
        await work
        return waiting

    with mixture.manager.opened():
        assert mixture.round() == 28
        assert asyncio.run(scenario()) <= 6
    mixture.scene.check()


def test_what_waits_of_a_task_that_lost_its_weight_is_served_first(
    make_mixture: Callable[..., Mixture],
) -> None:
    mixture = make_mixture()
    with mixture.manager.opened():
        mixture.round()
    mixture.run.set(LiveSettings(tasks={"math": LiveTaskSettings(weight=0.0)}))
    assert [job.task for job in mixture.claim()] == ["math"] * 5 + ["code"] * 2


async def test_the_time_that_groups_take_is_counted(make_yard: Callable[..., Yard]) -> None:
    yard = make_yard()
    yard.enqueue(3, tokens=(5, 5))
    async with yard.working(yard.worker()):
        await yard.until_stages(completed=3)
    progress = yard.run.read_progress([TASK]).tasks[TASK]
    assert progress.produced_groups == 3
    groups = yard.run.buffer.get(3, TASK)
    spent_s = sum(group.shared.extra[GROUP_TIME] for group in groups)
    assert abs(progress.produced_ms / 1000 - spent_s) < 0.004
