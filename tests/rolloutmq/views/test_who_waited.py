from __future__ import annotations

import time
from itertools import pairwise

import pytest

from buffer.control.control import Mode
from buffer.redis.store import Store
from buffer.wire.rollout import PolicyVersion
from consumer.handle.step_log import TrainedStep
from rolloutmq.views.explain.diagnosis import inspect
from rolloutmq.views.explain.who_waited import Waits, read_waits
from rolloutmq.views.run_view import read_run_view
from tests.rolloutmq.conftest import Command, json_of
from tests.rolloutmq.populate import Scene, forge

APART_S = 0.005  # events have milliseconds


def waits(scene: Scene, steps: list[TrainedStep] | None = None) -> Waits:
    found = read_waits(scene.run, read_run_view(scene.run), steps or [])
    assert found
    return found


def test_a_worker_works_while_it_holds_groups_and_waits_for_what_it_lacks(store: Store) -> None:
    scene = Scene(store, "demo")
    scene.join("w0")
    scene.join("w1")
    scene.enqueue(6)
    jobs = scene.claim("w0", 4)
    scene.claim("w1", 1)
    time.sleep(APART_S)
    for job in jobs:
        scene.submit("w0", job)
        time.sleep(APART_S)
    scene.open_trainer()
    scene.run.control.publish_weights(scene.trainer, PolicyVersion("l1", 1), "/weights/1", "")
    time.sleep(APART_S)
    scene.run.control.set_mode("operator", Mode.DRAIN)
    time.sleep(APART_S)
    scene.run.control.set_mode("operator", Mode.RUN)
    lanes = waits(scene).workers
    # it reports a concurrency of 8
    assert [span.what for span in lanes["w0"]] == [
        *("jobs", "works", "partly", "jobs", "weights", "paused", "weights")
    ]
    assert [span.what for span in lanes["w1"]] == ["jobs", "partly"]
    for spans in lanes.values():
        assert all(before.ended_s == after.began_s for before, after in pairwise(spans))


@pytest.mark.parametrize("seen", [3, 1000])
def test_the_groups_that_a_worker_held_before_the_first_event_are_known(
    store: Store, seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.views.explain.who_waited.MOST_EVENTS", seen)
    scene = Scene(store, "demo")
    scene.join("w0")
    scene.enqueue(8)
    jobs = scene.claim("w0", 8)
    time.sleep(APART_S)
    for job in jobs[:3]:
        scene.submit("w0", job)
    found = [span.what for span in waits(scene).workers["w0"]]
    assert found == (["works"] if seen == 3 else ["jobs", "works"])
    scene.run.jobs.release("w0", jobs[3], "failed", "ValueError: no")
    scene.run.jobs.release("w0", jobs[4], "handback", "")
    time.sleep(APART_S)
    assert waits(scene).workers["w0"][-1].what == "partly"


def test_the_trainer_waited_for_a_share_of_the_last_steps(scene: Scene, command: Command) -> None:
    now_s = read_run_view(scene.run).now_ms / 1000
    metrics = {"time/wait_s": 6.0, "time/train_s": 3.0, "time/step_s": 10.0}
    steps = [TrainedStep(n, "l1", (), metrics, now_s - 500 + 10 * n) for n in range(1, 31)]
    scene.run.store.client.delete(scene.run.keys.events)
    scene.run.store.client.xadd(scene.run.keys.events, {"event": "created"}, id="1-1")
    found = waits(scene, steps)
    assert found.steps == 10
    assert found.ended_s - found.began_s == pytest.approx(100)
    assert found.shares["trainer"] == pytest.approx({"wait": 0.6, "train": 0.3})
    assert [span.what for span in found.trainer[:2]] == ["wait", "train"]
    assert "60%" in str(found)
    said = json_of(command("doctor", "--json"))["runs"]["demo"]
    assert any("waited" in symptom["what"] for symptom in said)
    assert json_of(command("status", "--json"))["waits"]["workers"]


def test_steps_before_the_oldest_event_are_left_out(scene: Scene) -> None:
    metrics = {"time/wait_s": 6.0, "time/step_s": 10.0}
    time.sleep(APART_S)
    found = waits(scene, [TrainedStep(1, "l1", (), metrics, time.time() - 500)])
    assert (found.steps, found.trainer) == (0, [])
    assert found.ended_s > found.began_s
    assert found.workers


def test_a_worker_that_leaves_and_joins_again_has_no_lane_between(store: Store) -> None:
    scene = Scene(store, "demo")
    scene.join("w0")
    scene.enqueue(4)
    scene.claim("w0", 4)
    time.sleep(APART_S)
    scene.run.fleet.fence("w0")
    left_s = time.time()
    time.sleep(10 * APART_S)
    scene.join("w0")
    time.sleep(APART_S)
    *_, before, after = waits(scene).workers["w0"]
    assert (before.what, after.what) == ("works", "jobs")
    assert before.ended_s <= left_s < after.began_s


def test_events_of_a_hostile_worker_are_drawn_or_left_out(scene: Scene) -> None:
    forge(scene, "<script>")
    client = scene.run.store.client
    for groups in ("9" * 5000, "-1", "x", ""):
        client.xadd(scene.run.keys.events, {"event": "claimed", "worker": "w0", "groups": groups})
    client.xadd(scene.run.keys.events, {"event": "claimed", "worker": "w0"})
    lanes = dict(waits(scene).document()["lanes"])
    assert lanes.keys() == {"w0", "w1"}
    assert {what for spans in lanes.values() for *_, what in spans} <= {"works", "partly", "jobs"}


def test_a_worker_named_trainer_has_a_lane_of_its_own(scene: Scene) -> None:
    scene.join("trainer")
    time.sleep(4 * APART_S)
    metrics = {"time/wait_s": APART_S, "time/step_s": 2 * APART_S}
    document = waits(scene, [TrainedStep(1, "l1", (), metrics, time.time())]).document()
    assert [name for name, _ in document["lanes"]] == ["trainer", "trainer", "w0", "w1"]


def test_no_worker_is_wanted_while_calls_wait_for_a_quota(store: Store) -> None:
    scene = Scene(store, "demo")
    scene.enqueue(8)
    scene.join("w0")
    scene.claim("w0", 8)
    time.sleep(0.1)
    metrics = {"time/wait_s": 0.1, "time/step_s": 0.1}
    steps = [TrainedStep(1, "l1", (), metrics, time.time())]

    def advice() -> str:
        found = inspect(scene.run, read_run_view(scene.run), steps, None)
        (summary,) = [each for each in found if each.name == "waits/summary"]
        return summary.fix

    assert "add workers" in advice()
    scene.run.store.client.hset(scene.run.keys.worker("w0"), "report", "quota_waits=2")
    assert not advice()
