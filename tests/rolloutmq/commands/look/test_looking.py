from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from buffer.ids import group_id, new_nonce, trace_id
from buffer.ledger.position import Position
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from tests.rolloutmq.conftest import ROOT, Command, json_of
from tests.rolloutmq.populate import ESCAPE, Scene, write_samples

PLACES = {"waiting": 4, "running": 1, "completed": 1, "aborted": 1, "expired": 0, "taken": 1,
          "archived": 2, "dead": 1, "filtered": 1, "dropped": 0,
          "skipped": 0}  # fmt: skip


def gid(draw: int) -> str:
    return group_id("math", draw)


def test_status_counts_every_group_once(scene: Scene, command: Command) -> None:
    found = json_of(command("status", "--json"))
    assert found["tasks"]["math"]["places"] == PLACES
    assert sum(PLACES.values()) == found["tasks"]["math"]["enqueued"] == 12
    assert found["adds_up"]
    assert found["steps"] == {"taken": 2, "committed": 1, "freed": 1}
    assert found["trainer"]["state"] == "alive"
    assert found["tasks"]["math"]["produced_tokens"] == 36
    assert found["tasks"]["math"]["mean_reward"] == 0.5
    assert {worker["id"] for worker in found["workers"]} == {"w0", "w1"}


def test_what_was_put_right_after_a_loss_is_told(scene: Scene, command: Command) -> None:
    assert "reasserted" not in command("status").stdout
    position = Position(step=2, lineage="l1", cursors={"math": 14})
    position.trained.add_batch(2, [gid(draw) for draw in range(4)])
    scene.run.trainers.open(new_nonce(), lineage="l2", take_over=True, position=position)
    task = json_of(command("status", "--json"))["tasks"]["math"]
    assert (task["reasserted"], task["regenerated"]) == (1, 2)
    assert "1 reasserted from checkpoints · 2 generated again" in command("status").stdout
    events = scene.run.store.client.xlen(scene.run.keys.events)
    assert "reasserted" in command("logs", "events", "-n", str(events)).stdout
    assert json_of(command("fsck", "--json"))["clean"]


def test_status_tells_ready_groups_by_staleness(store: Store, command: Command) -> None:
    scene = Scene(store, "demo", stale_threshold=4)
    scene.enqueue(4)
    scene.join("w0")
    for job in scene.claim("w0", 4):
        scene.submit("w0", job)
    scene.open_trainer()
    scene.run.ledger.take(scene.trainer, 1, {"math": 1})
    task = json_of(command("status", "--json"))["tasks"]["math"]
    assert task["staleness"] == {"0": 0, "1": 3, "2": 0, "3": 0}
    assert (task["ready"], task["too_old"]) == (3, 0)


@pytest.mark.parametrize(
    ("filters", "draws"),
    [
        (["--stage", "waiting"], [8, 9, 10, 11]),
        (["--stage", "running"], [7]),
        (["--stage", "pool"], [3, 4]),
        (["--status", "aborted"], [4]),
        (["--status", "completed"], [3, 2]),
        (["--stage", "taken"], [2]),
        (["--stage", "dead"], [5]),
        (["--task", "exam"], []),
        (["--limit", "2"], [8, 9]),
        (["--where", '{"status": "completed", "staleness": {"$gte": 1}}'], [3, 2]),
        (["--where", '{"tokens": {"$gt": 0}}', "--stage", "pool"], [3, 4]),
        (["--where", '{"$or": [{"draw": 9}, {"owner": "w0", "stage": "running"}]}'], [9, 7]),
        (["--where", '{"aborts": 1}', "--task", "math", "--status", "aborted"], [4]),
        (["--where", '{"stage": "waiting"}', "--order=-draw", "--limit", "2"], [11, 10]),
        (["--where", '{"status": "archived"}'], []),
    ],
)
def test_ls_filters_by_the_indexes(
    scene: Scene, command: Command, filters: list[str], draws: list[int]
) -> None:
    assert [row["gid"] for row in json_of(command("ls", "--json", *filters))] == [
        gid(draw) for draw in draws
    ]


def test_ls_tells_which_rows_were_skipped_and_why(scene: Scene, command: Command) -> None:
    (job,) = scene.claim("w1", 1)
    row = {"row": 3, "epoch": 0, "id": ESCAPE}
    scene.run.jobs.release("w1", job, "skipped", f"no {ESCAPE}page", record=row)
    (found,) = json_of(command("ls", "--stage", "skipped", "--json"))
    assert (found["gid"], found["worker"], found["row"], found["epoch"]) == (job.gid, "w1", 3, 0)
    assert "page" in found["reason"]
    assert json_of(command("ls", "--stage", "skipped", "--task", "exam", "--json")) == []
    shown = command("ls", "--stage", "skipped").stdout
    assert job.gid in shown
    assert ESCAPE not in shown
    assert command("ls", "--stage", "skipped", "--status", "init").returncode == 2
    assert json_of(command("fsck", "--json"))["clean"]


def test_show_tells_text_rewards_and_versions(scene: Scene, command: Command) -> None:
    found = json_of(command("show", gid(2), "--json", "--tokens"))
    member = found["members"][1]
    assert found["places"] == ["taken"]
    assert found["messages"] == [{"role": "user", "content": "What is 1 + 1?"}]
    assert member["reward"] == {"score": 1.0, "length": 3.0}
    assert [(span["start"], span["length"], span["version"]) for span in member["spans"]] == [
        (0, 2, 0),
        (2, 1, 1),
    ]
    assert member["response_ids"] == [5, 6, 7]


@pytest.mark.parametrize(("draw", "end"), [(0, "archived"), (6, "filtered")])
def test_show_of_an_ended_group_says_how_it_ended(
    scene: Scene, command: Command, draw: int, end: str
) -> None:
    assert f"[{end}" in command("show", gid(draw)).stdout
    told = json_of(command("show", gid(draw), "--json"))
    assert (told["places"], told["trace_id"]) == ([end], trace_id(scene.run.nonce, gid(draw)))


@pytest.fixture
def samples(scene: Scene, server: EmbeddedServer) -> Iterator[None]:
    """The sample log of step 1, whose batch is freed."""
    write_samples(scene, server.folder)
    yield
    shutil.rmtree(server.folder / "samples")
    (server.folder / "steps.jsonl").unlink()


@pytest.mark.usefixtures("samples")
def test_what_was_said_in_a_freed_step_is_read_from_the_sample_log(
    scene: Scene, command: Command
) -> None:
    done = command("batch", "1")
    assert "of step 1, the sample log has these 2 groups" in done.stdout
    assert f"{gid(0)}  best " in done.stdout
    assert [group["reward"] for group in json_of(command("batch", "1", "--json"))["groups"]] == [
        0.5
    ] * 2
    done = command("show", gid(1), "--member", "1")
    for words in (
        "trained and committed",
        "from the sample log: worst",
        "What is 1 + 1?",
        "#1",
        "It was worst.",
        "length 3",
        "v1 2-2",
    ):
        assert words in done.stdout, words
    assert "#0" not in done.stdout
    assert json_of(command("show", gid(1), "--json"))["sampled"] == {"step": 1, "why": "worst"}


@pytest.mark.usefixtures("samples")
def test_what_was_said_is_read_of_a_run_that_is_over(
    scene: Scene, command: Command, server: EmbeddedServer, tmp_path: Path
) -> None:
    over = tmp_path / "runs" / "over"
    shutil.copytree(server.folder / "samples", over / "samples")
    shutil.copy(server.folder / "steps.jsonl", over)
    (over / "valkey.lock").touch()
    assert "has these 2 groups" in command("batch", "1", cwd=tmp_path).stdout
    assert "It was worst." in command("show", gid(1), cwd=tmp_path).stdout
    assert "are gone" in command("batch", "2", cwd=tmp_path).stderr


def test_show_of_a_lost_group_is_an_account_error(
    scene: Scene, store: Store, command: Command
) -> None:
    store.client.delete(scene.run.keys.group(gid(11)))
    done = command("show", gid(11))
    assert done.returncode == 6
    assert "it is lost" in done.stderr


def test_events_are_followed_and_ctrl_c_leaves_with_130(
    scene: Scene, server: EmbeddedServer
) -> None:
    args = [
        sys.executable, "-m", "rolloutmq", "logs", "events", "-f", "-n0", "--json", "--redis-url",
        server.url,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        args, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        # blocked clients are those that listen: only then does a new event prove that it was
        # followed
        while not scene.run.store.client.info("clients")["blocked_clients"]:
            assert process.poll() is None
            time.sleep(0.02)
        scene.join("w9")
        assert orjson.loads(process.stdout.readline())["worker"] == "w9"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=400) == 130
        assert "Traceback" not in process.stderr.read()


def test_workers_tells_who_lives(scene: Scene, command: Command) -> None:
    rows = {row["id"]: row for row in json_of(command("workers", "--json"))}
    assert rows["w0"]["holds"] == 1
    assert rows["w1"]["holds"] == 0
    assert rows["w0"]["alive"]
    assert rows["w0"]["concurrency"] == 8
    assert "nonce" not in rows["w0"]
    assert (rows["w0"]["judge_s"], rows["w0"]["judge_failures"]) == (0.2, 3)
    assert sum(rows["w0"]["judge_buckets"]) == rows["w0"]["judged"] == 40
    assert 0.1 < rows["w0"]["judge_p50_s"] < 0.25 < 1 < rows["w0"]["judge_p99_s"] < 2.5


def test_a_counter_that_nobody_named_is_in_the_json_of_its_task(
    scene: Scene, command: Command
) -> None:
    written = {"new_things": 7, "failed:KeyError": 2, "raw_rewards_sum": 3, "strange": "9x"}
    scene.run.store.client.hset(scene.run.keys.progress("math"), mapping=written)
    task = json_of(command("status", "--json"))["tasks"]["math"]
    assert task["new_things"] == 7
    assert not task.keys() & {"failed:KeyError", "raw_rewards_sum", "strange"}
    assert task["regenerated"] == 0  # which no script has written yet
