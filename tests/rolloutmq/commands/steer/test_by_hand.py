from __future__ import annotations

from buffer.ids import group_id
from buffer.limits import TaskLimits
from buffer.run.run import Run
from tests.rolloutmq.conftest import Command, json_of
from tests.rolloutmq.populate import Scene

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
