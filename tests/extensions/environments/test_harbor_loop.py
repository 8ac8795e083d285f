from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from buffer.errors import ConfigError, Skip
from buffer.wire.rollout import RolloutState, Status
from rolloutmq.extensions.environments.harbor import PROGRAM
from rolloutmq.extensions.environments.loops import HarborAgentLoop
from tests.extensions.environments.harbor_stand_in import install, write_task
from tests.producer_workers.recorder import Recorder, questions, run
from tests.waits import until

TRIAL = {"agent": {"name": "talker"}, "environment": {"type": "folders"}}
OPTIONS: dict[str, Any] = {"harbor_python": sys.executable, "trial": TRIAL}


@pytest.fixture(autouse=True)
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "packages")
    folder = tmp_path / "environments"
    temporary = tmp_path / "temporary"
    for each in (folder, temporary):
        each.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.setenv("STAND_IN_ENVIRONMENTS", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    return folder


def loop_of(chat: Any, **options: Any) -> HarborAgentLoop:
    common = {"judge": None, "tokenizer": chat, "eos_ids": [chat.eos_token_id]}
    return HarborAgentLoop(**{**common, **OPTIONS, "cleanup_s": 20.0, **options})


def group_of(folder: Path, *plays: dict[str, Any], **params: Any) -> list[RolloutState]:
    states = questions(*("do it" for _ in plays), **{"max_tokens": 1000, **params})
    for state, play in zip(states, plays, strict=True):
        state.extra = {"task_path": str(write_task(folder / f"task-{state.index}", play))}
    return states


def test_trials_earn_what_their_tests_say_and_each_token_is_trained_once(
    chat: Any, tmp_path: Path, environments: Path
) -> None:
    engine = Recorder(chat)
    plays: list[dict[str, Any]] = [
        {"turns": 3, "rewards": {"reward": 0.25, "style": 1, "score": 9, "role": 2}},
        {"rewards": {"reward": 0.0}},
    ]
    kept = tmp_path / "kept"
    states = run(loop_of(chat, trials_dir=str(kept)), engine, group_of(tmp_path, *plays))
    engine.check(states)
    assert [state.reward for state in states] == [
        {"score": 0.25, "style": 1.0, "role": 2.0},
        {"score": 0.0},
    ]
    assert [state.role for state in states] == ["", ""]
    trials = sorted(kept.iterdir())
    assert [(trial / "trial.log").read_text() for trial in trials] == ["began\n"] * 2
    for index, trial in enumerate(trials):
        assert trial.name.startswith(f"rmq-math-0000000001-{index}-")
    assert list(environments.iterdir()) == []


@pytest.mark.parametrize(
    ("play", "options", "reason"),
    [
        ({}, {}, "no reward"),
        ({"rewards": {"other": 1}}, {}, "only other"),
        ({"rewards": {"reward": math.nan}}, {}, "nan"),
        ({"rewards": {"reward": 1, "style": "good"}}, {}, "style"),
        ({"rewards": {"reward": 0}, "raises": "fault"}, {}, "ZeroDivisionError: so"),
        ({"rewards": {"reward": 0}, "is_killed": True}, {}, "ended with -9"),
        ({"rewards": {"reward": 0}, "hangs": True}, {"time_limit_s": 3.0}, "longer than 3 s"),
        ({"rewards": {"reward": 0}, "turns": 0}, {}, "without an answer"),
        ({"rewards": {"reward": 0}}, {"trial": {**TRIAL, "typo": 1}}, "typo"),
    ],
)
def test_a_trial_that_fails_is_a_failed_rollout_with_a_reason_and_has_no_reward(
    chat: Any,
    tmp_path: Path,
    environments: Path,
    play: dict[str, Any],
    options: dict[str, Any],
    reason: str,
) -> None:
    good = {"rewards": {"reward": 1}}
    bad, other = run(loop_of(chat, **options), Recorder(chat), group_of(tmp_path, play, good))
    assert (bad.status, bad.reward) == (Status.FAILED, None)
    assert reason in str(bad.error)
    assert other.status is (Status.FAILED if "trial" in options else Status.COMPLETED)
    assert list(environments.iterdir()) == [], "also of the trial whose process was killed"
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize(
    ("play", "reason"),
    [
        ({"rewards": {"reward": 0, "skip": 1}}, "tests say so"),
        ({"rewards": {"reward": 1}, "raises": "fault"}, "ZeroDivisionError: so"),
    ],
)
def test_a_task_that_makes_no_sense_skips_its_group(
    chat: Any, tmp_path: Path, environments: Path, play: dict[str, Any], reason: str
) -> None:
    plays = [play, {"rewards": {"reward": 1, "skip": 0}}]
    loop = loop_of(chat, skipped_errors=["ZeroDivisionError"])
    with pytest.raises(Skip, match=reason):
        run(loop, Recorder(chat), group_of(tmp_path, *plays))
    assert list(environments.iterdir()) == []


def test_an_environment_that_never_stops_costs_no_reward_and_holds_no_rollout(
    chat: Any, tmp_path: Path, environments: Path
) -> None:
    play = {"rewards": {"reward": 1}, "never_stops": True}
    loop = loop_of(chat, cleanup_s=2.0, time_limit_s=120.0)
    (state,) = run(loop, Recorder(chat), group_of(tmp_path, play))
    assert (state.reward, state.error) == ({"score": 1.0}, None)
    assert len(list(environments.iterdir())) == 1


def test_an_answer_that_is_too_long_fails_its_rollout_alone(
    chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.extensions.environments.harbor.LARGEST_ANSWER", 2000)
    rewards = {"reward": 1} | {f"part_{n}": n for n in range(400)}
    plays: list[dict[str, Any]] = [{"rewards": rewards}, {"rewards": {"reward": 1}}]
    long, other = run(loop_of(chat), Recorder(chat), group_of(tmp_path, *plays))
    assert long.status is Status.FAILED
    assert "more than 2000 bytes" in str(long.error)
    assert other.reward == {"score": 1.0}


def test_work_that_ends_by_a_limit_is_scored_by_the_tests(chat: Any, tmp_path: Path) -> None:
    rewards = {"rewards": {"reward": 0.5}}
    limits = [{"raises": "timeout", **rewards}, {"raises": "fault", **rewards}]
    loop = loop_of(chat, scored_errors=["ZeroDivisionError"])
    states = run(loop, Recorder(chat), group_of(tmp_path / "errors", *limits))
    assert [state.reward for state in states] == [{"score": 0.5}] * 2
    # one that uses up the tokens of its session is refused, and fails by that
    many = {"turns": 100, **rewards}
    states = run(loop_of(chat), Recorder(chat), group_of(tmp_path / "tokens", many, max_tokens=20))
    assert [(state.status, state.reward) for state in states] == [
        (Status.COMPLETED, {"score": 0.5})
    ]
    # where Harbor could not even test it, there is no reward
    states = run(
        loop_of(chat), Recorder(chat), group_of(tmp_path / "none", {"turns": 100}, max_tokens=20)
    )
    assert [(state.status, state.reward) for state in states] == [(Status.FAILED, None)]


def test_a_task_that_is_not_on_this_machine_fails_its_rollouts(chat: Any, tmp_path: Path) -> None:
    states = group_of(tmp_path, {"rewards": {"reward": 1}})
    states[0].extra["task_path"] = str(tmp_path / "elsewhere")
    (state,) = run(loop_of(chat), Recorder(chat), states)
    assert state.status is Status.FAILED
    assert "elsewhere" in str(state.error)


def test_a_pause_ends_trials_and_the_next_claim_begins_them_again(
    chat: Any, tmp_path: Path, environments: Path
) -> None:
    first = Recorder(chat)
    first.cut = {0}
    plays: list[dict[str, Any]] = [
        {"turns": 2, "rewards": {"reward": 1}},
        {"rewards": {"reward": 1}},
    ]
    states = run(loop_of(chat), first, group_of(tmp_path, *plays))
    assert [state.status for state in states] == [Status.ABORTED, Status.COMPLETED]
    assert list(environments.iterdir()) == []
    second = Recorder(chat)
    states = run(loop_of(chat), second, states)
    assert [state.reward for state in states] == [{"score": 1.0}] * 2
    second.check([states[0]])


def test_a_lost_lease_ends_trials_without_waiting_for_their_environments(
    chat: Any, tmp_path: Path, environments: Path
) -> None:
    async def scene() -> None:
        loop = loop_of(chat, cleanup_s=3.0)
        states = group_of(tmp_path, {"hangs": True}, {"hangs": True, "never_stops": True})
        group = asyncio.create_task(loop.generate_group(states, Recorder(chat), "math-0000000001"))
        while len(list(environments.iterdir())) < 2:
            await asyncio.sleep(0.05)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        await loop.close()

    asyncio.run(scene())
    (left,) = environments.iterdir()
    assert "math-0000000001-1-" in left.name, "its environment hangs, and its process does not"


HOST = """
import asyncio, json, sys
from rolloutmq.extensions.environments.harbor import TrialProcesses

request = json.loads(sys.stdin.readline())
asyncio.run(TrialProcesses(sys.executable, 1, 3600.0, 20.0).run(request))
"""


@pytest.mark.parametrize("end", ["worker is killed", "SIGTERM"])
def test_a_trial_ends_in_order_when_its_worker_dies(
    tmp_path: Path, environments: Path, end: str
) -> None:
    task = write_task(tmp_path / "task", {"turns": 0, "hangs": True})
    config = {
        "task": {"path": str(task)}, "trial_name": "rmq-x", "trials_dir": str(tmp_path / "trials"),
        "agent": {}, "environment": {},
    }  # fmt: skip
    request = {"config": config, "keep": False, "cleanup_s": 20.0}
    command = ["-c", HOST] if end == "worker is killed" else ["-P", str(PROGRAM)]
    with subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(orjson.dumps(request) + b"\n")
        process.stdin.flush()
        until(lambda: list(environments.iterdir()) != [])
        process.send_signal(signal.SIGKILL if end == "worker is killed" else signal.SIGTERM)
        until(lambda: list(environments.iterdir()) == [])
        until(lambda: not (tmp_path / "trials").exists())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"trial": {**TRIAL, "agent": {"name": "nobody"}}}, "no agent"),
        ({"trial": {**TRIAL, "environment": {"type": "moon"}}}, "SystemExit: no such environment"),
        ({"harbor_python": os.devnull}, "harbor_python"),
        ({"trial": {"agent": "talker"}}, "trial has no table agent"),
        ({"typo": 1}, "typo"),
    ],
)
def test_what_harbor_cannot_load_is_refused_before_any_trial(
    options: dict[str, Any], reason: str
) -> None:
    HarborAgentLoop.check_options(OPTIONS)
    with pytest.raises(ConfigError, match=reason):
        HarborAgentLoop.check_options({**OPTIONS, **options})
