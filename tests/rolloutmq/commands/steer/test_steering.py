from __future__ import annotations

import threading
import time
from pathlib import Path

from buffer.control.control import Mode
from buffer.control.worker_record import WorkerState
from buffer.ids import group_id
from buffer.limits import TaskLimits
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.run.run import Run
from tests.rolloutmq.conftest import Command, json_of
from tests.rolloutmq.populate import Scene


def test_pause_closes_the_lanes_and_continue_opens_them(scene: Scene, command: Command) -> None:
    assert json_of(command("pause", "--mode", "keep", "--json"))["mode"] == "keep"
    assert scene.claim("w1", 1) == []
    status = command("status")
    assert "paused by the operator" in status.stdout
    assert json_of(command("resume", "--json"))["mode"] == "run"
    assert len(scene.claim("w1", 1)) == 1


def test_resume_leaves_the_trainers_pause(scene: Scene, command: Command) -> None:
    scene.run.control.set_mode("trainer", Mode.KEEP, nonce=scene.trainer)
    command("pause")
    done = command("resume")
    assert "the trainer itself has paused it (keep)" in done.stdout
    assert scene.run.control.state().mode is Mode.KEEP


def test_resume_ends_the_pause_of_a_trainer_that_died_in_it(scene: Scene, command: Command) -> None:
    scene.run.control.set_mode("trainer", Mode.ABORT, nonce=scene.trainer)
    scene.run.store.client.hset(scene.run.keys.control, "trainer_seen_ms", 1)  # silent since 1970
    assert "that trainer is gone: run `rolloutmq resume`" in " ".join(
        command("status").stdout.split()
    )
    symptoms = json_of(command("doctor", "--json"))["runs"][scene.run.name]
    (told,) = [symptom for symptom in symptoms if "that trainer is gone" in symptom["what"]]
    assert told["level"] == "stuck"
    assert "rolloutmq resume" in told["fix"]
    done = command("resume")
    assert "its trainer paused it (abort) and is gone" in done.stdout
    assert scene.run.control.state().mode is Mode.RUN
    assert len(scene.claim("w1", 1)) == 1


def test_pause_waits_for_receipts_and_names_who_confirmed(scene: Scene, command: Command) -> None:
    stop = threading.Event()

    def confirm() -> None:
        while not stop.is_set():
            for worker in ("w0", "w1"):
                scene.beat(worker, ack=scene.run.control.state().epoch, state=WorkerState.PAUSED)
            time.sleep(0.05)

    beating = threading.Thread(target=confirm)
    beating.start()
    try:
        done = command("pause", "--mode", "keep", "--wait")
    finally:
        stop.set()
        beating.join()
    assert done.returncode == 0, done.stderr
    assert "all 2 live workers have confirmed" in done.stdout


def test_pause_that_nobody_confirms_names_the_silent(scene: Scene, command: Command) -> None:
    done = command("pause", "--wait", "--timeout", "0.2")
    assert done.returncode == 1
    assert "w0, w1" in done.stderr
    assert "rolloutmq fence" in done.stderr


def test_fence_gives_the_groups_back(store: Store, command: Command) -> None:
    scene = Scene(store, "demo", max_tries=3)
    scene.enqueue(2)
    scene.join("w0")
    scene.claim("w0", 2)
    assert json_of(command("fence", "w0", "--yes", "--json")) == {"worker": "w0", "revoked": 2}
    assert scene.run.account.totals().tasks[0].waiting == 2
    assert scene.run.fleet.workers() == []


def test_server_of_an_ended_run_starts_with_its_data_and_stops(
    tmp_path: Path, command: Command
) -> None:
    folder = tmp_path / "runs" / "old"
    with EmbeddedServer(folder / "server") as embedded:
        store = Store(embedded.url, deadline_s=400.0)
        Scene(store, "old").enqueue(3)
        store.close()
    assert json_of(command("server", "--json", cwd=tmp_path))["running"]
    try:
        assert (
            json_of(command("status", "--json", cwd=tmp_path))["tasks"]["math"]["places"]["waiting"]
            == 3
        )
    finally:
        assert not json_of(command("server", "--stop", "--json", cwd=tmp_path))["running"]


def test_set_changes_a_run_that_goes_on_and_says_what(scene: Scene, command: Command) -> None:
    done = json_of(command("set", "max_staleness=4", "concurrency=3", "--json"))
    assert done["changed"]["concurrency"] == {"before": None, "after": 3}
    assert scene.run.refresh_limits()
    assert scene.run.limits.concurrency == 3
    assert "nothing to change" in command("set", "concurrency=3").stdout


def test_set_lists_what_differs_from_the_config_and_undoes_it(
    scene: Scene, command: Command
) -> None:
    limits = scene.run.limits
    assert json_of(command("set", "--list", "--json")) == {"settings": []}
    before = time.time()
    command("set", f"max_tries={limits.max_tries + 4}", "tasks.math.max_in_flight=9")
    first, second = json_of(command("set", "--list", "--json"))["settings"]
    assert (first["name"], first["config"], first["value"]) == (
        "max_tries",
        limits.max_tries,
        limits.max_tries + 4,
    )
    assert before - 1 < first["set_ms"] / 1000 < time.time() + 1
    assert "@" in first["by"]
    assert (second["name"], second["config"]) == ("tasks.math.max_in_flight", None)
    shown = command("set", "--list").stdout
    assert "tasks.math.max_in_flight" in shown
    done = json_of(command("set", "tasks.math.max_in_flight=config", "max_tries=config", "--json"))
    assert done["changed"]["tasks.math.max_in_flight"] == {"before": 9, "after": None}
    assert json_of(command("set", "--list", "--json")) == {"settings": []}
    assert Run.open(scene.run.store, scene.run.name).limits == limits


def test_set_names_what_is_wrong(scene: Scene, command: Command) -> None:
    wrong = command("set", "max_stalenes=4")
    assert wrong.returncode == 2
    assert "did you mean `max_staleness`?" in wrong.stderr


DEAD, READY, RUNNING, ARCHIVED = (group_id("math", draw) for draw in (5, 3, 7, 0))


def test_dead_lists_reason_tries_worker_and_age(scene: Scene, command: Command) -> None:
    (row,) = json_of(command("dead", "--json"))
    assert row.pop("age_ms") >= 0
    said = {"reason": "ValueError: the judge said no", "worker": "w0", "tries": 1, "step": None}
    said |= {"cause": said["reason"], "has_responses": False}
    assert row == {"gid": DEAD} | said
    shown = command("dead").stdout
    assert DEAD in shown
    assert "the judge said no" in shown
    assert json_of(command("dead", "--task", "exam", "--json")) == []
    assert command("dead", "--task", "nothing").returncode == 2


def test_requeue_and_drop_say_what_they_would_do_without_yes(
    scene: Scene, command: Command
) -> None:
    before = scene.run.account.totals()
    for arguments, words in (
        (("requeue", DEAD), f"requeue {DEAD}, which is dead: ValueError"),
        (("requeue", "--all-dead"), "requeue 1 dead group"),
        (("drop", READY), f"end {READY}, which is completed, made by weights 0"),
        (("drop", RUNNING), "running on w0"),
    ):
        done = command(*arguments)
        assert done.returncode == 2
        assert words in done.stderr
        assert "--yes" in done.stderr
    assert scene.run.account.totals() == before


def test_requeue_lets_dead_groups_wait_again(scene: Scene, command: Command) -> None:
    assert json_of(command("requeue", "--all-dead", "--yes", "--json")) == {
        "requeued": {DEAD: "dead"}
    }
    assert "There are no dead letters" in command("dead").stdout
    assert "was waiting" in command("requeue", DEAD, "--yes").stdout
    assert scene.run.account.fsck().clean


def test_drop_ends_a_group_once(scene: Scene, command: Command) -> None:
    assert json_of(command("drop", READY, "--yes", "--json")) == {
        "gid": READY,
        "before": "completed",
    }
    assert "nothing was changed" in command("drop", READY, "--yes").stdout
    assert scene.run.account.fsck().clean


def test_drop_of_a_running_group_wants_the_name_of_its_worker(
    scene: Scene, command: Command
) -> None:
    refused = command("drop", RUNNING, "--yes")
    assert refused.returncode == 1
    assert "runs on w0" in refused.stderr
    assert (
        json_of(command("drop", RUNNING, "--revoke", "w0", "--yes", "--json"))["before"]
        == "running"
    )
    assert scene.run.account.fsck().clean


def test_what_cannot_be_moved_is_told(scene: Scene, command: Command) -> None:
    for arguments, code, words in (
        (("requeue", ARCHIVED, "--yes"), 1, "archived"),
        (("drop", group_id("math", 99), "--yes"), 2, "has not been started"),
        (("drop", "nonsense", "--yes"), 2, "not a group id"),
        (("requeue", "other-0000000001", "--yes"), 2, "no task"),
        (("requeue", "--yes"), 2, "a GID or --all-dead"),
        (("requeue", DEAD, "--all-dead"), 2, "a GID or --all-dead"),
    ):
        done = command(*arguments)
        assert done.returncode == code, done
        assert words in done.stderr


def test_the_groups_of_a_task_that_is_gone_are_dropped_by_name(
    scene: Scene, command: Command
) -> None:
    run = scene.run
    assert command("drop", "--task", "math", "--yes").returncode == 2
    assert command("drop", "--yes").returncode == 2
    tasks = {"other": TaskLimits()}
    limits = run.limits.model_copy(update={"tasks": tasks})
    Run.create(run.store, run.name, run.nonce, limits)
    notes = json_of(command("doctor", "--json"))["runs"][run.name]
    assert any("the config lacks task math now" in note["what"] for note in notes)
    assert "--yes" in command("drop", "--task", "math").stderr
    done = json_of(command("drop", "--task", "math", "--yes", "--json"))
    assert done["dropped"] > 0
    assert json_of(command("drop", "--task", "math", "--yes", "--json"))["dropped"] == 0
    assert Run.open(run.store, run.name).account.fsck().clean
