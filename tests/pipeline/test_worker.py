from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from buffer.control.control import Mode
from buffer.control.worker_record import WorkerRecord
from buffer.errors import Fenced, LostRun, RunDamaged
from buffer.ids import new_nonce
from buffer.maintenance import column_files
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.run.run import Run
from consumer.grpo.policy.column_readers import MaskReader, Places
from consumer.grpo.policy.routing_replay import RecordedExperts
from producer_workers.config.engine import TransformersConfig
from producer_workers.engines import build_engine
from producer_workers.engines.base import EngineDeadError
from rolloutmq.views.run_view import read_run_view
from tests.buffer.cutting_proxy import CuttingProxy
from tests.pipeline.yard import FIRST, TASK, WatchedEngine, Yard
from tests.producer_workers.engines.tiny_model import VOCABULARY, write_tiny_model
from tests.servers import KINDS

on_both = pytest.mark.parametrize("make_yard", KINDS, indirect=True)
"""Also on Redis: the tests that take no time."""


async def begin(yard: Yard) -> asyncio.Task[None]:
    """Start a worker `w0` that no one stops, and wait until it has registered."""
    worker = yard.worker()
    await worker.engine.start()  # type: ignore[attr-defined]
    work = asyncio.create_task(worker.run())
    await yard.until(lambda: len(yard.run.fleet.workers()) == 1)
    return work


# -- failures ----------------------------------------------------------------


async def test_no_group_is_lost_when_the_engine_dies(yard: Yard) -> None:
    yard.enqueue(6, (50, 50))
    with pytest.raises(EngineDeadError):
        async with yard.working(yard.worker(held=True, die_after=7)) as engine:
            await yard.until(lambda: bool(engine.requests) and not yard.run.fleet.workers())
    assert yard.leases() == 0
    assert sum(yard.stages().values()) == 6
    # any of those that were in the engine may have killed it
    assert sorted(record["tries"] for record in yard.records()) == ["0", "0", *["1"] * 4]
    assert yard.counters().get("failures_in_row", 0) == 0
    async with yard.working(yard.worker("w1")):
        await yard.until_stages(completed=6)
    yard.check()


async def test_an_idle_worker_ends_when_its_engine_dies(yard: Yard) -> None:
    with pytest.raises(EngineDeadError):  # noqa: PT012
        async with yard.working(yard.worker()) as engine:
            await yard.until(lambda: len(yard.run.fleet.workers()) == 1)
            engine._state = "gone"
            await yard.until(lambda: not yard.run.fleet.workers())


@on_both
async def test_worker_ends_when_another_one_registers_under_its_name(yard: Yard) -> None:
    work = await begin(yard)
    yard.run.fleet.register("w0", new_nonce(), {})
    with pytest.raises(Fenced, match="another process has registered"):
        await asyncio.wait_for(work, 400)


@on_both
async def test_worker_ends_when_the_server_holds_another_run(yard: Yard) -> None:
    work = await begin(yard)
    keys = yard.run.keys
    raw = yard.run.store.client
    raw.hset(keys.meta, "nonce", new_nonce())
    raw.unlink(keys.worker("w0"))
    with pytest.raises(LostRun, match="another run"):
        await asyncio.wait_for(work, 400)


@on_both
async def test_worker_ends_when_a_key_is_damaged_that_every_result_needs(yard: Yard) -> None:
    """The group has not failed: it is given back when the lease runs out."""
    (gid,) = yard.enqueue(1)
    pool = yard.run.keys.pool(TASK, "completed")
    yard.store.client.set(pool, "junk")
    with pytest.raises(RunDamaged, match="of another type"):
        await asyncio.wait_for(await begin(yard), 400)
    assert yard.run.record(gid)["stage"] == "running"
    assert not yard.counters().get("failures_in_row")


async def test_work_is_dropped_and_nothing_submitted_when_a_lease_is_lost(yard: Yard) -> None:
    gids = yard.enqueue(2, (50, 50))
    async with yard.working(yard.worker(held=True, drain_timeout_s=0.1)) as engine:
        await yard.until_generating(engine, 4)
        tokens = {gid: yard.run.record(gid)["token"] for gid in gids}
        assert await asyncio.to_thread(yard.run.fleet.fence, "w0") == 2
        # the worker learns of it, cancels, registers again, and may claim the same groups again
        await yard.until(
            lambda: all(yard.run.record(g)["token"] not in ("", tokens[g]) for g in gids)
        )
        await yard.until_engine(lambda: engine.unfinished() == 4)
        assert len(engine.requests) == 8
    assert yard.counters()["leases_lost"] == 2
    assert yard.counters().get("produced_samples", 0) == 0
    assert yard.stages() == {"aborted": 2}
    assert {r["tries"] for r in yard.records()} == {"1"}
    yard.check()


# -- leaving -----------------------------------------------------------------


@on_both
async def test_stop_ends_what_is_held_and_claims_nothing_more(yard: Yard) -> None:
    yard.enqueue(6, (50, 50))
    worker = yard.worker(held=True, concurrency=2)
    async with yard.working(worker) as engine:
        await yard.until_generating(engine, 4)
        worker.stop()
        engine.let_go()
    assert yard.stages() == {"completed": 2, "waiting": 4}
    assert not yard.run.fleet.workers()
    yard.check()


async def test_stop_hands_back_what_does_not_end_in_time(yard: Yard) -> None:
    yard.enqueue(2, (50, 50))
    worker = yard.worker(held=True, drain_timeout_s=0.2, partial_rollout=True)
    async with yard.working(worker) as engine:
        await yard.until_generating(engine, 4)
    assert yard.stages() == {"aborted": 2}
    assert not yard.run.fleet.workers()
    yard.check()


async def test_stop_does_not_wait_for_long_answers_when_the_run_is_aborted(yard: Yard) -> None:
    yard.enqueue(2, (50, 50))
    worker = yard.worker(held=True, partial_rollout=True, drain_timeout_s=10_000)
    async with yard.working(worker) as engine:
        await yard.until_generating(engine, 4)
        worker.stop()
        await yard.until(lambda: [w.state for w in yard.run.fleet.workers()] == ["draining"])
        await yard.receipts(yard.control(Mode.ABORT))
    assert yard.stages() == {"aborted": 2}


@on_both
async def test_worker_leaves_when_the_run_is_finished(yard: Yard) -> None:
    yard.enqueue(2, (20, 20))
    worker = yard.worker(held=True)
    engine: WatchedEngine = worker.engine  # type: ignore[attr-defined]
    await engine.start()
    task = asyncio.create_task(worker.run())
    await yard.until_generating(engine, 4)
    await asyncio.to_thread(yard.control, Mode.FINISH)
    engine.let_go()
    await asyncio.wait_for(task, 400)
    assert yard.stages() == {"completed": 2}
    assert not yard.run.fleet.workers()


# -- outages -----------------------------------------------------------------


async def test_results_are_kept_and_submitted_after_the_server_was_killed(
    own_server: EmbeddedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(own_server.url, deadline_s=0.3)
    yard = Yard(store, "outage", tmp_path)
    yard.enqueue(6, (60, 60))
    async with yard.working(yard.worker(held=True, concurrency=3)) as engine:
        await yard.until_generating(engine, 6)
        own_server.kill()
        engine.let_go()
        await yard.until(lambda: "keeping finished groups" in caplog.text)
        own_server.start()
        await yard.until_stages(completed=6)
        assert len(engine.requests) == 12
    assert {record["tries"] for record in yard.records()} == {"0"}
    assert yard.counters().get("leases_lost", 0) == 0
    yard.check()
    store.close()


async def test_results_are_kept_and_submitted_after_the_server_was_full(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    """Fill the server for longer than one operation is tried.

    Leases are renewed, and a pause is obeyed meanwhile.
    """
    store = Store(own_server.url, deadline_s=0.3)
    yard = Yard(store, "full", tmp_path)
    yard.enqueue(6, (60, 60))
    async with yard.working(yard.worker(held=True, concurrency=3)) as engine:
        await yard.until_generating(engine, 6)
        store.client.config_set("maxmemory", 1)
        engine.let_go()
        await yard.until_renewed()
        assert yard.stages() == {"running": 3, "waiting": 3}
        epoch = yard.control(Mode.KEEP).epoch
        await yard.until(lambda: not yard.run.receipts.silent(epoch))
        yard.control(Mode.RUN)
        store.client.config_set("maxmemory", 0)
        await yard.until_stages(completed=6)
        assert len(engine.requests) == 12
    assert {record["tries"] for record in yard.records()} == {"0"}
    assert yard.counters().get("leases_lost", 0) == 0
    yard.check()
    store.close()


def test_results_from_behind_a_broken_network_are_refused_once_others_made_them(
    own_server: EmbeddedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Keep what was made, and submit it when the network is back: too late, so it is fenced."""
    socket = tmp_path / "network"
    network = CuttingProxy(own_server.url.removeprefix("unix://"), socket)
    store = Store(own_server.url, deadline_s=400.0)
    behind = Store(network.url, deadline_s=0.3)
    yard = Yard(store, "broken", tmp_path)
    away = copy.copy(yard)
    away.run = Run.open(behind, "broken")
    gids = yard.enqueue(2, (30, 30))

    async def scenario() -> dict[str, str]:
        nonlocal network
        lost = away.worker("lost", held=True)
        async with away.working(lost) as engine:
            await yard.until_generating(engine, 4)
            network.close()
            assert await asyncio.to_thread(yard.run.fleet.fence, "lost") == 2
            async with yard.working(yard.worker("near")):
                await yard.until_stages(completed=2)
            winners = {gid: yard.run.record(gid)["payload"] for gid in gids}
            engine.let_go()
            await yard.until(lambda: "keeping finished groups" in caplog.text)
            assert lost._groups, "it holds on to what it made"
            socket.unlink()
            network = CuttingProxy(own_server.url.removeprefix("unix://"), socket)
            await yard.until(lambda: not lost._groups)
        return winners

    winners = asyncio.run(scenario())
    assert {gid: yard.run.record(gid)["payload"] for gid in gids} == winners
    assert (yard.counters()["leases_lost"], yard.counters()["produced_samples"]) == (2, 4)
    yard.check()
    for opened in (store, behind, network):
        opened.close()


# -- mixed fleets ------------------------------------------------------------


async def test_workers_serve_only_the_lanes_that_they_are_for(yard: Yard) -> None:
    begun, fresh = yard.enqueue(2, (50, 50)), []
    async with yard.working(
        yard.worker("begins", held=True, lanes=["fresh"], partial_rollout=True)
    ) as engine:
        await yard.until_generating(engine, 4)
        await yard.receipts(yard.control(Mode.ABORT))
        yard.control(Mode.RUN)
        assert yard.reissue() == 2
        engine.let_go()
        fresh.extend(yard.enqueue(2))
        await yard.until(lambda: yard.stages() == {"waiting": 2, "completed": 2})
    async with yard.working(yard.worker("ends", lanes=["resume"], partial_rollout=True)):
        await yard.until_stages(completed=4)
    assert len(yard.group(begun[0]).response_ids) == 2 * 50
    yard.check()


def _fares(record: WorkerRecord) -> tuple[int | None, ...]:
    return record.done, record.failed, record.requests, record.judged, record.judge_failures


async def test_worker_reports_its_counts(yard: Yard) -> None:
    poison = yard.enqueue(4)[0]

    async def judge(*, ground_truth: str, **_: Any) -> float:
        await asyncio.sleep(0.01)
        if ground_truth == poison:
            raise ValueError("no")
        return 1.0

    worker = yard.worker(judge=judge)
    async with yard.working(worker):
        await yard.until_stages(completed=3, dead=1)
        # two rollouts each, three tries of the poisoned one
        fares = (3, 3, 0, 2 * 3 + 2 * 3, 6)
        await yard.until(lambda: _fares(yard.run.fleet.workers()[0]) == fares)
        record = yard.run.fleet.workers()[0]
        assert record.judging_ms >= 12 * 5
        times_s = [record.judge_times.quantile_s(share) for share in (0.5, 0.99)]
        assert times_s == sorted(times_s)
        assert (record.judge_times.count, times_s[0] > 0.005) == (record.judged, True)


async def test_a_group_that_only_waits_for_its_judge_is_counted_as_such(yard: Yard) -> None:
    judged = yard.enqueue(1, (3, 3))[0]
    sampled = asyncio.Event()

    async def judge(*, ground_truth: str, **_: Any) -> float:
        if ground_truth == judged:
            await sampled.wait()
        return 1.0

    async with yard.working(yard.worker(judge=judge, held=True)) as engine:
        await yard.until(lambda: read_run_view(yard.run).judging == 1)
        yard.enqueue(1, (200, 200))  # it is sampled, and not judged
        await yard.until(lambda: read_run_view(yard.run).leases == 2)
        assert read_run_view(yard.run).judging == 1
        sampled.set()
        engine.let_go()
        await yard.until_stages(completed=2)
        await yard.until(lambda: read_run_view(yard.run).judging == 0)


@pytest.mark.parametrize("most", [0, 1 << 20], ids=["files", "columns"])
async def test_worker_submits_experts_and_masks_as_files_of_the_run_if_they_are_large(
    make_yard: Callable[..., Yard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Either way the trainer's readers find a row for each token but the last, and a set for each."""
    monkeypatch.setattr(column_files, "INLINE_BYTES", most)
    yard = make_yard(columns=str(tmp_path / "columns"))
    model = write_tiny_model(tmp_path / "model", seed=1, architecture="qwen3_moe")
    (gid,) = yard.enqueue(1, tokens=(6, 4))
    config = TransformersConfig(routed_experts=True, sampling_mask=True)
    engine = build_engine(config, model, FIRST)
    async with yard.working(yard.worker(engine=engine)):
        await yard.until_stages(completed=1)
    await engine.shutdown()
    group = yard.group(gid)
    columns = yard.run.columns
    assert len(list(tmp_path.glob(f"columns/*/{gid}/*.npy"))) == (0 if most else 4)
    assert (group.columns.get("routed_experts/rows") is None) == (most == 0)
    assert (group.columns.get("sampling_mask/ids") is None) == (most == 0)
    masks = MaskReader(VOCABULARY, columns, needed=True)
    assert masks.problem(group) == ""
    responses = np.split(group.response_ids, [6])
    starts, totals = np.array([0, 9]), np.array([9, 7])
    places = Places(responses, starts, totals, 16, torch.device("cpu"))
    found = masks.of_rollouts(group.values_of("sampling_mask"), places)
    assert found is not None
    assert (found.counts == VOCABULARY - 1).all()  # min_tokens cuts off the end
    recorded = RecordedExperts(layers=2, top_k=2, experts=8, columns=columns)
    assert recorded.problem(group) == ""
    experts = recorded.of_rollouts(group.values_of("routed_experts"), places)
    assert experts is not None
    table = experts.numpy()
    assert table.shape == (16, 2, 2)
    assert np.flatnonzero((table < 0).any((1, 2))).tolist() == [8, 15]
