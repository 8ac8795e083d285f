"""A trainer of XTuner without a model: its manager, strategy and sampler, and our buffer.

The "weights" of a checkpoint list the groups that they were trained on. `events` has a line for
each group that was `made`, each step that is `trained`, when XTuner has saved its `buffer`, and
when the checkpoint is `saved`.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import unittest
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import pytest

from tests.extensions.trainers.xtuner_sources import import_xtuner, load

SOURCES = import_xtuner()

from xtuner.v1.data_proto.rl_data import (  # noqa: E402
    RolloutFunctionCall,
    RolloutState,
    RolloutToolCall,
    SampleParams,
    Status,
)
from xtuner.v1.rl.agent_loop_manager.agent_loop_manager import AgentLoopManager  # noqa: E402
from xtuner.v1.rl.agent_loop_manager.produce_utils import _TaskRunner  # noqa: E402
from xtuner.v1.rl.agent_loop_manager.producer import AsyncProduceStrategyConfig  # noqa: E402

from buffer.errors import Fenced  # noqa: E402
from buffer.groups.put_groups import prompt_of  # noqa: E402
from buffer.wire import group_bytes  # noqa: E402
from buffer.wire.group import RolloutGroup  # noqa: E402
from rolloutmq.extensions.trainers.xtuner import (  # noqa: E402
    AsyncReplayBufferConfig,
    RunSampler,
    SyncReplayBufferConfig,
)
from rolloutmq.extensions.trainers.xtuner_storage import put_together, taken_apart  # noqa: E402

BATCH, MEMBERS = 3, 2


class Life:
    """One process of the trainer, which dies at the n-th event of a kind."""

    def __init__(self, events: Path, death: tuple[str, int]) -> None:
        self._events, self._death, self._seen = events, death, 0

    def say(self, event: str, **facts: Any) -> None:
        with self._events.open("a") as file:
            file.write(json.dumps({"event": event, **facts}) + "\n")
        self._seen += event == self._death[0]
        if self._death == (event, self._seen):
            os.kill(os.getpid(), signal.SIGKILL)


class Prompts:
    """Stands for XTuner's data loader: prompt n says n."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[list[RolloutState]]:
        while True:
            self.drawn += 1
            yield [
                RolloutState(
                    message=[{"role": "user", "content": str(self.drawn)}], prompt_ids=[self.drawn]
                )
            ]

    def get_state_dict(self) -> dict[str, Any]:
        return {"sampler": {"step": self.drawn, "epoch": 0}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["sampler"]["step"]


async def generate(life: Life, group: list[RolloutState], **_: Any) -> list[RolloutState]:
    """Answer with random tokens; every fifth prompt is interrupted once."""
    await asyncio.sleep(0.01 + secrets.randbelow(20) / 1000)
    for state in group:
        new = [secrets.randbelow(1000) for _ in range(3)]
        state.response_ids = (state.response_ids or []) + new
        state.logprobs = [-0.5] * len(state.response_ids)
        is_first = len(state.response_ids) == 3
        state.status = Status.ABORTED if is_first and state.group_id % 5 == 4 else Status.COMPLETED
        state.reward = {"score": 1.0}
        state.response = "text"
    life.say(
        "made", group=group[0].group_id, status=group[0].status.value, ids=group[0].response_ids
    )
    return group


async def train(url: str, folder: Path, steps: int, life: Life) -> None:
    buffer = AsyncReplayBufferConfig(url=url, run="xtuner").build()
    sampler = RunSampler(Prompts(), MEMBERS, buffer)
    strategy = AsyncProduceStrategyConfig(over_sample_threshold=1.0, max_staleness=3).build()
    loop = MagicMock(generate_group=partial(generate, life), pause=AsyncMock())
    controller = MagicMock()
    controller.continue_generation.remote = controller.pause_generation.remote = AsyncMock()
    manager = AgentLoopManager([_TaskRunner("math:a", loop, strategy, sampler)], buffer, controller)
    weights: list[Any] = []
    done = sorted(int(path.parent.name) for path in folder.glob("*/weights.json"))
    if done:
        weights = json.loads((folder / str(done[-1]) / "weights.json").read_text())
        await manager.resume(folder / str(done[-1]))
    for step in range(done[-1] + 1 if done else 1, steps + 1):
        result = await manager.produce_batch(BATCH, step, model_step=step - 1)
        batch = [(group[0].group_id, group[0].response_ids) for group in result.rollout_states]
        weights += batch
        life.say("trained", step=step, groups=batch)
        if step % 2 == 0:
            checkpoint = folder / str(step)
            await manager.save(checkpoint, model_step=step)
            life.say("buffer", step=step)
            (checkpoint / "part").write_text(json.dumps(weights))
            (checkpoint / "part").rename(checkpoint / "weights.json")
            life.say("saved", step=step)


def run_trainer(url: str, folder: Path, steps: int, death: tuple[str, int] = ("", 0)) -> None:
    asyncio.run(train(url, folder, steps, Life(folder / "events", death)))


def check_that_every_field_survives() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    call = RolloutToolCall(id="c1", function=RolloutFunctionCall(name="add", arguments={"a": 1}))
    whole = RolloutState(
        rollout_id=7,
        group_id=3,
        message=[{"role": "user", "content": "2+2?"}],
        prompt_ids=[1, 2],
        num_tokens=2,
        proxy_attn_flops=0.25,
        session_id=9,
        data_source={"math": 1.0},
        reward_model={"ground_truth": 4},
        tokens=[1, 2],
        mm_info={"pixel_values": array, "image_grid_thw": None, "num_img_tokens": [4]},
        tools=[{"name": "add"}],
        tool_choice="auto",
        tool_calls=[call],
        sample_params=SampleParams(stops=["x"]),
        response="4",
        response_ids=[5, 6, 7],
        logprobs=[-0.1, -0.5, -2.0],
        response_mask=[1, 0, 1],
        response_model_steps=[3, 3, 4],
        routed_experts=array.astype(np.int64),
        finish_reason="stop",
        seq_staleness=2,
        reward={"score": 1.0, "text": "good"},
        task_name="math",
        status=Status.COMPLETED,
        error_msg="none",
        position_ids=array,
        extra_fields={"pair": (1, None), "deep": {"a": [array]}},
    )
    # a segment of an agent: its columns are those of the whole sequence
    segment = RolloutState(message=[], input_ids=[1, 2, 3], labels=[-100, 2, 3], logprobs=[0.1] * 3)
    pictures = RolloutState(message=[{"role": "user", "content": "data:" + "A" * 2_000_000}])
    group = [whole, segment, pictures]
    states = taken_apart(group, {"status": "completed"})
    whole_group = RolloutGroup("math-0000000001", "math", states)
    assert len(group_bytes.encode(prompt_of(whole_group))) < 2**20, "the server takes no more"
    data = group_bytes.encode(whole_group)
    again, record = put_together(group_bytes.decode(bytes(data)).states)
    assert record == {"status": "completed"}
    for made, given in zip(again, group, strict=True):
        np.testing.assert_equal(dict(made), dict(given))


def check_that_a_replaced_trainer_adds_nothing(url: str) -> None:
    def group(number: int) -> list[RolloutState]:
        return [RolloutState(group_id=number, message=[], status=Status.COMPLETED)]

    async def check() -> None:
        old, new = (AsyncReplayBufferConfig(url=url, run="replaced").build() for _ in range(2))
        await old.put(group(1), "math")
        assert await new.count("math", Status.COMPLETED) == 1
        with pytest.raises(Fenced):
            await old.put(group(2), "math")
        # the data set of the new trainer begins anew: it has the first group already
        again = group(1)
        await new.put(again, "math")
        assert again[0].status is Status.FILTERED
        assert await new.count("math", Status.COMPLETED) == 1

    asyncio.run(check())


def run_own_tests(url: str, report: Path) -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    module = load(SOURCES / "tests" / "rl" / "test_replay_buffer.py")
    ours = [
        partial(config, url=url) for config in (SyncReplayBufferConfig, AsyncReplayBufferConfig)
    ]
    names = ("SyncReplayBufferConfig", "AsyncReplayBufferConfig")
    for name, config in zip(names, ours, strict=True):
        setattr(module, name, config)
    vars(module)["REPLAY_BUFFER_CONFIGS"] = list(zip(names, ours, strict=True))
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    with report.open("w") as file:
        result = unittest.TextTestRunner(file).run(suite)
    assert result.testsRun >= 20
    assert result.wasSuccessful()
    assert not result.skipped
