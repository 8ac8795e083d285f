"""Groups to a file and back: nothing changes on the way, and the account adds up (I1)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from buffer.errors import ConfigError, DatasetError, StoreError
from buffer.ids import IMPORTED_FROM, group_id
from buffer.ledger.account import TaskAccount
from buffer.redis.store import Store
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, Status
from buffer.wire.sampling_mask import SamplingMask
from proofs.fuzz.promise import plain
from tests.buffer.scene import Scene, extend
from tests.buffer.snapshot.test_snapshot import resumed

has_pyarrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed"
)
ENDINGS = ["jsonl", pytest.param("parquet", marks=has_pyarrow)]
FIRST_GID = group_id("math", IMPORTED_FROM)


def line(gid: str = "a", **changes: Any) -> dict[str, Any]:
    """Return the fields that a curator must write at least."""
    least = {
        "gid": gid, "task": "math", "response_ids": [1, 2], "logprobs": [-0.5, -0.1],
        "reward": {"score": 1},
    }  # fmt: skip
    return least | changes


def write(path: Path, *lines: Any) -> Path:
    path.write_bytes(
        b"".join(
            (part if isinstance(part, bytes) else orjson.dumps(part)) + b"\n" for part in lines
        )
    )
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(text) for text in path.read_bytes().splitlines()]


def account(scene: Scene) -> TaskAccount:
    return scene.run.account.totals().tasks[0]


def test_export_has_one_line_per_rollout_with_everything(scene: Scene, tmp_path: Path) -> None:
    scene.open_trainer(lineage="l0")
    gids = scene.ready(0, 1)
    scene.ready(0, task="code")
    scene.enqueue(1)
    scene.take(1)
    done = scene.run.export(tmp_path / "f.jsonl", task="math")
    lines = read(tmp_path / "f.jsonl")
    assert (done.groups, done.rollouts, len(lines)) == (2, 4, 4)
    assert [(row["gid"], row["index"], row["samples"]) for row in lines] == [
        (g, i, 2) for g in gids for i in (0, 1)
    ]
    assert [row["stage"] for row in lines] == ["taken", "taken", "pool", "pool"]
    assert [row["staleness"] for row in lines] == [0, 0, 0, 0]
    row = lines[2]
    assert row["messages"][0]["content"] == f"what is {gids[1]}?"
    assert (row["prompt_ids"], row["response_ids"], row["logprobs"]) == (
        [0, 1, 2],
        [5, 6],
        [-0.5, -0.25],
    )
    assert (row["spans"], row["reward"], row["status"]) == (
        [[0, 2, 1, "l0"]],
        {"score": 1.0},
        "completed",
    )
    assert scene.run.export(tmp_path / "all.jsonl").groups == 3
    assert scene.run.export(tmp_path / "init.jsonl", status="init").groups == 1


@pytest.mark.parametrize("ending", ENDINGS)
def test_exported_groups_come_back_as_they_were(scene: Scene, tmp_path: Path, ending: str) -> None:
    scene.open_trainer(lineage="l0")
    scene.enqueue(1)
    (job,) = scene.claim()
    group = scene.run.buffer.read(job.payload)
    for state in group.states:
        state.extra = {"row": 7, "deep": [{"a": None}], "own": state.index}
        state.messages = [{"role": "user", "content": f"rollout {state.index}"}]
        state.ground_truth = {"answer": 2}
    weights = PolicyVersion("l0", 1)
    states = extend(group, Status.COMPLETED, weights).states
    for n, state in enumerate(states):
        state.token_rewards = np.array([0, n], "<f4")
        state.teacher_logprobs = {"large": state.logprobs * np.float32(2), "small": state.logprobs}
        state.teacher_top_ids = {"large": np.array([[5, 6], [6, 7]], "<i4")}
        state.teacher_top_logprobs = {"large": np.array([[-0.25, -2], [-0.1, -3]], "<f4")}
        if n:
            kept = np.array([state.response_ids[0], 9], "<i4")
            state.sampling_mask = SamplingMask(np.array([2, 0], "<i4"), kept)
    scene.run.buffer.submit("w0", job, RolloutGroup(group.gid, group.task, states), 4)
    old = scene.payload(job.gid)
    scene.run.export(tmp_path / f"f.{ending}")
    done = scene.run.import_groups(tmp_path / f"f.{ending}")
    assert (done.groups, done.rollouts) == (1, 2)
    assert scene.pool("completed") == [(job.gid, 1.0), (FIRST_GID, 1.0)]
    was = scene.run.buffer.read(old)
    now = scene.run.buffer.read(scene.payload(FIRST_GID))
    assert now.gid == FIRST_GID
    assert [plain(state) for state in was.states] == [plain(state) for state in now.states]
    for column in ("prompt_ids", "response_ids", "logprobs", "lengths", "mask"):
        assert getattr(was, column).tobytes() == getattr(now, column).tobytes()
    assert (account(scene).enqueued, account(scene).imported, account(scene).cursor) == (1, 1, 1)
    scene.check()


def test_imported_groups_live_like_others_and_take_no_draw(
    make_scene: Callable[..., Scene], tmp_path: Path
) -> None:
    scene = make_scene(on_straggler="retry", tail_batch_trigger_size=1)
    scene.open_trainer(lineage="l0")
    spans = {
        "spans": [[0, 2, 0, "l0"]],
        "prompt_ids": [9],
        "messages": [{"role": "user", "content": "1 + 1"}],
    }
    rows = [
        line("a", **spans), line("a", **spans), line("b"), line("c", **spans), line("d", **spans),
    ]  # fmt: skip
    scene.run.import_groups(write(tmp_path / "f.jsonl", *rows))
    gids = [group_id("math", IMPORTED_FROM + i) for i in range(4)]
    assert scene.run.jobs.cursor("math") == 0
    manifest = scene.take(1, math=1)
    assert manifest.gids == [gids[0]]
    assert manifest.entries[0].samples == 2
    scene.take(2, math=1)
    scene.check()
    # the last one with a version is too old for step 3, and starts again from its prompt
    scene.run.ledger.commit(scene.trainer, 2, 2)
    assert scene.bit("archived", IMPORTED_FROM) == 1
    assert scene.run.buffer.refresh_staleness("math") == {"math": 1}
    scene.open_producer()
    assert scene.run.jobs.reissue(scene.producer, "math", "expired", 1000) == 1
    (job,) = scene.claim()
    assert job.gid == gids[3]
    again = scene.run.buffer.read(job.payload)
    assert (again.status, again.states[0].messages[0]["content"]) == (Status.INIT, "1 + 1")
    scene.submit(job)
    # without spans: never too old
    assert (gids[1], float("inf")) in scene.pool("completed")
    scene.run.janitor.sweep()
    scene.enqueue(1)
    assert scene.stream("fresh") == [group_id("math", 0)]
    scene.check()
    scene.run.save(tmp_path / "s")
    other = resumed(scene, tmp_path / "s")
    other.check()
    assert other.pool("completed") == scene.pool("completed")
    assert other.bit("archived", IMPORTED_FROM) == 1


def test_foreign_weights_count_as_the_oldest_fork(scene: Scene, tmp_path: Path) -> None:
    scene.open_trainer(lineage="l0")
    scene.run.import_groups(write(tmp_path / "f.jsonl", line(spans=[[0, 2, 70, "elsewhere"]])))
    assert scene.pool("completed") == [(FIRST_GID, 0.0)]
    scene.check()


WRONG: list[tuple[list[Any], str]] = [
    ([line(), b"{"], "line 2: not valid JSON"),
    ([line(), b"[1]"], "line 2: a list, not an object"),
    ([line(), line(color="red")], "line 2: color: Extra inputs"),
    ([line(), line("b", response_ids=[1])], "line 2: .*2 logprobs for 1"),
    ([line(logprobs=[0.1, float("nan")])], "line 1: logprobs"),
    ([line(response_ids=[1, -2])], "line 1: response_ids.1"),
    ([line(response_ids=[1, 2.5])], "line 1: response_ids.1"),
    ([line(response_ids=[1, 2**40])], "line 1: response_ids.1"),
    ([line(reward={"accuracy": 1})], "line 1: reward: no score"),
    ([line(response_ids=[], logprobs=[])], "line 1: response_ids: empty"),
    ([line(status="aborted")], "line 1: status: aborted; only completed"),
    ([line(spans=[[0, 3, 1, "l0"]])], "line 1: .*span is outside"),
    ([line(), line("b"), line("b", prompt_ids=[7])], "lines 2 to 3: group b: .*different prompt_ids"),
    ([line(samples=2), line("b", samples=1)], "lines 1 to 1: group a has 1 of 2 lines"),
    ([line(index=0), line(index=0)], "lines 1 to 2: group a: the index"),
    ([line(), line("b", task="chess")], "line 2: there is no training task 'chess'"),
    ([line(task="quiz")], "line 1: there is no training task 'quiz'"),
    ([line(spans=[[0, 1, -1, "l0"]])], r"lines 1 to 1: group a: .*columns\.spans.*"),
]  # fmt: skip


@pytest.mark.parametrize("which", range(len(WRONG)))
def test_wrong_lines_are_named_and_nothing_is_imported(
    scene: Scene, tmp_path: Path, which: int
) -> None:
    lines, words = WRONG[which]
    before = scene.dump()
    with pytest.raises(DatasetError, match=f"f.jsonl, {words}"):
        scene.run.import_groups(write(tmp_path / "f.jsonl", *lines))
    assert scene.dump() == before


def test_file_that_changes_or_a_server_that_fails_says_what_is_in(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "f.jsonl", line("a"), line("b"), line("c"), line("d"))
    original = Store.call

    def refuse(self: Store, script: str, *args: Any, **options: Any) -> Any:
        if script == "put" and account(scene).imported == 2:
            raise StoreError("no")
        return original(self, script, *args, **options)

    monkeypatch.setattr(Store, "call", refuse)
    with pytest.raises(StoreError, match=r"2 groups \(up to line 2\) were imported .*from_line=3"):
        scene.run.import_groups(path)
    monkeypatch.undo()
    assert scene.run.import_groups(path, from_line=3).groups == 2
    assert account(scene).imported == 4
    scene.check()


def test_two_imports_at_once_take_turns(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write(tmp_path / "a.jsonl", *(line(f"a{i}", messages=[{"n": i}]) for i in range(4)))
    second = write(
        tmp_path / "b.jsonl", *(line(f"b{i}", messages=[{"n": 10 + i}]) for i in range(4))
    )
    scene.run.import_groups(first)
    ask = Store.ask

    def ask_before_the_first_import(store: Store, what: str, *words: Any) -> Any:
        return [None, None] if what == "put" else ask(store, what, *words)

    monkeypatch.setattr(Store, "ask", ask_before_the_first_import)
    scene.run.import_groups(second)
    seen = [
        scene.run.buffer.read(scene.payload(group_id("math", IMPORTED_FROM + i)))
        .states[0]
        .messages[0]["n"]
        for i in range(8)
    ]
    assert seen == [0, 1, 2, 3, 10, 11, 12, 13]
    for i in range(8):
        prompt = scene.keys.payload(group_id("math", IMPORTED_FROM + i), "init")
        assert group_bytes.decode(scene.raw.get(prompt)).states[0].messages == [{"n": seen[i]}]
        assert scene.raw.ttl(prompt) == -1
    scene.check()


def test_fsck_finds_a_lost_imported_group_and_a_wrong_count(scene: Scene, tmp_path: Path) -> None:
    scene.run.import_groups(write(tmp_path / "f.jsonl", line("a"), line("b")))
    scene.raw.zrem(
        scene.keys.pool("math", "completed"), f"{scene.record(FIRST_GID)['arrival']}:{FIRST_GID}"
    )
    found = scene.run.account.fsck()
    assert found.lost == [FIRST_GID]
    assert found.faults[0] == "math: 0 enqueued and 2 imported, but 1 in all stages"


def test_files_of_other_kinds_and_existing_ones_are_refused(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").touch()
    with pytest.raises(ConfigError, match=r"f.jsonl exists"):
        scene.run.export(tmp_path / "f.jsonl")
    with pytest.raises(ConfigError, match=r"neither .jsonl nor .parquet"):
        scene.run.export(tmp_path / "f.csv")
    with pytest.raises(DatasetError, match="cannot be read"):
        scene.run.import_groups(tmp_path / "none.jsonl")


@has_pyarrow
def test_torn_parquet_file_is_named(scene: Scene, tmp_path: Path) -> None:
    scene.ready(0, 0)
    scene.run.export(tmp_path / "f.parquet")
    data = (tmp_path / "f.parquet").read_bytes()
    (tmp_path / "f.parquet").write_bytes(data[:-10])
    with pytest.raises(DatasetError, match=r"f.parquet"):
        scene.run.import_groups(tmp_path / "f.parquet")
