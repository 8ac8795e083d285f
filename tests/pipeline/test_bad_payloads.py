"""Every kind of bad payload at every entrance of a run fails alone, with its reason.

What workers submit: tests/integration/test_hostile_payloads.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from buffer.control.control import Mode
from buffer.errors import DatasetError, GroupChanged
from buffer.groups.replay_buffer import ReplayBuffer
from buffer.wire.group import RolloutGroup
from producer_workers.config.task import JudgingSection
from producer_workers.judges.load import HttpJudge
from tests.bad_payloads import CONTROL, GROUP, KINDS, LINE, REWARD
from tests.memory_fault import overwrite
from tests.pipeline.site import Site
from tests.pipeline.yard import FIRST, TASK, Yard

GOOD = orjson.dumps({"score": 1.0})


def test_every_entrance_is_tried_with_every_kind() -> None:
    assert set(GROUP) == set(LINE) == set(REWARD) == set(CONTROL) == set(KINDS)
    assert len(KINDS) >= 13


def dead(yard: Yard) -> dict[str, str]:
    return {letter.gid: letter.reason for letter in yard.run.dead_letters.newest()}


async def test_prompts(yard: Yard) -> None:
    yard.run.limits.max_tries = 1
    # in turns: a worker of which every try fails pauses between its claims
    gids = yard.enqueue(2 * len(KINDS))
    bad, good = gids[::2], gids[1::2]
    for gid, kind in zip(bad, KINDS, strict=True):
        key = yard.run.keys.payload(gid, "init")
        yard.store.client.set(key, GROUP[kind](yard.store.client.get(key)))
    async with yard.working(yard.worker()):
        await yard.until_stages(dead=len(bad), completed=len(good))
    letters = dead(yard)
    assert set(letters) == set(bad)
    untyped = {
        kind: letters[gid]
        for gid, kind in zip(bad, KINDS, strict=True)
        if not letters[gid].startswith(("WireError: ", "SchemaVersionError: ", "PayloadMissing: "))
    }
    assert not untyped
    # fsck sees what was done to the prompts, and nothing else
    audit = yard.run.account.fsck()
    assert {damage.gid for damage in audit.damage} <= set(bad)
    assert (audit.lost, audit.doubled) == ([], [])


async def test_tokens_of_an_aborted_group_that_are_garbage_are_made_again(yard: Yard) -> None:
    gids = yard.enqueue(len(KINDS), tokens=(50, 50))
    async with yard.working(
        yard.worker(held=True, partial_rollout=True, concurrency=len(gids))
    ) as engine:
        await yard.until_generating(engine, 2 * len(gids))
        yard.control(Mode.ABORT)
        await yard.until_stages(aborted=len(gids))
    for gid, kind in zip(gids, KINDS, strict=True):
        key = yard.run.keys.payload(gid, yard.run.record(gid)["payload"])
        yard.store.client.set(key, GROUP[kind](yard.store.client.get(key)))
    yard.control(Mode.RUN)
    assert yard.reissue() == len(gids)
    async with yard.working(yard.worker("w1", partial_rollout=True, concurrency=len(gids))):
        await yard.until_stages(completed=len(gids))
    yard.check()


async def _serve(yard: Yard, answers: dict[str, bytes], judge_from_function: Any) -> None:
    async def answer(request: web.Request) -> web.Response:
        asked = orjson.loads(await request.read())
        return web.Response(
            body=answers.get(asked["ground_truth"], GOOD), content_type="application/json"
        )

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        await judge_from_function(f"http://127.0.0.1:{runner.addresses[0][1]}/")
    finally:
        await runner.cleanup()


def test_answers_of_a_judge(yard: Yard) -> None:
    yard.run.limits.max_tries = 1
    gids = yard.enqueue(2 * len(KINDS))
    bad, good = gids[::2], gids[1::2]
    answers = {gid: REWARD[kind](GOOD) for gid, kind in zip(bad, KINDS, strict=True)}

    async def judged(url: str) -> None:
        async with yard.working(yard.worker(judge=HttpJudge(url, JudgingSection(timeout_s=400.0)))):
            await yard.until_stages(dead=len(bad), completed=len(good))

    asyncio.run(_serve(yard, answers, judged))
    untyped = {
        gid: reason for gid, reason in dead(yard).items() if "http://127.0.0.1" not in reason
    }
    assert not untyped
    yard.check()


def test_lines_of_a_file_that_is_imported(yard: Yard, tmp_path: Path) -> None:
    line = {
        "gid": "a", "task": TASK, "response_ids": [1, 2], "logprobs": [-1.0, -1.0],
        "reward": {"score": 1.0},
    }  # fmt: skip
    good = orjson.dumps(line)
    path = tmp_path / "lines.jsonl"
    before = yard.run.account.totals()
    for kind in KINDS:
        bad = LINE[kind](good)
        if not bad:
            continue  # an empty line is none
        path.write_bytes(good + b"\n" + bad + b"\n")
        with pytest.raises(DatasetError, match=rf"{path.name}, lines? \d") as caught:
            pytest.fail(f"{kind}: {yard.run.import_groups(path)}")
        assert caught.value.hint, kind
        assert len(str(caught.value)) < 1000, kind
    assert yard.run.account.totals() == before
    path.write_bytes(good)
    assert yard.run.import_groups(path).groups == 1
    yard.check()


async def test_hints_of_the_control_channel(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    """They are ignored, and the next good one is still received."""
    hint = "\0".join(["99", "finish", "eval resume fresh", str(FIRST), "/w", "sum"]).encode()
    gids = yard.enqueue(2)

    def lines() -> list[dict[str, str]]:
        return [
            client for client in yard.store.client.client_list() if client["name"].endswith("-line")
        ]

    async with yard.working(yard.worker()):
        await yard.until_stages(completed=len(gids))
        await yard.until(lambda: len(lines()) == 1)
        heard_on = [line["id"] for line in lines()]
        for kind in KINDS:
            yard.store.client.publish(yard.run.keys.control, CONTROL[kind](hint))
        await yard.until(
            lambda: (
                caplog.text.count("ignoring an invalid message of the control channel")
                == len(KINDS)
            )
        )
        await yard.receipts(yard.control(Mode.DRAIN))
        await yard.receipts(yard.control(Mode.RUN))
        more = await asyncio.to_thread(yard.enqueue, 2)
        await yard.until_stages(completed=len(gids) + len(more))
        assert [line["id"] for line in lines()] == heard_on
    yard.check()


# -- changed groups ------------------------------


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

    with pytest.raises(GroupChanged, match=gid) as error:
        asyncio.run(run_until_it_ends(yard, judge=judge))
    assert error.value.exit_code
    assert yard.stages() == {"running": 1}
    assert yard.counters().get("completed", 0) == 0


@pytest.mark.parametrize("column", ["response_ids", "logprobs", "lengths", "spans"])
@pytest.mark.parametrize("partial_rollout", [True, False])
def test_tokens_that_changed_are_not_submitted(
    yard: Yard, claimed: list[RolloutGroup], column: str, partial_rollout: bool
) -> None:
    """One member had ended before the claim, one is continued or started again."""
    (gid,) = yard.enqueue(1, (5, 30))

    async def interrupt() -> None:
        worker = yard.worker(held=True, partial_rollout=partial_rollout)
        async with yard.working(worker) as engine:
            await yard.until_engine(lambda: len(engine.requests) == 2)
            await yard.until_generating(engine, 1)
            await yard.receipts(yard.control(Mode.ABORT))
        yard.control(Mode.RUN)
        yard.reissue()

    asyncio.run(interrupt())
    before = yard.run.record(gid)["payload"]
    claimed.clear()

    def judge(**_: Any) -> float:
        overwrite(claimed[0].columns[column])
        return 1.0

    with pytest.raises(GroupChanged, match=gid):
        asyncio.run(run_until_it_ends(yard, judge=judge, partial_rollout=partial_rollout))
    assert yard.run.record(gid)["payload"] == before
    assert yard.stages() == {"running": 1}


LOOP = """
from buffer.groups.replay_buffer import ReplayBuffer
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
    site = make_site()
    (site.folder / "faulty.py").write_text(LOOP, encoding="utf-8")
    text = site.config.read_text(encoding="utf-8")
    assert "[tasks.sums]\n" in text
    text = text.replace("[tasks.sums]\n", '[tasks.sums]\nagent_loop = "faulty:Faulty"\n')
    site.config.write_text(text, encoding="utf-8")
    run = site.start("run")
    assert run.wait() == GroupChanged.exit_code, run.said()
    assert "changed in memory" in run.said()
    assert "worker restarted" not in run.said()
    assert not site.lines()
