"""A worker whose groups change in memory between claim and submit ends, and submits nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from buffer.control.control import Mode
from buffer.errors import GroupChanged
from buffer.replay_buffer import ReplayBuffer
from buffer.wire.group import RolloutGroup
from tests.memory_fault import overwrite
from tests.pipeline.site import Site
from tests.pipeline.yard import FAST_S, SLOW_S, Yard


@pytest.fixture
def claimed(monkeypatch: pytest.MonkeyPatch) -> list[RolloutGroup]:
    """What was read since the test began."""
    groups: list[RolloutGroup] = []
    read = ReplayBuffer.read

    def noting(self: ReplayBuffer, *args: Any) -> RolloutGroup:
        groups.append(read(self, *args))
        return groups[-1]

    monkeypatch.setattr(ReplayBuffer, "read", noting)
    return groups


async def run_until_it_ends(yard: Yard, **options: Any) -> None:
    worker = yard.worker("w1", **options)
    await worker.engine.start()  # type: ignore[attr-defined]
    await asyncio.wait_for(worker.run(), 400.0)


def test_a_prompt_that_changed_is_not_submitted(yard: Yard, claimed: list[RolloutGroup]) -> None:
    (gid,) = yard.enqueue(1)

    def judge(**_: Any) -> float:
        overwrite(claimed[0].prompt_ids)
        return 1.0

    with pytest.raises(GroupChanged, match=f"{gid}: prompt_ids") as error:
        asyncio.run(run_until_it_ends(yard, judge=judge))
    assert error.value.exit_code
    assert yard.places() == {"running": 1}
    assert yard.counters().get("completed", 0) == 0


@pytest.mark.parametrize("column", ["response_ids", "logprobs", "lengths", "spans"])
@pytest.mark.parametrize("partial_rollout", [True, False])
def test_tokens_that_changed_are_not_submitted(
    yard: Yard, claimed: list[RolloutGroup], column: str, partial_rollout: bool
) -> None:
    """One member had ended before the claim, one is continued or started again."""
    (gid,) = yard.enqueue(1, (5, 300))

    async def interrupt() -> None:
        worker = yard.worker(token_s=SLOW_S, partial_rollout=partial_rollout)
        async with yard.working(worker) as engine:
            await yard.until(lambda: len(engine.requests) == 2 and engine.unfinished() == 1)
            await yard.receipts(yard.control(Mode.ABORT))
        yard.control(Mode.RUN)
        yard.reissue()

    asyncio.run(interrupt())
    before = yard.run.record(gid)["payload"]
    claimed.clear()

    def judge(**_: Any) -> float:
        overwrite(claimed[0].columns[column])
        return 1.0

    with pytest.raises(GroupChanged, match=f"{gid}: {column}"):
        asyncio.run(
            run_until_it_ends(yard, token_s=FAST_S, judge=judge, partial_rollout=partial_rollout)
        )
    assert yard.run.record(gid)["payload"] == before
    assert yard.places() == {"running": 1}


LOOP = """
from buffer.replay_buffer import ReplayBuffer
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop as Faulty
from tests.memory_fault import overwrite

read = ReplayBuffer.read


def read_into_faulty_memory(self, *args):
    group = read(self, *args)
    overwrite(group.prompt_ids)
    return group


ReplayBuffer.read = read_into_faulty_memory
"""


@pytest.mark.slow
def test_a_launched_run_ends_and_says_why(make_site: Callable[..., Site]) -> None:
    """A worker that is started again would change, or meet, the same memory."""
    site = make_site(steps=1000)
    (site.folder / "faulty.py").write_text(LOOP, encoding="utf-8")
    text = site.config.read_text(encoding="utf-8")
    assert "[tasks.sums]\n" in text
    text = text.replace("[tasks.sums]\n", '[tasks.sums]\nagent_loop = "faulty:Faulty"\n')
    site.config.write_text(text, encoding="utf-8")
    run = site.start("run")
    assert run.wait() == GroupChanged.exit_code, run.said()
    assert "prompt_ids changed in memory" in run.said()
    assert "worker restarted" not in run.said()
    assert not site.lines()
