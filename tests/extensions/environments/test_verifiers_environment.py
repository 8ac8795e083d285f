"""Data sets of kind "verifiers", with the package itself: `make test-environments`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from buffer.errors import ConfigError
from buffer.wire.rollout import RolloutState, Status
from producer_workers.agent_loops.agent_loop import load_agent_loop
from producer_workers.config.dataset import DatasetSection
from producer_workers.config.task import TaskSection
from producer_workers.datasets.dataset import Problem
from producer_workers.datasets.open import open_dataset, open_here
from tests.producer_workers.recorder import Recorder, run

SUMS = "sums-of-verifiers"
LOCAL = {"runtime": {"type": "subprocess"}}

pytest.importorskip("verifiers")


@pytest.fixture(autouse=True)
def beside_the_taskset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)


def task(environment: str = SUMS, *seats: str) -> TaskSection:
    options = dict.fromkeys(seats or ("agent",), LOCAL)
    dataset = {"kind": "verifiers", "environment": environment, "options": options}
    return TaskSection.model_validate({"dataset": dataset, "judge": "environment"})


def play(chat: Any, section: TaskSection, given: list[Problem], engine: Recorder) -> Any:
    loop: Any = load_agent_loop(
        section.loop("single_turn"),
        judge=None,
        tokenizer=chat,
        eos_ids=[chat.eos_token_id],
        options=section.loop_options("verifiers"),
    )
    states = [
        RolloutState(index=index, messages=problem.messages, extra=problem.extra)
        for index, problem in enumerate(given)
    ]
    return run(loop, engine, states)


def test_a_line_in_the_config_trains_the_tasks_of_an_environment(chat: Any) -> None:
    section = task()
    rows = open_dataset(section.dataset, Path())
    assert len(rows) == 3
    assert rows.row(1).messages == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1 + 1?"},
    ]
    engine = Recorder(chat, ["it is 2"] * 5)
    states = play(chat, section, [rows.row(1), rows.row(0)], engine)
    assert [state.status for state in states] == [Status.COMPLETED] * 2
    assert [state.reward for state in states] == [
        {"score": 1.0, "turns": 1.0},
        {"score": 0.0, "turns": 2.0},
    ]
    engine.check(states)


def test_each_agent_of_an_episode_has_rollouts_and_a_reward_of_its_own(chat: Any) -> None:
    section = task(f"seats-of-verifiers+{SUMS}", "solver", "critic")
    problem = open_here(section.dataset, Path()).row(0)
    engine = Recorder(chat, ["it is 1", "4", "5", "critic: 1"])
    states = play(chat, section, [problem], engine)
    rewards = {state.response[1:]: (state.role, state.reward) for state in states}
    assert rewards == {
        "it is 1": ("solver", {"score": 1.0, "turns": 1.0}),
        "5": ("solver", {"score": 0.0, "turns": 2.0}),
    }
    assert len({state.session_id for state in states}) == 2


def test_what_verifiers_cannot_load_is_refused(tmp_path: Path) -> None:
    def rows(**changes: Any) -> int:
        given = {"kind": "verifiers", "environment": SUMS, **changes}
        section = TypeAdapter[DatasetSection](DatasetSection).validate_python(given)
        return len(open_here(section, tmp_path))

    for wrong in ({"environment": "no-such-taskset"}, {"options": {"no_such_key": 1}}):
        with pytest.raises(ConfigError, match="no_such"):
            rows(**wrong)
    endless = {"taskset": {"endless": True}}
    with pytest.raises(ConfigError, match="has no end"):
        rows(options=endless)
    assert rows(options=endless, size=7) == 7
