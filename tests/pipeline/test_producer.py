"""The producer: how far ahead it runs, and what a kill or a second one costs (I3, I7)."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from buffer.control import roles
from buffer.errors import Fenced, RoleHeld, RolloutMQError
from buffer.ids import group_id, new_nonce
from buffer.manifest import Manifest, NotReady
from buffer.wire.sampling import SampleParams
from producer_workers.datasets.dataset import Problem
from producer_workers.producer.producer import Producer
from producer_workers.producer.sampler import Sampler
from producer_workers.producer.strategy import AsyncProduceStrategy
from rolloutmq.views.explain.diagnosis import diagnose
from rolloutmq.views.run_view import read_run_view
from tests.pipeline import produce
from tests.pipeline.produce import make_producer
from tests.pipeline.yard import TASK, Letters, Yard
from tests.servers import KINDS
from tests.waits import end_of, until
from tests.warm_process import start_program

on_both = pytest.mark.parametrize("make_yard", KINDS, indirect=True)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """100 problems, every tenth too long."""
    path = tmp_path / "problems.jsonl"
    rows = [{"question": f"{n:04d}" * (40 if n % 10 == 0 else 1), "answer": n} for n in range(100)]
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    return path


def take_the_role(producer: Producer, yard: Yard) -> None:
    yard.run.control.open_producer(producer.nonce, take_over=True)


def play(producer: Producer, yard: Yard) -> None:
    """Produce rounds until nothing more is started, and no draw is passed over."""
    cursor = -1
    while producer.round(yard.run.control.state()) or yard.run.jobs.cursor(TASK) > cursor:
        cursor = yard.run.jobs.cursor(TASK)


@on_both
@pytest.mark.parametrize("threshold", [1, 3])
def test_groups_in_place_of_unusable_ones_are_made(
    yard: Yard, dataset: Path, threshold: int
) -> None:
    """No group of the last batch can be used.

    With a threshold of 1, groups that are generated now are too old for any later step.
    """
    long = SampleParams(max_tokens=60, min_tokens=60)
    producer = make_producer(
        yard.run, dataset, share=2, threshold=threshold, steps=1, sample_params=long
    )
    take_the_role(producer, yard)
    ledger, nonce = yard.run.ledger, yard.trainer

    async def work() -> Manifest | NotReady:
        async with yard.working(yard.worker()):
            play(producer, yard)
            await yard.until_stages(completed=2)
            batch = ledger.take(nonce, 1, {TASK: 2})
            assert isinstance(batch, Manifest)
            for entry in batch.entries:
                ledger.quarantine(nonce, 1, entry, "unusable")
            assert ledger.refill(nonce, 1) == NotReady({TASK: (0, 2)})
            play(producer, yard)
            await yard.until_stages(completed=2, dead=2)
            return ledger.refill(nonce, 1)

    filled = asyncio.run(work())
    assert isinstance(filled, Manifest)
    assert len(filled.gids) == 2
    assert producer.round(yard.run.control.state()) == 0
    yard.check()


@on_both
def test_prompts_that_no_worker_could_have_are_skipped_or_stop_their_task_alone(
    yard: Yard, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "problems.jsonl"
    rows = [{"question": f"{n:04d}", "answer": "x" * (2**20 if n == 3 else 1)} for n in range(8)]
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    producer = make_producer(yard.run, path, share=7)
    take_the_role(producer, yard)
    play(producer, yard)
    assert yard.stages() == {"waiting": 7, "dropped": 1}
    assert f"task {TASK}: row 3 is skipped: its prompt has" in caplog.text
    yard.check()


@on_both
def test_two_producers_never_overshoot_when_one_is_fenced_in_the_middle(
    yard: Yard, dataset: Path
) -> None:
    first = make_producer(yard.run, dataset, share=300, slice_size=3)
    ended: list[BaseException] = []

    def run_first() -> None:
        try:
            first.produce_loop(threading.Event(), take_over=True)
        except Fenced as error:
            ended.append(error)

    thread = threading.Thread(target=run_first)
    thread.start()
    until(lambda: yard.stages().get("waiting", 0) > 20 or not thread.is_alive())
    second = make_producer(yard.run, dataset, share=300, slice_size=5)
    take_the_role(second, yard)
    play(second, yard)
    thread.join(400)
    assert len(ended) == 1
    assert yard.stages()["waiting"] == 300
    check_draws(yard)


def test_no_draw_is_skipped_or_doubled_when_producers_are_killed(
    make_yard: Callable[..., Yard], server_of: Callable[[str], Any], dataset: Path
) -> None:
    """A process of its own each time, killed at a random moment of its work (I3)."""
    yard = make_yard()
    chance = random.Random(11)
    share = 60
    version = 0
    for _ in range(6):
        version += 1
        yard.publish(version)
        start = yard.stages().get("waiting", 0)
        words = (server_of("valkey").url, yard.run.name, str(dataset), str(share))
        process = start_program(produce.main, *words)
        until_waiting(yard, start + chance.randrange(1, share), partial(end_of, process))
        process.kill()
        process.join()
    last = make_producer(yard.run, dataset, share)
    take_the_role(last, yard)
    play(last, yard)
    assert yard.stages()["waiting"] == share * (version + 1)
    check_draws(yard)


def until_waiting(yard: Yard, groups: int, over: Callable[[], str]) -> None:
    until(lambda: yard.stages().get("waiting", 0) >= groups, f"{groups} groups that wait", over)


def check_draws(yard: Yard) -> None:
    yard.check()
    cursor = yard.run.jobs.cursor(TASK)
    stream = yard.store.client.xrange(yard.run.keys.jobs(TASK, "fresh"))
    waiting = [fields[b"gid"].decode() for _, fields in stream]
    dropped = {draw for draw in range(cursor) if yard.run.account.stages(TASK, draw) == ["dropped"]}
    assert waiting == [group_id(TASK, draw) for draw in range(cursor) if draw not in dropped]
    rows = {
        (s.extra["epoch"], s.extra["row"]) for s in (yard.group(gid).states[0] for gid in waiting)
    }
    assert len(rows) == len(waiting)


@on_both
def test_full_run_draws_no_prompts_logs_it_once_and_continues_when_there_is_room(
    yard: Yard, dataset: Path, caplog: pytest.LogCaptureFixture
) -> None:
    producer = make_producer(yard.run, dataset, share=40)
    take_the_role(producer, yard)
    producer.round(yard.run.control.state())
    started = yard.stages()["waiting"]
    limits = yard.run.limits
    yard.run.limits.adopt(limits.model_copy(update={"low_bytes": 1, "high_bytes": 2}))
    for _ in range(3):
        assert producer.round(yard.run.control.state()) == 0
    assert yard.stages()["waiting"] == started
    assert caplog.text.count("no new prompts for now") == 1
    yard.run.limits.adopt(limits.model_copy(update={"low_bytes": 2**30, "high_bytes": 2**30}))
    play(producer, yard)
    assert yard.stages()["waiting"] == 40
    assert "new prompts again" in caplog.text
    yard.check()


class SlowRow:
    """A data set that gives no row before it is told to."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()

    def row(self, row: int, epoch: int = 0) -> Problem:
        self.is_asked.set()
        assert self.may_answer.wait(400)
        return Problem(messages=[{"role": "user", "content": f"{row}"}])

    def __len__(self) -> int:
        return 100


def test_a_producer_whose_data_set_is_slow_is_alive_until_it_hangs(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("buffer.control.control.SHORT_S", 0.0)
    data = SlowRow()
    sampler = Sampler(TASK, data, Letters(), SampleParams())
    strategies = {TASK: AsyncProduceStrategy(TASK, yard.run.limits)}
    producer = Producer(yard.run, {TASK: sampler}, strategies)
    ended: list[BaseException] = []

    def produce() -> None:
        try:
            producer.produce_loop(threading.Event(), take_over=True)
        except RolloutMQError as error:
            ended.append(error)

    thread = threading.Thread(target=produce)
    thread.start()
    assert data.is_asked.wait(400)
    control = yard.run.control
    first = control.holder("producer")
    seen = [first]
    while len({holder.seen_ms for holder in seen}) < 5:
        seen.append(control.holder("producer"))
        with pytest.raises(RoleHeld):
            control.open_producer(new_nonce())
    # no round was finished meanwhile, and the reason is known
    assert {holder.turns for holder in seen} == {first.turns}
    assert seen[-1].doing == f"draws prompt 0 of task {TASK}"
    assert any(
        f"draws prompt 0 of task {TASK}" in s.what for s in diagnose(read_run_view(yard.run))
    )
    monkeypatch.setattr(roles, "HUNG_S", 0.0)
    until(lambda: "no more heartbeats: this process hangs" in caplog.text)
    yard.run.limits.adopt(yard.run.limits.model_copy(update={"role_timeout_ms": 300}))
    until(lambda: not control.holder("producer").is_alive)
    control.open_producer(new_nonce())
    data.may_answer.set()
    thread.join(400)
    assert [type(error) for error in ended] == [Fenced]
    assert "waiting" not in yard.stages()
    yard.check()
