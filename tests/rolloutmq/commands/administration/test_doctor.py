from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rq import Worker
from rq.serializers import JSONSerializer

from buffer.control.control import Mode
from buffer.control.worker_record import HeartbeatReport, WorkerState
from buffer.manifest import Manifest, NotReady
from buffer.redis.store import Store
from buffer.wire.rollout import PolicyVersion
from producer_workers.judges.rq_worker import FUNCTION, open_queue
from rolloutmq.views.explain import diagnosis
from rolloutmq.views.explain import symptom as symptom_module
from rolloutmq.views.explain.learning import learning
from rolloutmq.views.explain.processes import with_processes
from rolloutmq.views.explain.shares import shares_of
from rolloutmq.views.run_view import read_run_view
from tests.consumer.learning.test_findings import recorded
from tests.rolloutmq.conftest import Command, json_of
from tests.rolloutmq.populate import WEIGHTS, Scene, populate


def judge_queue_without_judges(scene: Scene, _: Path) -> None:
    open_queue(scene.run.store.client, "demo").enqueue(FUNCTION, "judge", [], 1.0, 0)


def weights_that_nobody_has(scene: Scene, _: Path) -> None:
    scene.run.control.publish_weights(scene.trainer, PolicyVersion("l1", 2), "/elsewhere/2", "abc")


def idle_workers(scene: Scene, _: Path) -> None:
    scene.run.jobs.release("w0", scene.running, "handback", "")


def a_letter(_: Scene, __: Path) -> None:
    """As it is."""


BROKEN: dict[Callable[[Scene, Path], None], tuple[str, str]] = {
    judge_queue_without_judges: (
        "1 rollout waiting to be judged, and no judge is alive",
        "rolloutmq judge",
    ),
    weights_that_nobody_has: (
        "w0 has l0:0, w1 has l0:0; they claim nothing",
        "check that they can read /elsewhere/2",
    ),
    idle_workers: (
        "5 groups waiting, and no worker claims them: w0 (idle), w1 (idle)",
        "[worker] tasks, lanes",
    ),
    a_letter: (
        "1 dead letter: ValueError: the judge said no",
        "rolloutmq requeue --all-dead --yes",
    ),
}


@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__)
def test_doctor_names_what_is_wrong_since_when_and_what_to_do(
    damage: Callable[[Scene, Path], None],
    scene: Scene,
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, patience in (
        (symptom_module, "PATIENCE_MS"),
        (diagnosis, "PATIENCE_MS"),
        (diagnosis, "LOADING_MS"),
    ):
        monkeypatch.setattr(module, patience, -1)
    what, fix = BROKEN[damage]
    assert what not in command("doctor", "--json").stdout or damage is a_letter
    damage(scene, tmp_path)
    (found,) = [symptom for symptom in symptoms(command) if what in symptom["what"]]
    assert fix in found["fix"]
    assert found["since_ms"] is not None or damage is judge_queue_without_judges


def test_each_dead_letter_is_counted_once(
    scene: Scene, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "SHOWN", 2)
    scene.enqueue(6)
    for number, job in enumerate(scene.claim("w1", 6)):
        error = ("KeyError", "TypeError", "ValueError")[number % 3]
        scene.run.jobs.release("w1", job, "failed", f"{error}: no")
    found = [symptom["what"] for symptom in symptoms(command) if "dead letter" in symptom["what"]]
    counts = [int(what.split()[0]) for what in found]
    assert len(counts) == 3
    assert sum(counts) == len(scene.run.dead_letters)


def test_the_command_that_doctor_gives_for_dead_letters_requeues_them(
    scene: Scene, command: Command
) -> None:
    (found,) = [each for each in symptoms(command) if "1 dead letter:" in each["what"]]
    assert "rejudge" not in found["fix"]  # it has no responses
    commands = re.findall("`rolloutmq ([^`]+)`", found["fix"])
    command(*commands[-1].split())
    assert not len(scene.run.dead_letters)


def symptoms(command: Command) -> list[dict[str, Any]]:
    return list(json_of(command("doctor", "--json"))["runs"]["demo"])


def test_a_judge_that_is_alive_is_waited_for(
    scene: Scene, command: Command, tmp_path: Path
) -> None:
    judge_queue_without_judges(scene, tmp_path)
    queue = open_queue(scene.run.store.client, "demo")
    judge = Worker([queue], connection=scene.run.store.client, serializer=JSONSerializer)
    judge.register_birth()  # type: ignore[no-untyped-call]
    assert not any("judged" in symptom["what"] for symptom in symptoms(command))
    scene.run.store.client.delete(judge.key)  # as it runs out, when a judge is killed
    assert any("judged" in symptom["what"] for symptom in symptoms(command))


@pytest.mark.parametrize(
    ("ratios", "fix"),
    [
        ({"mean": 0.7, "expired": 0.7, "failed": 0.99}, "tasks.math.on_straggler=wait"),
        ({"mean": 0.7, "expired": 0.99, "failed": 0.7}, "rolloutmq dead"),
        ({"mean": 0.7, "truncated": 0.8, "no_advantage": 0.95}, "mask_truncated = false"),
        ({"mean": 0.7, "no_advantage": 0.72}, None),  # no gradient by their nature
        ({"mean": 0.95, "expired": 0.95}, None),
    ],
)
def test_a_task_that_learns_to_be_short_is_named_with_what_made_it_so(
    scene: Scene, command: Command, ratios: dict[str, float], fix: str | None
) -> None:
    metrics = {f"length_bias/{name}/math": ratio for name, ratio in ratios.items()}
    scene.run.control.report(scene.trainer, 1, metrics)
    found = [each["fix"] for each in symptoms(command) if "short" in each["what"]]
    assert len(found) == (fix is not None)
    assert all(str(fix) in each for each in found)


def test_a_group_that_holds_up_the_next_step_is_named_with_its_worker(
    store: Store, command: Command
) -> None:
    """As one that hangs would, until somebody ends it."""
    scene = Scene(store, "demo", stale_threshold=2)
    scene.enqueue(3)
    scene.join("w0")
    scene.open_trainer()
    first, hangs, second = scene.claim("w0", 3)
    pulse = HeartbeatReport(1, WEIGHTS, WorkerState.WORKING)
    scene.run.fleet.heartbeat(
        "w0", scene.workers["w0"], pulse, [first, hangs, second], {hangs: WEIGHTS}
    )
    scene.submit("w0", first)
    scene.submit("w0", second)
    found = []
    for step in (1, 2):
        found.append([each for each in symptoms(command) if hangs.gid in each["what"]])
        taken = scene.run.ledger.take(scene.trainer, step, {"math": 1})
    assert isinstance(taken, NotReady)
    assert taken.awaits_stragglers
    before, (symptom,) = found
    assert before == []
    (drop,) = re.findall("`rolloutmq (drop [^`]+)`", symptom["fix"])
    command(*drop.split())
    assert isinstance(scene.run.ledger.take(scene.trainer, 2, {"math": 1}), Manifest)


def test_a_task_that_owes_the_next_batch_nothing_is_not_dry(
    store: Store, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task with a small share has steps without a group."""
    monkeypatch.setattr(diagnosis, "PATIENCE_MS", -1)
    scene = Scene(store, "demo", stale_threshold=9)
    scene.enqueue(3)
    scene.join("w0")
    scene.open_trainer()
    dry = []
    for step, job in enumerate(scene.claim("w0", 3), start=1):
        scene.submit("w0", job)
        scene.run.ledger.take(scene.trainer, step, {"math": 1})
        dry.append([each["what"] for each in symptoms(command) if "are ready" in each["what"]])
    assert dry == [[], [], []]
    scene.run.ledger.set_target(scene.trainer, "math", 0, 4)  # the next batch has a group of it
    assert any("0 of 1 groups are ready" in each["what"] for each in symptoms(command))


def test_a_share_of_rows_that_fail_is_an_error_until_they_are_requeued(
    store: Store, command: Command
) -> None:
    scene = Scene(store, "demo")
    scene.enqueue(80, prompt=10, source="short")
    scene.join("w0")
    for job in scene.claim("w0", 80):
        scene.submit("w0", job)
    assert not [each for each in symptoms(command) if each["level"] in ("warning", "error")]
    scene.enqueue(24, prompt=100, source="long")
    for job in scene.claim("w0", 20):
        scene.run.jobs.release("w0", job, "failed", "ValueError: the judge said no")
    (error,) = (each for each in symptoms(command) if each["level"] in ("warning", "error"))
    assert (error["level"], "20% of the last 100 groups" in error["what"]) == ("error", True)
    (cause,) = (each["what"] for each in symptoms(command) if "dead letter" in each["what"])
    assert cause.startswith("20 dead letters: ValueError")
    (share,) = json_of(command("status", "--json"))["tasks"]["math"]["shares"].values()
    assert share == {"share": 0.2, "number": 20, "total": 100, "level": "error"}
    for letter in list(scene.run.dead_letters.newest()):
        scene.run.jobs.requeue(letter.gid)
    assert not [each for each in symptoms(command) if each["level"] == "error"]


def test_a_share_is_that_of_the_newest_groups(store: Store) -> None:
    scene = Scene(store, "demo")
    scene.join("w0")
    for filtered in (True, False, False):
        scene.enqueue(128)
        for job in [*scene.claim("w0", 64), *scene.claim("w0", 64)]:
            scene.submit("w0", job, filtered=filtered)
        (task, _) = read_run_view(scene.run).tasks
        if found := list(shares_of(task)):
            assert [(each.number, each.level) for each in found] == [
                (128, "error" if filtered else "note")
            ]
    assert (found, task.recent("produced_groups")) == ([], 128)
    assert scene.run.account.fsck().damage == []


def test_no_larger_limit_is_advised_for_responses_that_only_grow(store: Store) -> None:
    scene = Scene(store, "demo")
    scene.enqueue(80)
    scene.join("w0")
    for job in scene.claim("w0", 80):
        scene.submit("w0", job, finish="length")
    view = read_run_view(scene.run)

    def names(run: str) -> set[str]:
        found = [*diagnosis.diagnose(view), *learning(None, recorded(run)[0])]
        return {each.name for each in with_processes(view, found, None)}

    assert "share/truncated" in names("demo")
    assert names("growing") == names("demo") - {"share/truncated"} | {
        "learning/length_without_reward"
    }


def test_who_was_never_there_is_missed_since_the_run_was_made(
    store: Store, command: Command
) -> None:
    Scene(store, "demo")
    missed = {symptom["what"]: symptom for symptom in symptoms(command)}
    assert {"no trainer has been started", "no producer has been started"} <= set(missed)
    told = {symptom["what"] for symptom in json_of(command("status", "--json"))["findings"]}
    assert {"no trainer has been started", "no producer has been started"} <= told <= set(missed)
    assert all(symptom["since_ms"] is not None and symptom["fix"] for symptom in missed.values())


@pytest.mark.parametrize("mode", [Mode.ABORT, Mode.DRAIN, Mode.KEEP])
def test_in_a_pause_only_the_pause_stops_the_run(
    scene: Scene, command: Command, mode: Mode
) -> None:
    for waiting in scene.run.groups.find({"stage": "waiting"}):
        scene.run.jobs.drop(waiting.gid)
    scene.run.jobs.drop(scene.running.gid, revoke="w0")
    weights_that_nobody_has(scene, Path())
    scene.run.control.set_mode("operator", mode)
    found = json_of(command("doctor", "--json"))["runs"]["demo"]
    stuck = [symptom["what"] for symptom in found if symptom["level"] != "note"]
    assert stuck == [f"paused by an operator ({mode})"]


def test_a_run_of_another_version_does_not_hide_the_others(scene: Scene, command: Command) -> None:
    populate(scene.run.store, "older").run.store.client.hset("rmq:{older}:meta", "schema", "0")
    runs = json_of(command("doctor", "--json"))["runs"]
    assert [symptom["level"] for symptom in runs["older"]] == ["fault"]
    assert "has schema 0" in runs["older"][0]["what"]
    assert {symptom["level"] for symptom in runs["demo"]} == {"note"}
    assert "run older" in command("doctor").stdout


def test_a_full_server_is_named(scene: Scene, command: Command) -> None:
    client = scene.run.store.client
    client.config_set("maxmemory", 1)
    try:
        told = json_of(command("doctor", "--json"))
    finally:
        client.config_set("maxmemory", 0)
    (found,) = [each for each in told["findings"] if "the server is full" in each["what"]]
    (waits,) = [each for each in told["runs"]["demo"] if "the server is full" in each["what"]]
    assert waits["level"] != "note", "nothing new is started"
    assert found["level"] == "warning"
    assert "commit" in found["fix"]
