"""What the commands that change nothing say about a run in which every place is taken."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from buffer.ids import group_id, new_nonce
from buffer.ledger.position import Position
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from rolloutmq.tracing import trace_id
from tests.rolloutmq.conftest import ROOT, Command, in_process, json_of
from tests.rolloutmq.populate import ESCAPE, Scene, write_samples, write_steps

PLACES = {"waiting": 4, "running": 1, "completed": 1, "aborted": 1, "expired": 0, "taken": 1,
          "archived": 2, "dead": 1, "filtered": 1, "dropped": 0}  # fmt: skip


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
    assert "lost data" not in command("status").stdout
    position = Position(step=2, lineage="l1", cursors={"math": 14})
    position.trained.add_batch(2, [gid(draw) for draw in range(4)])
    scene.run.trainers.open(new_nonce(), lineage="l2", take_over=True, position=position)
    task = json_of(command("status", "--json"))["tasks"]["math"]
    assert (task["reasserted"], task["regenerated"]) == (1, 2)
    assert "1 group reasserted from checkpoints, 2 generated again" in command("status").stdout
    events = scene.run.store.control.xlen(scene.run.keys.events)
    assert "reasserted" in command("tail", "--from-start", "--count", str(events)).stdout
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


def test_status_fits_80_columns_and_has_no_colours_in_a_pipe(
    scene: Scene, command: Command
) -> None:
    done = command("status")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "adds up" in done.stdout


@pytest.mark.parametrize("columns", [None, "0"])
def test_rows_in_a_pipe_are_as_long_as_they_need(
    scene: Scene, command: Command, monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    monkeypatch.delenv("COLUMNS")
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    reason = "ValueError: " + "a long reason " * 30 + "ends here"
    scene.run.jobs.release("w0", scene.running, "failed", reason)
    rows = [line for line in command("dead").stdout.splitlines() if line.startswith("math-")]
    assert len(rows) == 2
    assert "ends here" in rows[0]
    assert len(max(command("status").stdout.splitlines(), key=len)) < 200


def test_status_is_loud_when_the_sum_is_wrong(scene: Scene, store: Store, command: Command) -> None:
    store.control.hincrby(scene.run.keys.progress("math"), "enqueued", 1)
    assert "DOES NOT ADD UP" in command("status").stdout
    assert not json_of(command("status", "--json"))["adds_up"]


def test_status_of_an_empty_server_says_how_to_start(store: Store, command: Command) -> None:
    done = command("status")
    assert done.returncode == 0
    assert "rolloutmq run" in done.stdout
    assert json_of(command("status", "--json")) == {"runs": []}


def test_redis_url_of_the_environment_is_used(
    scene: Scene, server: EmbeddedServer, tmp_path: Path
) -> None:
    assert (
        json_of(in_process("status", "--json", cwd=tmp_path, REDIS_URL=server.url))["run"] == "demo"
    )


def test_newest_folder_with_a_server_is_found(
    scene: Scene, server: EmbeddedServer, command: Command
) -> None:
    # the server's folder is …/demo; a link makes it ./runs/demo of a place of its own
    here = server.folder.parent / "elsewhere"
    (here / "runs").mkdir(parents=True, exist_ok=True)
    if not (here / "runs" / "demo").exists():
        (here / "runs" / "demo").symlink_to(server.folder)
    assert json_of(command("status", "--json", cwd=here))["run"] == "demo"


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


def test_ls_shows_version_staleness_and_reward(scene: Scene, command: Command) -> None:
    row = json_of(command("ls", "--json", "--stage", "taken"))[0]
    assert (row["version"], row["staleness"], row["tokens"], row["reward"], row["batch"]) == (
        0,
        1,
        6,
        0.5,
        "train:2",
    )
    assert gid(2) in command("ls").stdout


def test_ls_pages_through_more_than_one_slice(store: Store, command: Command) -> None:
    scene = Scene(store, "demo")
    for _ in range(3):
        scene.enqueue(400)
    assert len(json_of(command("ls", "--json", "--limit", "1100"))) == 1100


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


def test_show_never_sends_a_models_escape_codes_to_the_terminal(
    scene: Scene, command: Command
) -> None:
    done = command("show", gid(2))
    assert done.returncode == 0
    assert ESCAPE not in done.stdout
    assert "\\x1b[31mred" in done.stdout


def test_show_of_a_waiting_group_has_its_prompt(scene: Scene, command: Command) -> None:
    done = command("show", gid(11))
    assert "What is 1 + 1?" in done.stdout
    assert "nothing has been generated yet" in done.stdout


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
    assert "is not running" in command("batch", "2", cwd=tmp_path).stderr


def test_show_of_a_dead_letter_says_why(scene: Scene, command: Command) -> None:
    assert "the judge said no" in command("show", gid(5)).stdout
    assert json_of(command("show", gid(5), "--json"))["dead_letter"]["worker"] == "w0"


def test_show_of_a_lost_group_is_an_account_error(
    scene: Scene, store: Store, command: Command
) -> None:
    store.control.delete(scene.run.keys.group(gid(11)))
    done = command("show", gid(11))
    assert done.returncode == 6
    assert "it is lost" in done.stderr


def test_tail_from_the_start_counts(scene: Scene, command: Command) -> None:
    done = command("tail", "--from-start", "--count", "3", "--json")
    events = [orjson.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["created", "producer_opened", "enqueued"]
    assert "enqueued" in command("tail", "--from-start", "--count", "3").stdout


def test_tail_follows_and_ctrl_c_leaves_with_130(scene: Scene, server: EmbeddedServer) -> None:
    args = [sys.executable, "-m", "rolloutmq", "tail", "--json", "--redis-url", server.url]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        args, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        # blocked clients are those that listen: only then does a new event prove that it was
        # followed
        while not scene.run.store.control.info("clients")["blocked_clients"]:
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
    told = command("workers").stdout
    assert "[idle     ]" in told
    assert "1/8" in told
    assert re.search(r"w0 +0 +40 +3 +0\.1 s|w0 +0 +40 +3 +0\.2 s", told), "0.15 s"
    assert "1.9 s" in told


def test_a_slow_judge_is_seen_at_a_glance(scene: Scene, command: Command) -> None:
    assert "judged" not in command("status").stdout
    scene.beat("w0", ack=1, judging=1)
    status = " ".join(command("status").stdout.split())
    assert "1 group running, of which 1 is being judged" in status
    assert "running 1, of which 1 is being judged" in command("top", "--count", "1").stdout
    found = json_of(command("status", "--json"))
    assert (found["leases"], found["judging"]) == (1, 1)
    assert {worker["id"]: worker["judging"] for worker in found["workers"]} == {"w0": 1, "w1": 0}
    rows = {row["id"]: row for row in json_of(command("workers", "--json"))}
    assert (rows["w0"]["judging"], rows["w1"]["judging"]) == (1, 0)


def test_top_prints_calm_lines_in_a_pipe(scene: Scene, command: Command) -> None:
    done = command("top", "--count", "2", "--every", "0.1")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert "\x1b" not in done.stdout
    assert "step 2" in lines[0]
    assert "waiting 4" in lines[0]


def test_top_reads_the_trainers_steps(
    scene: Scene, server: EmbeddedServer, command: Command
) -> None:
    path = write_steps(server.folder, [(1, "l1", [gid(0)]), (2, "l1", [gid(2)])])
    try:
        assert "reward 0.200" in command("top", "--count", "1").stdout
    finally:
        path.unlink()
