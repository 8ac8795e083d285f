from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.control.control import Mode
from buffer.errors import ConfigError, ModelError
from buffer.wire.rollout import RolloutState
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.engines.base import Engine, EngineDeadError
from producer_workers.judges.watched_judges import WatchedJudges
from producer_workers.worker.worker import Worker
from rolloutmq.extensions.teacher.section import Teachers
from tests.extensions.teacher.scorer import TASK, Scorer, config_of, scored_by
from tests.pipeline.yard import Yard

BIG = {"engine": scored_by(), "top_k": 2}


@pytest.fixture(autouse=True)
def no_scorers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scorer, "made", [])


class Taught:
    """Makes workers whose groups are scored by these teachers."""

    def __init__(self, yard: Yard, model: Path, teachers: dict[str, Any], **judging: Any) -> None:
        self._yard = yard
        self._config = config_of(model, teachers, judging)

    def worker(self, name: str = "w0", *, grace_s: float = 10.0, **options: Any) -> Worker:
        judge = Teachers.judges(self._config, [TASK])[TASK]
        watched = WatchedJudges()
        columns = [watched.watch_columns(judge, grace_s)]
        return self._yard.worker(name, judges=watched, column_judges=columns, **options)


def texts() -> list[list[int]]:
    return [text for engine in Scorer.made for text in engine.texts]


def test_each_rollout_has_the_columns_of_the_teachers_of_its_source_and_its_own_reward(
    yard: Yard, tiny_model: Path
) -> None:
    teachers = {
        "big": BIG,
        "other": {"engine": scored_by(seed=1), "sources": ["a*"]},
        "none": {"engine": scored_by(seed=2), "sources": ["b*"]},
    }
    taught = Taught(yard, tiny_model, teachers)
    states = [RolloutState(index=n, prompt_ids=np.arange(3), data_source="abc") for n in range(2)]

    async def scenario() -> str:
        (gid,) = yard.enqueue_states(states)
        async with yard.working(taught.worker()):
            await yard.until_stages(completed=1)
        return gid

    group = yard.group(asyncio.run(scenario()))
    columns = group.optional_columns()
    assert {name.partition("/")[2] for name in columns} == {"big", "other"}
    for state in group.states:
        tokens = len(state.response_ids)
        assert state.reward
        assert state.reward.keys() == {"score"}
        assert state.teacher_logprobs is not None
        assert {name: len(row) for name, row in state.teacher_logprobs.items()} == {
            "big": tokens,
            "other": tokens,
        }
        assert state.teacher_top_ids is not None
        assert state.teacher_top_ids["big"].shape == (tokens, 2)
    asked = [[*range(3), *state.response_ids.tolist()] for state in group.states]
    assert sorted(texts()) == sorted(asked * 2)


def test_neither_a_filtered_group_nor_a_rollout_that_is_not_trained_is_scored(
    yard: Yard, tiny_model: Path
) -> None:
    taught = Taught(yard, tiny_model, {"big": BIG})

    async def scenario() -> str:
        yard.enqueue(1)
        async with yard.working(taught.worker(is_valid_sample=lambda _: False)):
            await yard.until_stages(filtered=1)
        assert texts() == []
        (gid,) = yard.enqueue(1)
        async with yard.working(taught.worker("w1", loop=Critic)):
            await yard.until_stages(completed=1, filtered=1)
        return gid

    speaker, critic = yard.group(asyncio.run(scenario())).states
    assert (speaker.teacher_logprobs or {}).keys() == {"big"}
    assert critic.teacher_logprobs is None
    assert len(texts()) == 1
    yard.check()


class Critic(SingleTurnAgentLoop):
    """Its second rollout is not trained."""

    async def generate_group(
        self, states: list[RolloutState], engine: Engine, gid: str
    ) -> list[RolloutState]:
        made = await super().generate_group(states, engine, gid)
        made[1].response_mask = np.zeros(len(made[1].response_ids), "u1")
        return made


def test_a_text_that_cannot_be_scored_is_tried_again_and_then_fails_its_group_by_name(
    make_yard: Callable[..., Yard], tiny_model: Path
) -> None:
    yard = make_yard(max_tries=1)
    broken = {"big": {"engine": scored_by(fail_every=2)}}  # the probe is the first request

    async def scenario() -> None:
        (gid,) = yard.enqueue(1, tokens=(8,))
        async with yard.working(Taught(yard, tiny_model, broken, retries=0).worker()):
            await yard.until_stages(dead=1)
        reason = yard.run.dead_letters.reason(gid)["reason"]
        assert "teacher big" in reason
        assert "fail_every" in reason
        yard.run.jobs.requeue(gid)
        async with yard.working(Taught(yard, tiny_model, broken, retries=1).worker("w1")):
            await yard.until_stages(completed=1)

    asyncio.run(scenario())
    yard.check()


def test_an_engine_that_dies_is_replaced_and_no_group_is_sampled_again(
    yard: Yard, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scorer, "deaths", 1)
    taught = Taught(yard, tiny_model, {"big": BIG})

    async def scenario() -> int:
        yard.enqueue(2)
        async with yard.working(taught.worker()) as engine:
            await yard.until_stages(completed=2)
            return len(engine.requests)

    assert asyncio.run(scenario()) == 4
    assert len(Scorer.made) == 2
    yard.check()


def test_an_engine_that_always_dies_ends_its_worker_and_costs_no_group_a_try(
    yard: Yard, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scorer, "deaths", 9)
    taught = Taught(yard, tiny_model, {"big": BIG}, retries=5)

    async def scenario() -> None:
        yard.enqueue(1)
        worker: Any = taught.worker()
        await worker.engine.start()
        await worker.run()

    with pytest.raises(EngineDeadError, match="giving up after 1 restarts"):
        asyncio.run(scenario())
    (record,) = yard.records()
    # it may be claimed once more before the worker ends, and then keeps its tokens
    assert record["stage"] in ("waiting", "pool")
    assert record["tries"] == "0"
    yard.check()


def test_a_pause_leaves_the_tokens_and_the_next_claim_scores_them(
    yard: Yard, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = Taught(yard, tiny_model, {"big": BIG})

    async def scenario() -> tuple[str, int]:
        (gid,) = yard.enqueue(1)
        gate = asyncio.Event()
        monkeypatch.setattr(Scorer, "gate", gate)
        async with yard.working(taught.worker(grace_s=0.0)) as engine:
            await yard.until(lambda: texts())
            yard.control(Mode.ABORT)
            await yard.until_stages(aborted=1)
            gate.set()
            yard.control(Mode.RUN)
            yard.reissue()
            await yard.until_stages(completed=1)
            return gid, len(engine.requests)

    gid, requests = asyncio.run(scenario())
    states = yard.group(gid).states
    assert requests == len(states)
    assert all(state.teacher_logprobs for state in states)
    yard.check()


def test_a_worker_that_leaves_hands_groups_back_without_a_lost_try(
    yard: Yard, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = Taught(yard, tiny_model, {"big": BIG})

    async def scenario() -> None:
        yard.enqueue(1)
        monkeypatch.setattr(Scorer, "gate", asyncio.Event())
        async with yard.working(taught.worker(drain_timeout_s=0.0)):
            await yard.until(lambda: texts())
        await yard.until_stages(aborted=1)

    asyncio.run(scenario())
    (record,) = yard.records()
    assert record["tries"] == "0"
    yard.check()


@pytest.mark.parametrize(
    ("teacher", "why"),
    [
        ({"engine": {"kind": "python", "factory": f"{__name__}:no_scorer"}}, "cannot score texts"),
        ({"engine": scored_by(fail_every=1)}, "teacher big: .*fail_every"),
        ({"engine": scored_by(max_model_len=8)}, "teacher big: task sums"),
        ({"engine": scored_by(), "model": "models/of/none"}, "no tokenizer in 'models/of/none'"),
    ],
)
def test_a_worker_does_not_join_with_a_teacher_that_cannot_score(
    yard: Yard, tiny_model: Path, teacher: dict[str, Any], why: str
) -> None:
    taught = Taught(yard, tiny_model, {"big": teacher})
    with pytest.raises((ConfigError, ModelError), match=why):
        asyncio.run(taught.worker().run())
    assert yard.run.fleet.workers() == []


class NoScorer:
    name = "none"


def no_scorer(*_: Any) -> NoScorer:
    return NoScorer()
