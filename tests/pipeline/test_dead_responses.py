from __future__ import annotations

from typing import Any

import pytest

from buffer.groups.dead_letters import DeadLetter
from buffer.job import Job, PayloadRef
from buffer.wire.rollout import RolloutState, Status
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.config.task import JudgingSection
from producer_workers.judges.judge import FunctionJudge, Judge
from producer_workers.judges.load import load_worker_judge
from producer_workers.worker import group_runner
from producer_workers.worker.task_runner import TaskRunner
from tests.pipeline.yard import TASK, Letters, Yard
from tests.producer_workers.user_code import broken


def letters(yard: Yard) -> dict[str, DeadLetter]:
    return {letter.gid: letter for letter in yard.run.dead_letters.newest()}


@pytest.mark.parametrize("where", ["worker", "process", "group"])
async def test_a_dead_letter_has_the_users_line_and_what_the_judge_got(
    yard: Yard, where: str
) -> None:
    bad, _ = yard.enqueue(2, tokens=(10, 12))
    given: list[str] = []

    def one(*, response: str, ground_truth: str, **_: Any) -> float:
        if ground_truth == bad:
            given.append(response)
            broken.fail(response=response)
        return 1.0

    def several(*, states: list[RolloutState]) -> list[float]:
        return [one(response=s.response, ground_truth=s.ground_truth) for s in states]

    judge: Judge = FunctionJudge("mine", several if where == "group" else one)
    if where == "process":
        judge = load_worker_judge(f"{broken.__name__}:odd_one", JudgingSection())
    async with yard.working(yard.worker(judge=judge)):
        await yard.until_stages(dead=1, completed=1)
        await yard.until(lambda: yard.run.record(bad)["payload"] != "init")
    letter = letters(yard)[bad]
    assert letter.cause.startswith("KeyError at broken.py:")
    group = yard.group(bad)
    assert group.status is Status.FAILED
    assert [len(state.response_ids) for state in group.states] == [10, 12]
    assert {state.ground_truth for state in group.states} == {bad}
    assert all(len(state.response) == len(state.response_ids) for state in group.states)
    if given:
        assert group.states[0].response in given
    assert yard.run.progress(TASK)[f"failed:{letter.cause}"] == str(letter.tries)
    # requeued, it begins with its prompt
    assert yard.run.jobs.requeue(bad) == "dead"
    async with yard.working(yard.worker("w1", judge=lambda **_: 1.0)) as engine:
        await yard.until_stages(completed=2)
        assert {length for _, length, _ in engine.requests} == {3}
    yard.check()


class RaisingLoop(SingleTurnAgentLoop):
    """Raises behind the first response, in a task of its own."""

    rubbish: Any = None

    async def _complete(self, state: RolloutState, reason: str) -> None:
        if self.rubbish:
            state.response_ids = self.rubbish
        raise LookupError("\x1b[31m" + "x" * 10_000)


async def test_a_loop_that_raises_leaves_what_it_had_made(yard: Yard) -> None:
    (gid,) = yard.enqueue(1)
    worker = yard.worker()
    loop = RaisingLoop(judge=None, tokenizer=Letters(), eos_ids={100})
    worker._runner._tasks = {TASK: TaskRunner(loop)}
    async with yard.working(worker):
        await yard.until_stages(dead=1)
        await yard.until(lambda: yard.run.record(gid)["payload"] != "init")
    letter = letters(yard)[gid]
    assert letter.cause.startswith("LookupError at test_dead_responses.py:")
    assert "\x1b" not in letter.reason
    assert sum(len(state.response_ids) for state in yard.group(gid).states) >= 10
    yard.check()


async def test_rubbish_that_a_loop_leaves_is_not_kept_and_ends_no_worker(yard: Yard) -> None:
    (gid,) = yard.enqueue(1)
    worker = yard.worker()
    loop = RaisingLoop(judge=None, tokenizer=Letters(), eos_ids={100})
    loop.rubbish = {"no": "array"}
    worker._runner._tasks = {TASK: TaskRunner(loop)}
    async with yard.working(worker):
        await yard.until_stages(dead=1)
    assert yard.run.record(gid)["payload"] == "init"
    yard.check()


async def test_one_cause_keeps_few_responses_and_a_full_run_none(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_runner, "KEPT_OF_CAUSE", 2)
    yard.run.limits.adopt(yard.run.limits.model_copy(update={"max_tries": 1}))
    yard.enqueue(5)
    async with yard.working(yard.worker(judge=broken.fail)):
        await yard.until_stages(dead=5)
    without = [gid for gid in letters(yard) if yard.run.record(gid)["payload"] == "init"]
    assert len(without) == 3
    for gid, low_bytes, is_kept in zip(without, (2, 0), (False, True), strict=False):
        token = yard.run.record(gid)["released"]
        job = Job(gid, token, "fresh", 1, PayloadRef(gid, "init", 1, 0, ""))
        group = yard.group(gid)
        yard.run.limits.adopt(yard.run.limits.model_copy(update={"low_bytes": low_bytes}))
        assert yard.run.dead_letters.keep_responses(job, group) is is_kept
    yard.check()
