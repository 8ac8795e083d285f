"""A prompt that makes no sense: whoever says so, its group ends with the reason (`Skip`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from buffer.errors import Skip
from buffer.wire.rollout import RolloutState, ToolCall
from buffer.wire.sampling import SampleParams
from producer_workers.agent_loops.environment import ContainedEnvironment, Turn
from producer_workers.agent_loops.toolbox import Toolbox
from producer_workers.config.dataset import JsonlSection
from producer_workers.config.task import JudgingSection
from producer_workers.datasets.open import open_dataset
from producer_workers.judges.load import load_judge, load_worker_judge
from producer_workers.producer.producer import Producer
from producer_workers.producer.sampler import Sampler
from producer_workers.producer.strategy import strategies_of
from rolloutmq.testing import RehearsalError, rehearse
from tests.pipeline import skippers
from tests.pipeline.skippers import REASON
from tests.pipeline.yard import TASK, Letters, Yard
from tests.producer_workers.http_service import http_service

HERE = "tests.pipeline.skippers"


def answer(_: str, question: Any) -> tuple[int, bytes]:
    """A judge's server."""
    is_odd = int(question["ground_truth"][-1]) % 2
    return 200, orjson.dumps(1.0 if is_odd else {"skip": REASON})


def by_path(name: str) -> dict[str, Any]:
    return {"judge": load_worker_judge(f"{HERE}:{name}", JudgingSection(kind="process"))}


WHO: dict[str, Callable[[], dict[str, Any]]] = {
    "judge": lambda: {"judge": skippers.judge},
    "coroutine": lambda: {"judge": skippers.judge_async},
    "judge of groups": lambda: {"judge": skippers.judge_group},
    "quick judge": lambda: {"judge": load_worker_judge(f"{HERE}:judge_quick", JudgingSection())},
    "judge in a process": lambda: by_path("judge"),
    "coroutine in a process": lambda: by_path("judge_async"),
    "judge of groups in a process": lambda: by_path("judge_group"),
    "filter": lambda: {"is_valid_sample": skippers.is_valid},
    "agent loop": lambda: {"loop": skippers.Loop},
}


@pytest.mark.parametrize("who", WHO)
def test_its_groups_end_and_all_others_go_on(who: str, yard: Yard) -> None:
    check_skips(yard, WHO[who]())


def test_a_server_that_judges_answers_skip(yard: Yard) -> None:
    with http_service(answer) as url:
        check_skips(yard, {"judge": load_judge(url)})


def check_skips(yard: Yard, parts: dict[str, Any]) -> None:
    async def work() -> None:
        gids = yard.enqueue(6, extra={"row": 7, "epoch": 1, "id": "page-7"})
        async with yard.working(yard.worker(**parts)):
            await yard.until_stages(completed=3, skipped=3)
        letters = list(yard.run.skips.newest())
        assert sorted(each.gid for each in letters) == gids[::2]
        assert {(each.reason, each.worker, each.row, each.epoch, each.id) for each in letters} == {
            (REASON, "w0", 7, 1, "page-7")
        }
        counters = yard.counters()
        assert (counters.get("failed", 0), counters.get("dead", 0), counters["skipped"]) == (
            0,
            0,
            3,
        )
        assert not yard.run.task_stops.of(TASK).is_stopped
        yard.run.janitor.sweep()
        yard.check()

    asyncio.run(work())


def test_an_environment_and_a_tool_skip_across_their_processes() -> None:
    async def ask() -> None:
        environment = ContainedEnvironment(f"{HERE}:Pages", 60.0, processes=1, memory_mb=0)
        toolbox = Toolbox([f"{HERE}:look_up"])
        try:
            with pytest.raises(Skip, match=REASON):
                await environment.answer(RolloutState(index=0), Turn(0, "?"))
            with pytest.raises(Skip, match=REASON):
                await toolbox.call_all([ToolCall(id="c", name="look_up", arguments={"page": "x"})])
        finally:
            await environment.close()
            await toolbox.close()

    asyncio.run(ask())


def producer_of(yard: Yard, folder: Path, record: str, **limits: Any) -> Producer:
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps({"question": "?", "answer": n}) for n in range(100)))
    section = JsonlSection(kind="jsonl", path=path, record=f"{HERE}:{record}")
    dataset = open_dataset(section, folder)
    sampler = Sampler(TASK, dataset, Letters(), SampleParams(), prompt_repeat_k=2, shuffle=False)
    yard.run.limits.adopt(yard.run.limits.model_copy(update={"batch_size": 4, **limits}))
    producer = Producer(yard.run, {TASK: sampler}, strategies_of(yard.run.limits))
    yard.run.control.open_producer(producer.nonce, take_over=True)
    return producer


def play(producer: Producer, yard: Yard) -> None:
    for _ in range(100):
        producer.round(yard.run.control.state())


def test_a_record_function_skips_rows_and_other_draws_take_their_slots(
    yard: Yard, tmp_path: Path
) -> None:
    producer = producer_of(yard, tmp_path, "record", max_skipped_share=1.0)
    play(producer, yard)
    stages = yard.stages()
    assert stages["waiting"] > 0
    letters = list(yard.run.skips.newest())
    assert len(letters) == stages["skipped"] == len({each.row for each in letters})
    assert all(each.row is not None and each.row % 2 == 0 for each in letters)
    assert {(each.reason, each.worker) for each in letters} == {(REASON, "")}
    yard.check()


def test_a_task_that_skips_too_much_stops_and_goes_on_once_it_is_resumed(
    yard: Yard, tmp_path: Path
) -> None:
    producer = producer_of(yard, tmp_path, "record_always", max_skipped_share=0.125)
    play(producer, yard)
    first = yard.stages()["skipped"]
    stop = yard.run.task_stops.of(TASK)
    assert stop.is_stopped
    assert stop.reason == "9 of the last 9 groups were skipped"
    assert first >= 9
    play(producer, yard)
    assert yard.stages() == {"skipped": first}
    yard.run.jobs.resume_task(TASK)
    play(producer, yard)
    assert yard.stages()["skipped"] >= first + 9
    assert yard.run.task_stops.of(TASK).is_stopped
    yard.check()


def test_the_share_is_that_of_the_newest_groups(yard: Yard) -> None:
    """Between two skips, `apart` groups are made: every eighth one of 64 is skipped, or less."""
    run = yard.run
    run.limits.adopt(run.limits.model_copy(update={"max_skipped_share": 0.125}))
    (key, most) = run.keys.progress(TASK), run.limits.most_skipped(TASK)
    assert most == 8

    async def skip(count: int, apart: int) -> None:
        for _ in range(count):
            yard.enqueue(1)
            (job,) = run.jobs.claim("w9", nonce, f"t{yard.run.jobs.cursor(TASK)}", weights, 1).jobs
            run.jobs.release("w9", job, "skipped", "no page")
            yard.store.client.hincrby(key, "produced_groups", apart)

    nonce, weights = "n9", run.control.state().weights
    run.fleet.register("w9", nonce, {"engine": "none"})
    asyncio.run(skip(30, 7))
    assert not run.task_stops.of(TASK).is_stopped
    asyncio.run(skip(2, 6))
    assert run.task_stops.of(TASK).reason == "9 of the last 64 groups were skipped"


def test_a_rehearsal_says_that_a_problem_was_skipped() -> None:
    def judge(*, response: str, ground_truth: Any, state: Any) -> float:
        raise Skip("no page")

    with pytest.raises(RehearsalError, match="was skipped: no page"):
        rehearse([{"question": "?", "answer": 1}], judge=judge)
