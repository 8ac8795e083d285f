from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from buffer.ledger.ledger import BatchLedger
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from consumer.handle.rollout_consumer import RolloutConsumer
from rolloutmq.config.config import Config
from tests.consumer.grpo.test_trainer import DRAWS, history, last_state, train
from tests.consumer.grpo.training_config import GROUPS, STEPS
from tests.consumer.handle import crew
from tests.consumer.handle.crew import at_work
from tests.servers import on_both

BAD = "math-0000000004"


class Killed(BaseException):
    """Stands for SIGKILL: no handler catches it."""


@pytest.fixture
def config(tmp_path: Path, run: Run) -> Config:
    dataset = {"kind": "jsonl", "path": "problems.jsonl"}
    return Config.model_validate(
        {
            "run": {"name": run.name, "dir": tmp_path / "run", "seed": 3},
            "plan": {"steps": STEPS, "batch_size": GROUPS},
            "tasks": {"math": {"judge": "exact_match", "dataset": dataset}},
            "trainer": {"checkpoint_every_steps": 2, "device": "cpu", "producer_timeout_s": 20},
            "learner": {"learning_rate": 1e-3, "updates_per_batch": 2},
            "engine": {"kind": "vllm"},
        }
    )


def alter(monkeypatch: pytest.MonkeyPatch, column: str, value: float, mask: int = 1) -> None:
    """Let the worker submit this value for the first token of a rollout with a gradient."""
    original = crew.answer

    def answer(group: RolloutGroup, *args: Any) -> RolloutGroup:
        answered = original(group, *args)
        if group.gid != BAD:
            return answered
        state = answered.states[1]
        state.response_mask = np.ones(len(state.response_ids), "u1")
        for name, altered in ((column, value), ("response_mask", mask)):
            values = np.array(getattr(state, name))
            values[0] = altered
            setattr(state, name, values)
        return RolloutGroup(group.gid, group.task, answered.states)

    monkeypatch.setattr(crew, "answer", answer)


def check_end(run: Run, config: Config, *, is_trained: bool) -> None:
    steps = history(config).steps
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    assert [len(step.gids) for step in steps] == [GROUPS] * STEPS
    assert history(config).trained_twice() == {}
    assert any(BAD in step.gids for step in steps) is is_trained
    assert [letter.gid for letter in run.dead_letters.newest()] == [BAD] * (not is_trained)
    assert all(step.metrics["optim/skipped_updates"] == 0 for step in steps)
    assert all(torch.isfinite(tensor).all() for tensor in last_state(config).values())
    assert run.account.fsck().clean


@on_both
@pytest.mark.parametrize(
    ("column", "value"),
    [("response_ids", 10**6), ("logprobs", -9999.0), ("logprobs", 3.0)],
    ids=["beyond the vocabulary", "impossible", "no logprob"],
)
def test_one_altered_token_costs_its_group_and_nothing_else(
    run: Run,
    config: Config,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    column: str,
    value: float,
) -> None:
    alter(monkeypatch, column, value)
    with at_work(run, stamp=0, math=DRAWS):
        assert train(run, config, model_dir)
    check_end(run, config, is_trained=False)
    reason = run.dead_letters.reason(BAD)
    assert f" {value:.0f} " in reason["reason"]
    assert reason["worker"] == "w0"


def test_a_masked_token_is_not_read(
    run: Run, config: Config, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alter(monkeypatch, "logprobs", -9999.0, mask=0)
    with at_work(run, stamp=0, math=DRAWS):
        assert train(run, config, model_dir)
    check_end(run, config, is_trained=True)


def test_a_trainer_that_dies_after_it_quarantined_is_continued(
    run: Run, config: Config, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alter(monkeypatch, "response_ids", 10**6)
    original = BatchLedger.quarantine

    def dying(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        raise Killed

    with at_work(run, stamp=0, math=DRAWS):
        with monkeypatch.context() as patch:
            patch.setattr(BatchLedger, "quarantine", dying)
            patch.setattr(RolloutConsumer, "close", lambda self: self.role.ended.set())
            with pytest.raises(Killed):
                train(run, config, model_dir)
        assert train(run, config, model_dir)
    check_end(run, config, is_trained=False)
