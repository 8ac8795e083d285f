"""A worker and the control state: pauses, new weights, interrupted groups (I9, I10)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.control.control import Mode
from buffer.control.control_line import ControlConnection
from buffer.ids import new_nonce
from buffer.wire.rollout import PolicyVersion, Status
from producer_workers.worker import control_client
from producer_workers.worker.control_client import ControlClient, ControlView
from producer_workers.worker.inbox import Inbox
from tests.pipeline.yard import FIRST, LINEAGE, SOME, Yard, versions
from tests.servers import KINDS

on_both = pytest.mark.parametrize("make_yard", KINDS, indirect=True)
"""Also on Redis: the tests that take no time."""


# -- pauses ------------------------------------------------------------------


@on_both
@pytest.mark.parametrize("partial", [True, False], ids=["partial", "whole"])
async def test_abort_leaves_no_lease_and_keeps_tokens_only_when_partial_rollout_is_on(
    yard: Yard, partial: bool
) -> None:
    gids = yard.enqueue(3, (50, 50))
    async with yard.working(yard.worker(held=True, partial_rollout=partial)) as engine:
        await yard.until_generating(engine, 6)
        await yard.receipts(yard.control(Mode.ABORT))
        assert yard.leases() == 0
        assert yard.stages() == {"aborted": 3}
    for gid in gids:
        group = yard.group(gid)
        assert group.lengths.tolist() == [SOME if partial else 0] * 2
        assert group.status is (Status.ABORTED if partial else Status.INIT)
        if partial:
            assert [versions(s) for s in group.states] == [[FIRST] * int(n) for n in group.lengths]
    assert {(r["tries"], r["aborts"]) for r in yard.records()} == {("0", "1")}
    yard.check()


async def test_group_starts_again_from_its_prompt_when_its_tokens_were_lost(yard: Yard) -> None:
    (gid,) = yard.enqueue(1, (50, 50))
    async with yard.working(yard.worker(held=True, partial_rollout=True)) as engine:
        await yard.until_generating(engine, 2)
        await yard.receipts(yard.control(Mode.ABORT))
        lost = yard.run.record(gid)["payload"]
        assert lost != "init"
        # as a node of a cluster does that dies without a replica
        yard.run.store.client.delete(yard.run.keys.payload(gid, lost))
        yard.run.jobs.requeue(gid)
        yard.control(Mode.RUN)
        await yard.until_generating(engine, 2)
        await yard.receipts(yard.control(Mode.ABORT))
    assert yard.group(gid).status is Status.ABORTED
    assert (yard.run.record(gid)["tries"], yard.run.record(gid)["aborts"]) == ("0", "2")
    yard.check()


async def test_keep_loses_nothing_and_stamps_each_token_when_weights_change_in_the_middle(
    yard: Yard,
) -> None:
    gids = yard.enqueue(2, (100, 100))
    async with yard.working(yard.worker(held=True)) as engine:
        await yard.until_generating(engine, 4)
        await yard.receipts(yard.control(Mode.KEEP))
        engine.make(1000)  # nothing: it is frozen
        await yard.until_renewed()  # what is frozen is still held
        assert yard.stages() == {"running": 2}
        weights = yard.publish(1)
        yard.control(Mode.RUN)
        await yard.until(lambda: engine.version() == weights)
        engine.let_go()
        await yard.until_stages(completed=2)
    for gid in gids:
        for state in yard.group(gid).states:
            assert versions(state) == [FIRST] * SOME + [weights] * (100 - SOME)
    assert yard.counters().get("leases_lost", 0) == 0
    assert int(yard.records()[0]["version"]) == 0
    yard.check()


async def test_drain_ends_what_runs_and_claims_nothing_when_more_waits(yard: Yard) -> None:
    yard.enqueue(5, (60, 60))
    async with yard.working(yard.worker(held=True, concurrency=2)) as engine:
        await yard.until_generating(engine, 4)
        draining = yard.control(Mode.DRAIN)
        engine.let_go()
        await yard.receipts(draining)
        assert yard.stages() == {"completed": 2, "waiting": 3}
        yard.control(Mode.RUN)
        await yard.until_stages(completed=5)
    yard.check()


async def test_a_line_that_opens_after_its_worker_has_left_is_closed(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, gate, closed = threading.Event(), threading.Event(), threading.Event()

    class SlowLine(ControlConnection):
        def __init__(self, *arguments: Any) -> None:
            opening.set()
            assert gate.wait(400)
            super().__init__(*arguments)

        def close(self) -> None:
            super().close()
            closed.set()

    monkeypatch.setattr(control_client, "ControlConnection", SlowLine)
    client = ControlClient(yard.run, "w0", new_nonce(), ControlView(), Inbox())
    async with client.connected():
        await yard.until(opening.is_set)
        asyncio.get_running_loop().call_later(0.1, gate.set)
    assert closed.is_set()


@pytest.mark.parametrize("heartbeat_ms", [100, 60_000], ids=["by heartbeat", "by claim"])
async def test_disconnected_worker_learns_of_a_pause_with_its_next_call(
    make_yard: Callable[..., Yard], monkeypatch: pytest.MonkeyPatch, heartbeat_ms: int
) -> None:
    monkeypatch.setattr(ControlClient, "listen", lambda self: asyncio.Event().wait())
    yard = make_yard(heartbeat_ms=heartbeat_ms, lease_ms=180_000)
    async with yard.working(yard.worker()):
        await yard.until(lambda: yard.run.receipts.silent(1) == [])
        state = yard.control(Mode.DRAIN)
        await yard.receipts(state)


@on_both
async def test_a_worker_that_joins_during_a_pause_starts_paused(yard: Yard) -> None:
    yard.enqueue(2)
    state = yard.control(Mode.KEEP)
    async with yard.working(yard.worker()) as engine:
        await yard.until(lambda: [w.state for w in yard.run.fleet.workers()] == ["paused"])
        await yard.receipts(state)
        assert yard.stages() == {"waiting": 2}
        assert not engine.requests
        yard.control(Mode.RUN)
        await yard.until_stages(completed=2)


async def test_an_evaluation_runs_when_only_its_lane_is_open(
    make_yard: Callable[..., Yard],
) -> None:
    """Groups of an open lane must neither be aborted nor keep the receipt away."""
    yard = make_yard()
    yard.enqueue(3, (50, 50))
    async with yard.working(yard.worker(held=True, partial_rollout=True)) as engine:
        await yard.until_generating(engine, 6)
        # 'resume' is open in this pause: what is taken from it must not be aborted again before
        # the receipt
        state = yard.run.control.set_mode("operator", Mode.ABORT, lanes="resume")
        await yard.receipts(state)
        assert yard.stages() == {"aborted": 3}
    assert yard.reissue() == 3
    async with yard.working(yard.worker("w1", partial_rollout=True)) as engine:
        await yard.until_stages(completed=3)
        assert len(engine.requests) == 6
        await yard.receipts(state)
    yard.check()


# -- weights -----------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.KEEP, Mode.ABORT, Mode.DRAIN])
async def test_torn_weights_are_refused_without_harm_until_good_ones_come(
    yard: Yard, caplog: pytest.LogCaptureFixture, mode: Mode
) -> None:
    caplog.set_level(logging.ERROR, "rolloutmq.worker")
    folder, checksum = yard.write_weights(1)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1] + b"!")
    async with yard.working(yard.worker(held=True, partial_rollout=True)) as engine:
        yard.enqueue(2, (100, 100))
        await yard.until_generating(engine, 4)
        yard.name(1, folder, checksum)
        await yard.until(lambda: "refused" in caplog.text)
        # running groups end under the old weights: the engine is not left paused
        engine.let_go()
        await yard.until_stages(completed=2)
        yard.enqueue(1)
        await yard.until_idle()
        assert yard.stages() == {"completed": 2, "waiting": 1}
        assert engine.version() == FIRST
        # neither does a pause wait for weights that do not load
        await yard.receipts(yard.control(mode))
        yard.control(Mode.RUN)
        await yard.until_idle()
        assert engine.version() == FIRST
        # made whole in place: found out without any further message
        (folder / "model.safetensors").write_bytes(whole)
        await yard.until_stages(completed=3)
        assert engine.version() == PolicyVersion(LINEAGE, 1)
    refusals = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    assert len(refusals) == 1
    assert "model.safetensors" in refusals[0]
    yard.check()


async def test_work_is_dropped_when_a_lease_is_lost_while_weights_are_loaded(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.enqueue(2, (50, 50))
    async with yard.working(yard.worker(held=True, drain_timeout_s=0.1)) as engine:
        await yard.until_generating(engine, 4)
        load, loading, gate = engine.load_weights, asyncio.Event(), asyncio.Event()

        async def load_slowly(path: Path, version: PolicyVersion) -> None:
            loading.set()
            await gate.wait()
            await load(path, version)

        monkeypatch.setattr(engine, "load_weights", load_slowly)
        yard.publish(1)
        await loading.wait()
        assert await asyncio.to_thread(yard.run.fleet.fence, "w0") == 2
        await yard.until_engine(lambda: engine.unfinished() == 0)
        gate.set()
        await yard.until_generating(engine, 4)
    assert yard.counters()["leases_lost"] == 2
    yard.check()


# -- partial rollout ---------------------------------------------------------


async def test_an_aborted_group_is_completed_by_another_worker_from_where_it_was(
    yard: Yard,
) -> None:
    (gid,) = yard.enqueue(1, (5, 200, 200))
    async with yard.working(yard.worker("first", held=True, partial_rollout=True)) as engine:
        await yard.until_engine(lambda: len(engine.requests) == 3)
        await yard.until_generating(engine, 2)
        await yard.receipts(yard.control(Mode.ABORT))
    before = yard.group(gid)
    done = before.lengths.tolist()
    assert done == [5, SOME, SOME]
    yard.publish(3)
    yard.control(Mode.RUN)
    assert yard.reissue() == 1
    async with yard.working(yard.worker("second", partial_rollout=True)) as engine:
        await yard.until_stages(completed=1)
        # the completed member is not asked for again; the others only for what is left, behind
        # what they have
        asked = sorted((prompt, params.max_tokens) for _, prompt, params in engine.requests)
        assert asked == sorted((3 + length, 200 - length) for length in done[1:])
    after = yard.group(gid)
    assert after.lengths.tolist() == [5, 200, 200]
    assert after.states[0].reward == before.states[0].reward
    for old, new in zip(before.states, after.states, strict=True):
        made = len(old.response_ids)
        assert np.array_equal(new.response_ids[:made], old.response_ids)
        assert np.array_equal(new.logprobs[:made], old.logprobs)
        assert versions(new) == [FIRST] * made + [PolicyVersion(LINEAGE, 3)] * (
            len(new.response_ids) - made
        )
    record = yard.run.record(gid)
    assert (record["version"], record["lineage"], record["aborts"], record["tokens"]) == (
        "0",
        FIRST.lineage,
        "1",
        "405",
    )
    assert yard.counters()["produced_tokens"] == 405
    yard.check()
