"""Every kind of bad payload at every entrance of a run fails alone, with its reason.

What workers submit: tests/integration/test_hostile_payloads.py.
"""

from __future__ import annotations

import asyncio
import threading
from base64 import b64encode
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from buffer.control.control import STATE_FIELDS, Mode
from buffer.errors import DatasetError, JudgeError, RolloutMQError
from buffer.redis.store import Store
from buffer.wire.rollout import RolloutState
from producer_workers.config.task import JudgingSection
from producer_workers.judges.load import HttpJudge
from producer_workers.judges.rq_judge import RqJudge
from tests.bad_payloads import CONTROL, GROUP, KINDS, LINE, REWARD
from tests.pipeline.yard import FIRST, TASK, Yard

GOOD = orjson.dumps({"score": 1.0})


def test_every_entrance_is_tried_with_every_kind() -> None:
    assert set(GROUP) == set(LINE) == set(REWARD) == set(CONTROL) == set(KINDS)
    assert len(KINDS) >= 13


def dead(yard: Yard) -> dict[str, str]:
    return {letter.gid: letter.reason for letter in yard.run.dead_letters.newest()}


def test_prompts(yard: Yard) -> None:
    yard.run.limits.max_tries = 1
    # in turns: a worker of which every try fails pauses between its claims
    gids = yard.enqueue(2 * len(KINDS))
    bad, good = gids[::2], gids[1::2]
    for gid, kind in zip(bad, KINDS, strict=True):
        key = yard.run.keys.payload(gid, "init")
        yard.store.control.set(key, GROUP[kind](yard.store.control.get(key)))

    async def work() -> None:
        async with yard.working(yard.worker()):
            await yard.until_places(dead=len(bad), completed=len(good))

    asyncio.run(work())
    letters = dead(yard)
    assert set(letters) == set(bad)
    untyped = {
        kind: letters[gid]
        for gid, kind in zip(bad, KINDS, strict=True)
        if not _is_told(letters[gid])
    }
    assert not untyped
    # fsck sees what was done to the prompts, and nothing else
    audit = yard.run.account.fsck()
    assert {damage.gid for damage in audit.damage} <= set(bad)
    assert (audit.lost, audit.doubled) == ([], [])


def _is_told(reason: str) -> bool:
    return reason.startswith(("WireError: ", "SchemaVersionError: ", "PayloadMissing: "))


def test_tokens_of_an_aborted_group_that_are_garbage_are_made_again(yard: Yard) -> None:
    gids = yard.enqueue(len(KINDS), tokens=(5000, 5000))

    async def work() -> None:
        async with yard.working(
            yard.worker(token_s=0.01, partial_rollout=True, concurrency=len(gids))
        ) as engine:
            await yard.until_generating(engine, 2 * len(gids))
            yard.control(Mode.ABORT)
            await yard.until_places(aborted=len(gids))
        for gid, kind in zip(gids, KINDS, strict=True):
            key = yard.run.keys.payload(gid, yard.run.record(gid)["payload"])
            yard.store.control.set(key, GROUP[kind](yard.store.control.get(key)))
        yard.control(Mode.RUN)
        assert yard.reissue() == len(gids)
        async with yard.working(
            yard.worker("w1", token_s=0.0001, partial_rollout=True, concurrency=len(gids))
        ):
            await yard.until_places(completed=len(gids))

    asyncio.run(work())
    yard.check()


async def _serve(yard: Yard, answers: dict[str, bytes], judge_from_function: Any) -> None:
    """Start a judge at a URL that answers for each group, by its ground truth, what is given."""

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
            await yard.until_places(dead=len(bad), completed=len(good))

    asyncio.run(_serve(yard, answers, judged))
    untyped = {
        gid: reason for gid, reason in dead(yard).items() if "http://127.0.0.1" not in reason
    }
    assert not untyped
    yard.check()


def test_answers_in_rqs_results(yard: Yard) -> None:
    """Somebody who may write rq's keys answers in place of a judge."""
    judge_store = Store(yard.store.servers.masters()[0][0])
    judge = RqJudge("m:f", judge_store, yard.run.name, JudgingSection(kind="rq", retries=0))
    raw: Any = judge_store.bulk

    def answer(data: bytes, stop: threading.Event) -> None:
        while not stop.wait(0.01):
            for job in raw.lrange(judge._queue.key, 0, -1):
                raw.lrem(judge._queue.key, 0, job)
                raw.xadd(
                    f"rq:results:{job.decode()}",
                    {"type": "1", "return_value": b64encode(data).decode()},
                )

    for kind in KINDS:
        stop = threading.Event()
        thread = threading.Thread(target=answer, args=(REWARD[kind](GOOD), stop))
        thread.start()
        try:
            with pytest.raises(JudgeError, match="judge 'm:f'"):
                pytest.fail(f"{kind}: {asyncio.run(judge.judge(RolloutState(response='x')))}")
        finally:
            stop.set()
            thread.join()
    judge_store.close()


def test_lines_of_a_file_that_is_imported(yard: Yard, tmp_path: Path) -> None:
    line = {
        "gid": "a",
        "task": TASK,
        "response_ids": [1, 2],
        "logprobs": [-1.0, -1.0],
        "reward": {"score": 1.0},
    }
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


def test_hints_of_the_control_channel(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    """They are ignored, and the next good one is still received."""
    hint = "\0".join(["99", "finish", "eval resume fresh", str(FIRST), "/w", "sum"]).encode()
    gids = yard.enqueue(2)

    def lines() -> list[dict[str, str]]:
        return [
            client
            for client in yard.store.control.client_list()
            if client["name"].endswith("-line")
        ]

    async def work() -> None:
        async with yard.working(yard.worker()):
            await yard.until_places(completed=len(gids))
            await yard.until(lambda: len(lines()) == 1)
            heard_on = [line["id"] for line in lines()]
            for kind in KINDS:
                yard.store.control.publish(yard.run.keys.control, CONTROL[kind](hint))
            await yard.until(
                lambda: (
                    caplog.text.count("ignoring an invalid message of the control channel")
                    == len(KINDS)
                )
            )
            await yard.receipts(yard.control(Mode.DRAIN))
            await yard.receipts(yard.control(Mode.RUN))
            more = await asyncio.to_thread(yard.enqueue, 2)
            await yard.until_places(completed=len(gids) + len(more))
            assert [line["id"] for line in lines()] == heard_on

    asyncio.run(work())
    yard.check()


def test_a_control_state_that_was_overwritten(yard: Yard, tmp_path: Path) -> None:
    key, names = yard.run.keys.control, STATE_FIELDS
    yard.name(1, tmp_path, "sum")
    state = yard.run.control.state()
    good = b"\0".join(field or b"" for field in yard.store.control.hmget(key, *names))
    for kind in KINDS:
        fields = (CONTROL[kind](good).split(b"\0") + [b""] * len(names))[: len(names)]
        yard.store.control.hset(key, mapping=dict(zip(names, fields, strict=True)))
        if kind in (
            "trailing bytes",
            "unknown field",
            "wrong lengths",
            "same key twice",
            "bad utf-8",
            "truncated",
        ):
            continue  # more fields are no state of this hash; another path or none is one
        with pytest.raises(RolloutMQError):
            pytest.fail(f"{kind}: {yard.run.control.state()}")
    yard.store.control.hset(key, mapping=dict(zip(names, good.split(b"\0"), strict=True)))
    assert yard.run.control.state() == state
