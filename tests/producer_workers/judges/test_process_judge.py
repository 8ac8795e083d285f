from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.errors import JudgeError
from buffer.wire.rollout import RolloutState, Status
from producer_workers.config.task import JudgingSection
from producer_workers.judges.judge import FunctionJudge, Judge
from producer_workers.judges.load import load_worker_judge
from producer_workers.user_code import border, process_function
from producer_workers.user_code.process_function import ProcessFunction

HOSTILE = "tests.producer_workers.judges.hostile"


def rollout(truth: str, index: int = 0) -> RolloutState:
    return RolloutState(
        index=index,
        status=Status.INIT,
        messages=[{"role": "user", "content": "?"}],
        prompt_ids=np.arange(3, dtype="<i4"),
        response="abc"[: index + 1],
        response_ids=np.array([10, 20], "<i4"),
        logprobs=np.array([-1.0, -2.0], "<f4"),
        finish_reason="stop",
        ground_truth=truth,
    )


@asynccontextmanager
async def judging(name: str = "score", **section: Any) -> AsyncIterator[Any]:
    chosen = load_worker_judge(f"{HOSTILE}:{name}", JudgingSection(**section))
    try:
        yield chosen
    finally:
        chosen.close()


async def ask(judge: Judge, *truths: str) -> list[Any]:
    """Ask for several rollouts at once; errors in their place."""
    states = [rollout(truth) for truth in truths]
    asked = (judge.judge_group([state]) for state in states)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    return [each if isinstance(each, BaseException) else each[0]["score"] for each in answers]


async def test_a_mended_judge_is_imported_again_after_a_call_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process_function, "MENDED_S", 0.0)
    source = "def judge(*, response, ground_truth, state):\n    return {}\n"
    (tmp_path / "mendable.py").write_text(source.format('float("no")'), encoding="utf-8")
    judge = load_worker_judge("mendable:judge", JudgingSection())
    assert [type(answer) for answer in await ask(judge, "")] == [JudgeError]
    (tmp_path / "mendable.py").write_text(source.format("0.5 + 0.25"), encoding="utf-8")
    assert await ask(judge, "") == [0.75]
    judge.close()


async def test_a_process_sees_what_a_judge_in_the_worker_sees() -> None:
    async with judging() as one, judging("rank") as group:
        assert not one.sees_group
        assert group.sees_group
        assert await ask(one, "tokens") == [31.0]
        states = [rollout("", index) for index in range(3)]
        rewards = await group.judge_group(states)
        assert [reward["score"] for reward in rewards] == [1.0, 2.0, 3.0]


async def test_a_coroutine_over_its_limit_is_cancelled_and_leaves_its_siblings_alone() -> None:
    async with judging("score_later", processes=1, timeout_s=4.0) as judge:
        before = await ask(judge, "pid")
        waits, *others = await ask(judge, "wait", *["soon"] * 20)
        assert "exceeded its limit" in str(waits)
        assert set(others) == {*before}, "one process for all, and it was not replaced"
        assert await ask(judge, "pid") == before


async def test_a_call_that_is_not_wanted_any_more_gives_its_process_free() -> None:
    for name, truth in (("score", "hang"), ("score_later", "wait")):
        async with judging(name, processes=1) as judge:
            (before,) = await ask(judge, "pid")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask(judge, truth), 0.5)
            (after,) = await ask(judge, "pid")
            assert (before == after) is (name == "score_later")


@pytest.mark.parametrize("name", ["score", "score_later"])
async def test_a_process_that_ran_out_of_memory_is_replaced(name: str) -> None:
    async with judging(name, processes=1) as judge:
        (before,) = await ask(judge, "pid")
        (error,) = await ask(judge, "memory")
        assert "MemoryError" in str(error)
        while not judge._call._processes[0].is_ended:
            await asyncio.sleep(0.01)
        assert await ask(judge, "pid") != [before]


def test_functions_are_called_in_processes_unless_they_are_marked_inline() -> None:
    def has_processes(spec: str, **section: Any) -> bool:
        judge = load_worker_judge(spec, JudgingSection(**section))
        assert isinstance(judge, FunctionJudge)
        return isinstance(judge._call, ProcessFunction)

    assert has_processes("python_tests", sandbox="weak")
    assert has_processes("gsm8k", kind="process")
    assert not has_processes("gsm8k")
    assert not has_processes(f"{HOSTILE}:score", kind="inline")
    assert not has_processes(f"{__name__}:declared")


async def test_a_process_runs_programs_in_the_sandbox_of_its_judge() -> None:
    nowhere = "http://127.0.0.1:1"
    judge = load_worker_judge("python_tests", JudgingSection(sandbox=nowhere))
    (error,) = await ask(judge, "assert True")
    judge.close()
    assert nowhere in str(error)


@border.runs_inline
def declared(**_: Any) -> float:
    return 1.0


WORKER = f"""
import asyncio, sys
from producer_workers.config.task import JudgingSection
from producer_workers.judges.load import load_worker_judge
from tests.producer_workers.judges.test_process_judge import ask

async def main():
    judge = load_worker_judge("{HOSTILE}:score", JudgingSection())
    print(*map(int, await ask(judge, "pid")), flush=True)
    await ask(judge, "hang", "hang")

asyncio.run(main())
"""


def test_what_a_judge_started_ends_with_its_process() -> None:
    async def scenario() -> int:
        async with judging() as judge:
            return int((await ask(judge, "child"))[0])

    child = asyncio.run(scenario())
    while is_alive(child):
        time.sleep(0.01)


def test_no_process_outlives_a_worker_that_is_killed() -> None:
    command = [sys.executable, "-c", WORKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout
        judge = int(worker.stdout.readline())
        assert is_alive(judge)
        worker.kill()
    while is_alive(judge):
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
