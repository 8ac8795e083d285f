"""Real trials of Harbor against the gateway, without a container engine: `make test-harbor`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from buffer.errors import Skip
from buffer.wire.rollout import RolloutState, Status
from producer_workers.datasets.open import open_dataset
from rolloutmq.extensions.environments.datasets import HarborSection
from rolloutmq.extensions.environments.loops import HarborAgentLoop
from tests.producer_workers.recorder import Recorder, questions, run
from tests.waits import until

PYTHON = Path(__file__).parents[3] / "build" / "harbor" / "bin" / "python"

pytestmark = [
    pytest.mark.skipif(not PYTHON.is_file(), reason="Harbor is not installed: make test-harbor"),
    pytest.mark.slow,
]

FOLDERS = "tests.foreign.folder_environment:FolderEnvironment"
TERMINUS = {"name": "terminus-2", "kwargs": {"record_terminal_session": False}}

TESTS = """
if grep -q hello /app/hello.txt; then echo found; reward=1; else reward=0; fi
echo '{"reward": '$reward', "size": 2}' > /logs/verifier/reward.json
"""


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOLDER_ENVIRONMENTS", str(tmp_path / "environments"))
    (tmp_path / "environments").mkdir()
    return tmp_path / "environments"


def write_task(folder: Path, tests: str = TESTS, timeout_s: float = 120.0) -> None:
    (folder / "tests").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "solution").mkdir()
    (folder / "task.toml").write_text(f"[agent]\ntimeout_sec = {timeout_s}")
    (folder / "instruction.md").write_text("Write the word hello into /app/hello.txt.")
    (folder / "tests" / "test.sh").write_text(f"#!/bin/bash\n{tests}")
    (folder / "solution" / "solve.sh").write_text("echo hello > /app/hello.txt")


def turn(keys: str = "", *, seconds: float = 0.5, done: bool = False) -> str:
    """Return what terminus-2 wants from a model."""
    commands = [{"keystrokes": f"{keys}\n", "duration": seconds}] if keys else []
    said = {"analysis": "", "plan": "", "commands": commands, "task_complete": done}
    return json.dumps(said)


def loop_of(chat: Any, agent: Any = None, **options: Any) -> HarborAgentLoop:
    common = {"judge": None, "tokenizer": chat, "eos_ids": [chat.eos_token_id]}
    trial = {"agent": agent or TERMINUS, "environment": {"import_path": FOLDERS}}
    return HarborAgentLoop(**common, harbor_python=str(PYTHON), trial=trial, **options)


def group_of(tasks: Path, size: int = 1) -> list[RolloutState]:
    problem = open_dataset(HarborSection(kind="harbor", path=tasks), tasks).row(0)
    states = questions(*("" for _ in range(size)), max_tokens=100_000)
    for state in states:
        state.messages, state.extra = list(problem.messages), dict(problem.extra)
    return states


def test_an_agent_of_harbor_is_trained_on_exactly_what_was_sampled(
    chat: Any, tmp_path: Path, environments: Path
) -> None:
    write_task(tmp_path / "tasks" / "hello")
    engine = Recorder(chat, [turn("echo hello > hello.txt"), turn(done=True), turn(done=True)])
    kept = tmp_path / "kept"
    states = run(loop_of(chat, trials_dir=str(kept)), engine, group_of(tmp_path / "tasks"))
    engine.check(states)
    assert [state.reward for state in states] == [{"score": 1.0, "size": 2.0}]
    (trial,) = kept.iterdir()
    assert (trial / "verifier" / "test-stdout.txt").read_text() == "found\n"
    assert (trial / "agent" / "trajectory.json").is_file()
    assert list(environments.iterdir()) == []


@pytest.mark.parametrize(
    ("agent", "tests", "reason"),
    [
        ({"name": "oracle"}, TESTS, "without an answer of the model"),
        (TERMINUS, "echo no reward", "RewardFileNotFoundError"),
        (TERMINUS, "echo nan > /logs/verifier/reward.txt", "nan"),
        (TERMINUS, "echo much > /logs/verifier/reward.txt", "VerifierOutputParseError"),
    ],
)
def test_a_trial_without_a_reward_of_the_model_fails_with_a_reason(
    chat: Any, tmp_path: Path, environments: Path, agent: dict[str, Any], tests: str, reason: str
) -> None:
    write_task(tmp_path / "tasks" / "hello", tests)
    engine = Recorder(chat, [turn(done=True)] * 2)
    (state,) = run(loop_of(chat, agent), engine, group_of(tmp_path / "tasks"))
    assert (state.status, state.reward) == (Status.FAILED, None)
    assert reason in str(state.error)
    assert list(environments.iterdir()) == []


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ('echo \'{"reward": 0, "skip": 1}\' > /logs/verifier/reward.json', "tests say so"),
        ("echo no reward", "RewardFileNotFoundError"),
    ],
)
def test_a_task_that_makes_no_sense_skips_its_group(
    chat: Any, tmp_path: Path, environments: Path, tests: str, reason: str
) -> None:
    write_task(tmp_path / "tasks" / "hello", tests)
    loop = loop_of(chat, skipped_errors=["RewardFileNotFoundError"])
    with pytest.raises(Skip, match=reason):
        run(loop, Recorder(chat, [turn(done=True)] * 2), group_of(tmp_path / "tasks"))
    assert list(environments.iterdir()) == []


def test_the_time_limit_of_a_task_ends_its_agent_and_the_tests_judge_its_work(
    chat: Any, tmp_path: Path, environments: Path
) -> None:
    write_task(tmp_path / "tasks" / "hello", timeout_s=10.0)
    engine = Recorder(chat, [turn("echo hello > hello.txt"), turn("sleep 50", seconds=50)])
    (state,) = run(loop_of(chat), engine, group_of(tmp_path / "tasks"))
    assert state.reward == {"score": 1.0, "size": 2.0}
    assert list(environments.iterdir()) == []


@pytest.mark.parametrize("end", ["lease lost", "process killed"])
def test_no_environment_is_left(chat: Any, tmp_path: Path, environments: Path, end: str) -> None:
    write_task(tmp_path / "tasks" / "hello")
    engine = Recorder(chat, [turn("sleep 100", seconds=100)] * 2)

    async def scene() -> list[RolloutState]:
        loop = loop_of(chat)
        states = group_of(tmp_path / "tasks")
        group = asyncio.create_task(loop.generate_group(states, engine, "math-0000000001"))
        try:
            while not engine.said:
                await asyncio.sleep(0.1)
            if end == "lease lost":
                group.cancel()
                return []
            await asyncio.to_thread(until, lambda: trial_processes() != [])
            for pid in trial_processes():
                os.kill(pid, signal.SIGKILL)
            return await group
        finally:
            await asyncio.wait({group})
            await loop.close()

    for state in asyncio.run(scene()):
        assert state.status is Status.FAILED
        assert "ended with -9" in str(state.error)
    assert list(environments.iterdir()) == []


def trial_processes() -> list[int]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [
        int(pid)
        for pid in children
        if b"harbor_trial.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
