"""A process of miles with its own fully-async rollout function; generation and training are tiny.

    python -m tests.extensions.trainers.miles_process FOLDER LAST_ROLLOUT_ID

"Weights" are the list of groups that were trained, so a checkpoint shows which. sglang, which miles
imports for tools and its router, is replaced: nothing here calls it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from tests.extensions.trainers.sources import source_of

SGLANG = (
    *("sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.entrypoints.openai"),
    *("sglang.srt.entrypoints.openai.protocol", "sglang.srt.function_call", "sglang_router"),
    *("sglang.srt.function_call.core_types", "sglang.srt.function_call.function_call_parser"),
)
sys.modules |= {name: MagicMock(__path__=[]) for name in SGLANG}
source_of("MILES", "https://github.com/radixark/miles", "31f1ca961a94cb860cec3b2dea34ec332bfa8f76")

from miles.rollout import fully_async_rollout  # noqa: E402
from miles.rollout.base_types import (  # noqa: E402
    RolloutFnConstructorInput,
    RolloutFnTrainInput,
)
from miles.rollout.data_source import DataSource  # noqa: E402
from miles.utils.types import Sample  # noqa: E402

MEMBERS = 2
TRACKER = "latest_checkpointed_iteration.txt"


def arguments(folder: Path, **changes: Any) -> Namespace:
    given = {
        "rollout_global_dataset": True,
        "rollout_batch_size": 3,
        "n_samples_per_prompt": MEMBERS,
        "num_rollout": 100,
        "start_rollout_id": None,
        "save": str(folder),
        "load": str(folder),
        "reward_key": None,
        "update_weights_interval": 1,
        "max_weight_staleness": None,
        "async_max_concurrent_samples": None,
        "async_data_buffer_capacity_factor": 2.0,
        "async_unused_samples_handler": "retry",
        "custom_async_data_buffer_path": "rolloutmq.extensions.trainers.miles.RunDataBuffer",
        "rollout_submission_granularity": None,
        "dynamic_sampling_filter_path": None,
        "rollout_sample_filter_path": None,
        "eval_num_gpus": 0,
    }
    return Namespace(**(given | changes))


class Prompts(DataSource):  # type: ignore[misc]
    """Numbers the prompts, as miles' data set does, and saves how far it is."""

    def __init__(self, drawn: int) -> None:
        self.drawn = drawn
        self.recycled: list[list[Any]] = []

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        if self.recycled:
            return [self.recycled.pop()]
        group = self.drawn
        self.drawn += 1
        return [
            [
                Sample(group_index=group, index=group * MEMBERS + n, prompt=f"prompt {group}")
                for n in range(MEMBERS)
            ]
        ]

    def add_samples(self, samples: list[list[Any]]) -> None:
        self.recycled.extend(samples)

    def save(self, rollout_id: int) -> None: ...
    def load(self, rollout_id: int | None = None) -> None: ...


class NoEngines:
    def __init__(self, args: Namespace) -> None:
        self.sampling_params: dict[str, Any] = {}


def finish(sample: Any, version: int = 1) -> Any:
    draw = random.Random(sample.index)
    length = draw.randint(1, 5)
    sample.tokens = [7, 8, sample.group_index, *draw.choices(range(100), k=length)]
    sample.response, sample.response_length = "text", length
    sample.rollout_log_probs = [-draw.randint(1, 64) / 16 for _ in range(length)]
    sample.loss_mask = [1] * length
    sample.reward = float(sample.index % 2)
    sample.weight_versions = [str(version)]
    sample.metadata = {"process": os.getpid()}
    sample.status = Sample.Status.COMPLETED
    return sample


async def train(folder: Path, last: int) -> None:
    saved: dict[str, Any] = {"trained": [], "drawn": 0}
    first = 0
    if (folder / TRACKER).exists():
        first = int((folder / TRACKER).read_text()) + 1
        saved = json.loads((folder / f"iter-{first - 1}.json").read_text())
    version = 1

    async def generate(
        state: Any, group: list[Any], sampling_params: Any, evaluation: bool, **more: Any
    ) -> list[Any]:
        await asyncio.sleep(random.random() / 20)
        return [finish(sample, version) for sample in group]

    rollout: Any = fully_async_rollout
    rollout.GenerateState = NoEngines
    rollout.generate_and_rm_group = generate
    prompts = Prompts(saved["drawn"])
    args = arguments(folder)
    rollouts = rollout.FullyAsyncRolloutFn(RolloutFnConstructorInput(args, prompts))
    for rollout_id in range(first, last + 1):
        output = await rollouts(RolloutFnTrainInput(rollout_id=rollout_id, weight_version=version))
        for group in output.samples:
            facts = [
                [each.group_index, each.index, each.tokens, each.rollout_log_probs]
                for each in group
            ]
            saved["trained"].append([group[0].metadata["process"], facts])
        version += 1
        await asyncio.sleep(0.1)
        if rollout_id % 2 == 1:
            saved["drawn"] = prompts.drawn
            (folder / f"iter-{rollout_id}.json").write_text(json.dumps(saved))
            (folder / f".{TRACKER}").write_text(str(rollout_id))
            (folder / f".{TRACKER}").replace(folder / TRACKER)
    os._exit(0)  # as miles' actors end, which nobody closes


if __name__ == "__main__":
    asyncio.run(train(Path(sys.argv[1]), int(sys.argv[2])))
