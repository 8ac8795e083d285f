from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from buffer.control.control import Mode
from buffer.failure_text import cause_of
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.config.task import JudgingSection
from producer_workers.engines.base import EngineDeadError
from producer_workers.judges.judge import FunctionJudge
from producer_workers.worker import heartbeat
from producer_workers.worker.task_runner import TaskRunner
from producer_workers.worker.worker import Worker
from tests.pipeline.yard import TASK, Letters, Yard
from tests.servers import KINDS
from tests.waits import DEADLINE_S, until

on_both = pytest.mark.parametrize("make_yard", KINDS, indirect=True)


def nothing_found(_: Any = None, **__: Any) -> float:
    return next(iter(()))


async def nothing_awaited(**_: Any) -> float:
    return next(iter(()))


def leave(_: Any = None, **__: Any) -> float:
    sys.exit(2)


async def leave_loop(**_: Any) -> float:
    sys.exit(2)


def press_ctrl_c(_: Any = None, **__: Any) -> float:
    raise KeyboardInterrupt


async def cancel_itself(**_: Any) -> float:
    raise asyncio.CancelledError


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "StopIteration": (nothing_found, "'mine' raised StopIteration"),
    "StopIteration in a coroutine": (nothing_awaited, "'mine' raised RuntimeError: coroutine"),
    "SystemExit": (leave, "'mine' raised SystemExit: 2"),
    "SystemExit in a coroutine": (leave_loop, "'mine' raised SystemExit: 2"),
    "KeyboardInterrupt": (press_ctrl_c, "'mine' raised KeyboardInterrupt"),
    "CancelledError": (cancel_itself, "'mine' raised CancelledError"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_judge_that_does_anything_fails_its_own_group_only(yard: Yard, fault: str) -> None:
    broken, reason = FAULTS[fault]
    bad, *_ = yard.enqueue(4)

    def judge(*, ground_truth: str, **given: Any) -> Any:
        return broken(**given) if ground_truth == bad else 1.0

    async with yard.working(yard.worker(judge=FunctionJudge("mine", judge))):
        await yard.until_stages(dead=1, completed=3)
    letter = yard.run.dead_letters.reason(bad)["reason"]
    assert re.search(reason, letter), letter
    assert " at test_unreliable_judges.py:" in cause_of(letter)
    assert [record["tries"] for record in yard.records()[1:]] == ["0"] * 3
    yard.check()


@pytest.mark.parametrize("sees_group", [False, True])
async def test_a_judge_that_hangs_in_all_its_threads_leaves_them_to_the_next_group(
    yard: Yard, sees_group: bool
) -> None:
    bad, *_ = yard.enqueue(3, tokens=(10, 10, 10, 10))
    gate = threading.Event()

    def score(state: RolloutState) -> float:
        if state.ground_truth == bad:
            gate.wait()
        return 1.0

    def one(*, state: RolloutState, **_: Any) -> float:
        return score(state)

    def all_of_them(*, states: list[RolloutState]) -> list[float]:
        return [score(state) for state in states]

    judge = FunctionJudge("slow", all_of_them if sees_group else one, JudgingSection(timeout_s=0.3))
    async with yard.working(yard.worker(judge=judge)):
        await yard.until_stages(dead=1, completed=2)
    gate.set()
    assert "judge 'slow' exceeded its limit of 0.3 s" in yard.run.dead_letters.reason(bad)["reason"]


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (nothing_found, "is_valid_sample_fn 'test' raised StopIteration"),
        (leave, "is_valid_sample_fn 'test' raised SystemExit"),
        (lambda _: None, "is_valid_sample_fn 'test' returned NoneType"),
    ],
)
async def test_a_filter_that_does_anything_fails_its_own_group_only(
    yard: Yard, verdict: Any, reason: str
) -> None:
    bad, *_ = yard.enqueue(3)

    def is_valid(states: list[RolloutState]) -> Any:
        return verdict(states) if states[0].ground_truth == bad else True

    async with yard.working(yard.worker(is_valid_sample=is_valid)):
        await yard.until_stages(dead=1, completed=2)
    assert reason in yard.run.dead_letters.reason(bad)["reason"]


class ExitingLoop(SingleTurnAgentLoop):
    """Exits for one group, by itself or in a task of its own."""

    bad = ""
    in_task = False

    async def generate_group(self, states: Any, engine: Any, gid: str) -> Any:
        if gid == self.bad:
            if self.in_task:
                await asyncio.gather(leave_loop(), asyncio.sleep(0))
            sys.exit(2)
        return await super().generate_group(states, engine, gid)


@pytest.mark.parametrize("in_task", [False, True])
async def test_an_agent_loop_that_exits_fails_its_own_group_only(yard: Yard, in_task: bool) -> None:
    bad, *_ = yard.enqueue(3)
    loop = ExitingLoop(judge=None, tokenizer=Letters(), eos_ids={100})
    loop.bad = bad
    loop.in_task = in_task
    worker = yard.worker()
    worker._runner._tasks = {TASK: TaskRunner(loop)}
    async with yard.working(worker):
        await yard.until_stages(dead=3)
    assert "SystemExit" in yard.run.dead_letters.reason(bad)["reason"]


class Gate:
    """A judge that hangs until it is opened; it counts the rollouts that it got."""

    def __init__(self) -> None:
        self.is_open = False
        self.asked = 0

    async def score(self, **_: Any) -> float:
        self.asked += 1
        while not self.is_open:
            await asyncio.sleep(0.01)
        return 1.0

    async def rank(self, *, states: list[RolloutState]) -> list[float]:
        return [await self.score() for _ in states]


def unjudged(group: RolloutGroup) -> bool:
    return [state.status for state in group.states] == [Status.ABORTED] * 2 and all(
        state.reward is None and len(state.response_ids) == 10 for state in group.states
    )


@on_both
@pytest.mark.parametrize("kind", ["rollout", "group", "filter"])
def test_a_pause_ends_a_judge_after_its_grace_and_its_group_is_only_judged_again(
    yard: Yard, kind: str
) -> None:
    """Pause twice while it is judged; the third claim, by another worker, completes it."""
    (gid,) = yard.enqueue(1)
    gate = Gate()
    judges = {"rollout": FunctionJudge("j", gate.score), "group": FunctionJudge("j", gate.rank)}

    def worker(name: str) -> Worker:
        options: dict[str, Any] = {"judge": judges[kind]} if kind in judges else {}
        if kind == "filter":
            options["is_valid_sample"] = lambda _: gate.score()
        return yard.worker(name, grace_s=0.1, drain_timeout_s=0.1, **options)

    async def pause(asked: int) -> None:
        await yard.until(lambda: gate.asked == asked)
        await yard.receipts(yard.control(Mode.ABORT))
        assert yard.stages() == {"aborted": 1}
        if kind != "filter":
            assert unjudged(yard.group(gid))
        yard.control(Mode.RUN)
        assert yard.reissue() == 1

    async def scenario() -> int:
        calls = 2 if kind == "rollout" else 1
        async with yard.working(worker("w0")) as engine:
            await pause(calls)
            await pause(2 * calls)
            await yard.until(lambda: gate.asked == 3 * calls)
        assert yard.stages() == {"aborted": 1}, "a worker that leaves keeps the tokens, too"
        assert yard.reissue() == 1
        gate.is_open = True
        async with yard.working(worker("w1")) as other:
            await yard.until_stages(completed=1)
            return len(engine.requests) + len(other.requests)

    assert asyncio.run(scenario()) == 2
    assert [state.reward is not None for state in yard.group(gid).states] == [True, True]
    assert yard.records()[0]["tries"] == "0"
    yard.check()


async def test_neither_drain_nor_keep_ends_a_judge(yard: Yard) -> None:
    yard.enqueue(1)
    gate = Gate()
    async with yard.working(yard.worker(judge=gate.score, grace_s=0.0)):
        await yard.until(lambda: gate.asked == 2)
        await yard.receipts(yard.control(Mode.KEEP))
        draining = yard.control(Mode.DRAIN)
        await yard.until_idle()
        assert yard.leases() == 1
        gate.is_open = True
        await yard.receipts(draining)
    assert yard.stages() == {"completed": 1}
    assert gate.asked == 2


async def test_the_log_shows_where_a_judge_blocks_the_worker(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "BLOCKED_S", 0.3)
    monkeypatch.setattr(heartbeat, "POLL_S", 0.01)
    yard.enqueue(1, tokens=[10])

    def said() -> list[str]:
        messages = (record.getMessage() for record in caplog.records)
        return [line for line in messages if "loop is blocked" in line]

    async def wait_in_loop(**_: Any) -> float:
        until(said, "a line about this judge")
        return 1.0

    async with yard.working(yard.worker(judge=wait_in_loop)):
        await yard.until_stages(completed=1)
    assert any("in wait_in_loop" in line for line in said()), said()


def test_groups_of_a_worker_whose_loop_is_stuck_go_back_and_it_goes_on_afterwards(
    make_yard: Callable[..., Yard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "STUCK_S", 0.5)
    monkeypatch.setattr(heartbeat, "BLOCKED_S", 0.3)
    monkeypatch.setattr(heartbeat, "POLL_S", 0.01)
    yard = make_yard(lease_ms=3000)
    yard.enqueue(1, tokens=[10])
    lost = threading.Event()

    async def blocks(**_: Any) -> float:
        await asyncio.to_thread(int)
        lost.wait(DEADLINE_S)  # in the event loop, as no code may
        return 1.0

    async def scenario() -> None:
        async with yard.working(yard.worker(judge=FunctionJudge("blocks", blocks))):
            await yard.until_stages(completed=1)

    working = threading.Thread(target=asyncio.run, args=(scenario(),))
    working.start()

    def lost_leases() -> int:
        yard.run.janitor.sweep()
        return yard.counters().get("leases_lost", 0)

    try:
        assert until(lost_leases, "a lease that runs out") == 1
    finally:
        lost.set()
        working.join()
    assert yard.stages() == {"completed": 1}


async def test_a_group_that_is_judged_while_its_engine_dies_keeps_its_tokens(yard: Yard) -> None:
    (judged,) = yard.enqueue(1)
    gate = Gate()
    with pytest.raises(EngineDeadError):  # noqa: PT012
        async with yard.working(yard.worker(judge=gate.score, die_after=3)):
            await yard.until(lambda: gate.asked == 2)
            yard.enqueue(1)
            await yard.until(lambda: not yard.run.fleet.workers())
    assert yard.run.record(judged)["status"] == "aborted"
    assert unjudged(yard.group(judged))
    yard.check()
