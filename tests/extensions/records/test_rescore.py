from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from buffer.errors import ConfigError
from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.step_log import read_steps
from rolloutmq.config.config import Config
from rolloutmq.extensions.records.archive import Archive
from rolloutmq.extensions.records.rescore import forget_other_scores
from rolloutmq.extensions.records.rescore import rescore as rescore_steps
from tests.consumer.grpo.training_config import GROUPS, STEPS
from tests.rolloutmq.conftest import in_process

JUDGE = "tests.extensions.records.other_judge:reversed_score"


def rescore(config: Config, *args: str, judge: str = JUDGE) -> dict[str, Any]:
    what = ("--task", "math", "--judge", judge, "--json")
    done = in_process("rescore", str(config.run.folder), *what, *args)
    assert done.returncode == 0, done.stderr
    return dict(orjson.loads(done.stdout))


def test_a_judge_that_was_wrong_is_put_right(trained: Config) -> None:
    shown = rescore(trained, "--from", "2", "--name", "right")
    assert shown["groups"] == shown["changed"] == shown["advantages"] == GROUPS * (STEPS - 2)
    folder = trained.run.folder.with_name("right")
    assert not (folder / "checkpoints").exists()
    first = {step: Archive(str(folder / "archive")).raw(step) for step in range(3, STEPS + 1)}

    done = rescore(trained, "--from", "2", "--name", "right", "--yes")
    assert done["state"]
    assert {step: Archive(str(folder / "archive")).raw(step) for step in first} == first
    steps = read_steps(folder)
    own = {step.step: step for step in read_steps(trained.run.folder)}
    assert [step.step for step in steps] == [3, 4, 5]
    for step in steps:
        assert step.gids == own[step.step].gids
        assert step.metrics["rewards/mean"] == own[step.step].metrics["rewards/mean"] == 0.5
    assert steps[0].metrics["loss/policy"] != own[3].metrics["loss/policy"]
    assert CheckpointFolder(folder / "checkpoints").read(STEPS).step == STEPS

    forked = in_process("fork", str(folder), "--at", str(STEPS), "--name", "right-on", "--json")
    assert forked.returncode == 0, forked.stderr
    assert JUDGE in (folder.with_name("right-on") / "config.toml").read_text(encoding="utf-8")


def test_scores_of_a_judge_that_has_changed_since_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, scored = tmp_path / "changing.py", tmp_path / "new" / "archive" / "step-0000001.rmq"

    def score(task: str, judge: str) -> bool:
        scored.parent.mkdir(parents=True, exist_ok=True)
        scored.touch()
        forget_other_scores(tmp_path / "new", task, judge)
        return scored.exists()

    file.write_text("def score(**_): return 1.0", encoding="utf-8")
    assert [score("math", "changing:score") for _ in range(2)] == [False, True]
    file.write_text("def score(**_): return 0.0", encoding="utf-8")
    assert [score("math", "changing:score") for _ in range(2)] == [False, True]
    assert not score("code", "changing:score")
    assert not score("code", "exact_match")


def test_the_same_judge_changes_nothing(trained: Config) -> None:
    shown = rescore(
        trained, "--from", "4", "--name", "same-scores",
        judge="tests.extensions.records.other_judge:reversed_score",
    )  # fmt: skip
    again = rescore(trained, "--from", "4", "--name", "same-scores")
    assert shown == again


def test_a_judge_that_fails_ends_it_and_writes_no_step(trained: Config) -> None:
    judge = "tests.extensions.records.other_judge:fails"
    what = ("--task", "math", "--judge", judge, "--from", "2", "--name", "failing")
    done = in_process("rescore", str(trained.run.folder), *what)
    assert done.returncode
    assert "no verdict" in done.stderr
    assert Archive(str(trained.run.folder.with_name("failing") / "archive")).steps() == []


def test_earlier_steps_may_be_scored_later(trained: Config) -> None:
    late = rescore(trained, "--from", "3", "--name", "extended")
    both = rescore(trained, "--from", "1", "--name", "extended")
    assert (late["groups"], both["groups"]) == (GROUPS * (STEPS - 3), GROUPS * (STEPS - 1))
    folder = trained.run.folder.with_name("extended")
    assert Archive(str(folder / "archive")).steps() == list(range(2, STEPS + 1))


def test_a_judge_that_skips_a_trained_group_is_told_which(trained: Config) -> None:
    judge = "tests.extensions.records.other_judge:skips"
    what = ("--task", "math", "--judge", judge, "--from", "2", "--name", "skipping")
    done = in_process("rescore", str(trained.run.folder), *what)
    assert done.returncode == 1
    assert "skips group math-" in done.stderr
    assert "nobody knows" in done.stderr


def test_the_groups_of_an_evaluation_are_not_scored(trained: Config, tmp_path: Path) -> None:
    source = Archive(trained.run.folder / "archive")
    file = source.open(1)
    file.facts.config["tasks"]["held_out"] = {"eval_of": "math"}
    source.open = lambda step: file  # type: ignore[method-assign]
    target = Archive(tmp_path / "archive")
    with pytest.raises(ConfigError, match="held_out") as raised:
        next(rescore_steps(source, target, "held_out", JUDGE, range(1, 2), []))
    assert raised.value.hint == "known: math"
