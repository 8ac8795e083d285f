from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from buffer.errors import AccountError, ModelError
from buffer.ids import group_id
from buffer.ledger.position import Position, TrainedDraws
from buffer.manifest import Manifest
from buffer.weights.shared_folder import FolderSender
from buffer.wire.rollout import PolicyVersion
from consumer.grpo.model_state.saved_state import Rows, write_state
from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.step_log import StepLog, StepWriter, read_evaluations
from tests.consumer.grpo.model_state.test_saved_state import Rank

FILES = ("trainer.json", "state-00000-of-00002.safetensors", "state-00001-of-00002.safetensors")

PROGRAM = "tests.consumer.handle.kill_everywhere"


def batch(step: int) -> Manifest:
    return Manifest.parse(step, [f"step={step}", f"{group_id('math', step)} token 1 20 - 2 -"])


def write(checkpoints: CheckpointFolder, step: int) -> Path:
    position = Position(lineage="l1", run="demo", run_nonce="abc")
    position.add(batch(step))

    def save(folder: Path) -> None:
        (folder / "weights").write_bytes(b"w" * step)

    return checkpoints.write(position, save)


def write_whole(checkpoints: CheckpointFolder, step: int) -> None:
    def save(folder: Path) -> None:
        for rank in (0, 1):
            state = {"model/a": torch.ones(2, 4), "step": torch.tensor(step)}
            write_state(folder, state, {"model/a": Rows(2 * rank, 2, 4)}, Rank(rank, 2))

    checkpoints.write(Position(step=step, run="demo"), save)


@pytest.mark.parametrize("step", [30, 20])
def test_killed_write_leaves_every_checkpoint_whole_or_away(tmp_path: Path, step: int) -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM, str(tmp_path), str(step)],
        cwd=root,
        capture_output=True,
        check=True,
    )
    outcomes = orjson.loads(done.stdout)
    assert len(outcomes) > 15  # it was killed at many operations, and in the end at none
    assert [outcome["killed"] for outcome in outcomes] == [True] * (len(outcomes) - 1) + [False]
    for outcome in outcomes:
        assert outcome["steps"] == outcome["whole"]
        assert outcome["left"] == [f"step-{s:06d}" for s in outcome["steps"]]
        # one to continue from always exists: the oldest is deleted after the newest is complete
        assert (20 if step == 30 else 10) in outcome["steps"]
    assert outcomes[-1]["steps"] == sorted({20, step} | ({10} if step == 20 else set()))


def test_write_leaves_the_old_ones_alone_when_saving_fails(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    write(checkpoints, 1)

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.write(Position(step=2, lineage="", run="demo", run_nonce=""), fail)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_the_folder_of_a_run_that_was_deleted_does_not_come_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoints = CheckpointFolder(run / "checkpoints")
    weights = FolderSender(run / "weights")
    shutil.rmtree(run)

    def save(folder: Path) -> None:
        (folder / "file").touch()

    with pytest.raises(FileNotFoundError):
        checkpoints.write(Position(step=1), save)
    with pytest.raises(FileNotFoundError):
        weights.write(PolicyVersion("ab12cd34", 1), save)
    assert not run.exists()


def test_prune_keeps_the_newest_and_returns_the_oldest_kept(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    assert checkpoints.prune(2) == 0
    for step in (3, 12, 7):
        write(checkpoints, step)
    assert checkpoints.prune(2) == 7
    assert checkpoints.steps() == [7, 12]
    assert checkpoints.prune(5) == 7


def test_steps_pass_over_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    assert checkpoints.steps() == []
    write(checkpoints, 1_234_567)
    for name in ("step-000009-copy", "step-x", "step-000010"):
        (tmp_path / name).mkdir()
        if name != "step-000010":
            (tmp_path / name / "trainer.json").touch()
    assert checkpoints.steps() == [1_234_567]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def junk_metadata(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"rows":"{', b'"rows":"}'))


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def of_another_step(file: Path) -> None:
    file.write_bytes(re.sub(rb'"step": \d', b'"step": 8', file.read_bytes()))


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        *((damage, name) for damage in (cut, make_folder, Path.unlink) for name in FILES),
        (junk_metadata, FILES[1]),
        (of_another_step, FILES[0]),
    ],
)
def test_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], name: str
) -> None:
    """The warning names the file, and the checkpoint is replaced when its step is done again."""
    checkpoints = CheckpointFolder(tmp_path)
    for step in (7, 9):
        write_whole(checkpoints, step)
    damage(checkpoints.path(9) / name)
    position = checkpoints.newest_whole()
    assert position is not None
    assert position.step == 7
    assert f"step-000009/{name}" in caplog.text or f"lacks {name}" in caplog.text
    checkpoints.clear(after=7)
    write_whole(checkpoints, 9)
    damage(checkpoints.path(9) / name)
    damage(checkpoints.path(7) / name)
    with pytest.raises(ModelError, match=r"no checkpoint in .* is whole: .*; ") as error:
        checkpoints.newest_whole()
    assert "--regenerate" in error.value.hint


def test_clear_deletes_what_comes_after_and_what_the_dead_left(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    for step in (2, 4, 6):
        write(checkpoints, step)
    (tmp_path / ".step-000008.1234.tmp").mkdir()
    (tmp_path / "notes").mkdir()
    checkpoints.clear(after=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes",
        "step-000002",
        "step-000004",
    ]


# -- which draws were trained ------------------------------------------------------------

DRAWS = st.tuples(st.sampled_from(["math", "code"]), st.integers(0, 40))


@given(batches=st.lists(st.lists(DRAWS, min_size=1, max_size=5)))
def test_trained_draws_is_a_set_that_refuses_what_it_holds(
    batches: list[list[tuple[str, int]]],
) -> None:
    trained = TrainedDraws()
    model = set[tuple[str, int]]()
    for step, batch in enumerate(batches):
        before = trained.model_copy(deep=True)
        if set(batch) & model or len(set(batch)) < len(batch):
            with pytest.raises(AccountError, match=f"step {step} holds groups"):
                trained.add_batch(step, [group_id(*draw) for draw in batch])
            assert trained == before
        else:
            trained.add_batch(step, [group_id(*draw) for draw in batch])
            model |= set(batch)
    trained = TrainedDraws.model_validate_json(trained.model_dump_json())
    for task in ("math", "code"):
        numbers = trained.tasks.get(task)
        held = {draw for draw in range(60) if numbers is not None and draw in numbers}
        assert held == {draw for name, draw in model if name == task}
        assert len(held) == (len(numbers) if numbers is not None else 0)


def test_trained_draws_stay_small_whatever_is_never_trained() -> None:
    trained = TrainedDraws()
    trained.add_batch(
        1, [group_id("math", draw) for draw in range(20_000) if draw not in (3, 14_000)]
    )
    assert len(trained.model_dump_json()) < 200
    assert [draw for draw in range(20_000) if group_id("math", draw) not in trained] == [3, 14_000]
    trained.add_batch(2, [group_id("code", draw) for draw in range(0, 20_000, 2)])
    assert len(trained.model_dump_json()) < 400
    trained.add_batch(3, [group_id("code", draw) for draw in range(1, 20_000, 2)])
    assert trained.tasks["code"].low == 20_000
    assert trained.count("code") == 20_000


def test_position_forgets_batches_that_are_never_delivered_again() -> None:
    position = Position()
    for step in (1, 2, 3):
        position.add(batch(step))
    position.forget(2)
    assert (position.step, list(position.batches)) == (3, [3])
    assert [group_id("math", step) in position.trained for step in range(5)] == [
        False, True, True, True, False,
    ]  # fmt: skip


def steps(folder: Path) -> StepLog:
    log = StepLog(folder / "steps.jsonl")
    log.read_new()
    return log


def add(folder: Path, step: int, lineage: str = "l1") -> None:
    StepWriter(folder).add_step(step, lineage, [f"math-{step:010d}"], {"rewards/mean": step / 10})


def test_reader_sees_what_was_written_and_what_a_restart_replaced(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        add(tmp_path, step)
    log = steps(tmp_path)
    assert [(s.step, s.gids, s.metrics) for s in log.steps][2] == (
        3,
        ("math-0000000003",),
        {"rewards/mean": 0.3},
    )
    for step in (2, 3, 4):
        add(tmp_path, step, "l2")
    assert [s.step for s in log.read_new()] == [2, 3, 4]
    assert [(s.step, s.lineage) for s in log.steps] == [(1, "l1"), (2, "l2"), (3, "l2"), (4, "l2")]
    assert (log.replaced, log.torn, log.trained_twice()) == (2, 0, {})


def test_step_is_written_again_when_its_line_was_torn_anywhere(tmp_path: Path) -> None:
    add(tmp_path, 1)
    file = tmp_path / "steps.jsonl"
    first = file.read_bytes()
    add(tmp_path, 2)
    both = file.read_bytes()
    for cut in range(len(first), len(both)):
        file.write_bytes(both[:cut])
        add(tmp_path, 2, "l2")
        log = steps(tmp_path)
        assert [s.step for s in log.steps] == [1, 2]
        assert log.steps[-1].lineage == "l2"
        # a line that lacks but its end is whole all the same, and replaced
        assert log.torn + log.replaced == (cut > len(first))


def test_evaluations_survive_a_line_that_was_torn_anywhere(tmp_path: Path) -> None:
    writer = StepWriter(tmp_path)
    assert read_evaluations(tmp_path) == {}
    writer.add_evaluation(0, "quiz", {"eval/accuracy": 0.25})
    file = tmp_path / "evaluations.jsonl"
    first = file.read_bytes()
    writer.add_evaluation(9, "quiz", {"eval/accuracy": 0.5})
    both = file.read_bytes()
    for cut in range(len(first), len(both)):
        file.write_bytes(both[:cut])
        assert read_evaluations(tmp_path).keys() - {("quiz", 9)} == {("quiz", 0)}
        writer.add_evaluation(9, "quiz", {"eval/accuracy": 0.75})
        assert read_evaluations(tmp_path) == {
            ("quiz", 0): {"eval/accuracy": 0.25},
            ("quiz", 9): {"eval/accuracy": 0.75},
        }
