from __future__ import annotations

from pathlib import Path

from consumer.handle.step_log import StepLog, StepWriter, read_evaluations


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
