from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from buffer.errors import ConfigError
from producer_workers.config.dataset import JsonlSection, ReasoningGymSection
from producer_workers.config.task import HELD_OUT
from producer_workers.datasets import reasoning_gym
from producer_workers.datasets.files import JsonlDataset
from producer_workers.datasets.open import open_dataset
from producer_workers.datasets.reasoning_gym import ProblemFiles, write_problems

SUMS = {"min_terms": 2, "max_terms": 3, "max_digits": 2}


def write(folder: Path, **changes: Any) -> ProblemFiles:
    """Write the problems of 130 sums, unless `changes` say otherwise."""
    sizes = {"size": 130, "warm_start_size": 30, "held_out_size": 40, "seed": 5}
    values = {"kind": "reasoning_gym", "name": "chain_sum", "config": SUMS, **sizes, **changes}
    return write_problems(ReasoningGymSection.model_validate(values), folder)


def questions(path: Path) -> list[str]:
    rows = JsonlDataset(path)
    return [rows.row(n).messages[0]["content"] for n in range(len(rows))]


def state_of(files: ProblemFiles) -> list[tuple[bytes, int]]:
    return [(path.read_bytes(), path.stat().st_mtime_ns) for path in files]


def test_problems_are_all_different_and_as_many_as_asked_for(tmp_path: Path) -> None:
    files = write(tmp_path)
    parts = [questions(path) for path in files]
    assert [len(part) for part in parts] == [30, 60, 40]
    assert len({question for part in parts for question in part}) == 130
    assert not list(tmp_path.glob("*.part"))
    for line in files.train.read_bytes().splitlines():
        assert set(orjson.loads(line)) == {"messages", "ground_truth", "data_source", "extra"}


def test_problems_say_their_source_and_metadata(tmp_path: Path) -> None:
    problem = JsonlDataset(write(tmp_path).train).row(0)
    assert problem.data_source == "reasoning_gym/chain_sum"
    expression = problem.extra["metadata"]["expression"]
    assert expression in problem.messages[0]["content"]
    terms = expression.replace("- ", "+ -").split("+")
    assert sum(int(term) for term in terms) == int(problem.ground_truth)


def test_problems_are_dealt_alike_when_easy_ones_are_few(tmp_path: Path) -> None:
    """One-digit sums of two terms are few. Dealt in the order made, held-out would get nearly all."""
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    shares = []
    for path in write(tmp_path, size=900, warm_start_size=300, held_out_size=300, config=config):
        rows = JsonlDataset(path)
        easy = [rows.row(n).extra["metadata"]["num_digits"] == 1 for n in range(300)]
        shares.append(sum(easy) / 300)
    assert min(shares) > 0.05
    assert max(shares) - min(shares) < 0.12


def test_problems_are_left_alone_when_they_are_there_and_the_same_elsewhere(tmp_path: Path) -> None:
    before = state_of(write(tmp_path / "a"))
    assert state_of(write(tmp_path / "a")) == before
    assert [data for data, _ in state_of(write(tmp_path / "b"))] == [data for data, _ in before]


@pytest.mark.parametrize("change", [{"seed": 6}, {"size": 131}, {"config": {"max_terms": 2}}])
def test_problems_are_made_anew_when_parameters_change(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    before = write(tmp_path).train.read_bytes()
    files = write(tmp_path, **change)
    assert files.train.read_bytes() != before
    assert not set(questions(files.train)) & set(questions(files.held_out))


@pytest.mark.parametrize("lost", ["problems.json", "held_out.jsonl"])
def test_problems_are_completed_when_a_run_was_killed_while_writing(
    tmp_path: Path, lost: str
) -> None:
    before = [path.read_bytes() for path in write(tmp_path)]
    (tmp_path / lost).unlink()
    assert [path.read_bytes() for path in write(tmp_path)] == before
    (tmp_path / "problems.json").write_bytes(b'{"finger')
    ProblemFiles.within(tmp_path).train.write_bytes(b"")
    assert [path.read_bytes() for path in write(tmp_path)] == before


def test_a_part_of_no_problems_has_no_file(tmp_path: Path) -> None:
    write(tmp_path)
    files = write(tmp_path, warm_start_size=0)
    assert not files.warm_start.exists()
    stamp = files.train.stat().st_mtime_ns
    assert write(tmp_path, warm_start_size=0).train.stat().st_mtime_ns == stamp


def test_too_few_different_problems_are_an_error_that_says_how_many(tmp_path: Path) -> None:
    config = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    with pytest.raises(ConfigError, match=r"1000 wanted, \d+ found") as caught:
        write(tmp_path, size=1000, config=config)
    assert "reduce size" in caught.value.hint
    assert not (tmp_path / "problems.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "chain_sums"}, r"no task 'chain_sums' \(did you mean chain_sum"),
        ({"config": {"terms": 2}}, "refuses its config"),
        ({"config": {"min_terms": 5, "max_terms": 2}}, "refuses its config"),
        ({"config": {"seed": 2}}, r"sets \['seed'\]"),
        ({"name": "n_queens", "config": {}}, "runs eval"),
        ({"name": "graph_color", "config": {}}, "gives no answers to learn from"),
        # it compares tuples, which JSON does not have: each of its answers would be judged wrong
        ({"name": "rearc", "config": {}}, r"0 found \(5 more are not solved by their own answer"),
    ],
)
def test_a_section_that_cannot_be_made_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(reasoning_gym, "_MISSES", 5)
    with pytest.raises(ConfigError, match=message):
        write(tmp_path, **change)


def test_open_dataset_reads_the_split_that_a_task_asks_for(tmp_path: Path) -> None:
    section = ReasoningGymSection(kind="reasoning_gym", name="chain_sum", size=50, held_out_size=20)
    train = open_dataset(section, tmp_path)
    held_out = open_dataset(section, tmp_path, HELD_OUT)
    assert (len(train), len(held_out)) == (30, 20)
    with pytest.raises(ConfigError, match="no split 'test'"):
        open_dataset(section, tmp_path, "test")
    with pytest.raises(ConfigError, match="has no held-out problems"):
        open_dataset(section.model_copy(update={"held_out_size": 0}), tmp_path, HELD_OUT)
    rows = JsonlSection(kind="jsonl", path=ProblemFiles.within(tmp_path).held_out)
    assert len(open_dataset(rows, tmp_path / "unused", HELD_OUT)) == 20
    assert not (tmp_path / "unused").exists()
