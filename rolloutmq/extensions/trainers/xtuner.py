"""XTuner v1's `ReplayBuffer` with its groups in a run: a trainer that dies keeps them.

A config of XTuner names the classes of this module in place of its own; the loop is unchanged:

    from rolloutmq.extensions.trainers.xtuner import AsyncReplayBufferConfig, SamplerConfig

    replay_buffer_config = AsyncReplayBufferConfig(url="redis://host:6379/0", run="my-rl")
    sampler_config = SamplerConfig(dataloader_cfg=…, prompt_repeat_k=8)  # optional, see below

Kept: every completed and aborted group, from `put` on, with all fields of its `RolloutState`s and
the contents of Ray's object references. XTuner's checkpoint says which groups its weights have
seen. After a crash, those are not trained again, and all others are in the buffer. The data set
then gives prompts again whose groups are there: `put` discards the second one, and `SamplerConfig`
skips such a prompt before anything is generated for it.

Not kept: groups that failed, or that were being generated, since XTuner draws their prompts again;
and unfinished groups of prompts that were drawn after the checkpoint. As in XTuner, the trainer
also has all groups in its memory, where XTuner's own code decides their order and staleness.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
from xtuner.v1.data_proto.rl_data import RolloutState as XTunerState
from xtuner.v1.data_proto.rl_data import Status as XTunerStatus
from xtuner.v1.rl import replay_buffer as theirs
from xtuner.v1.rl.agent_loop_manager import sampler as their_sampler
from xtuner.v1.rl.rollout.trace_store import release_and_discard_rollout_groups

from rolloutmq.extensions.trainers.xtuner_storage import FILE, RunStorage


class RunReplayBuffer(theirs.ReplayBuffer):  # type: ignore[misc]
    """XTuner's buffer on a run."""

    def repeats(self, task: str, group: list[XTunerState]) -> bool:
        """Return whether a trainer that died had completed a group of this draw; True once."""
        drawn = (task, group[0].group_id)
        is_known = drawn in self._storage.repeated
        self._storage.repeated.discard(drawn)
        return is_known

    async def put(self, items: list[XTunerState], task_name: str, **options: Any) -> None:
        """Add a group; one that is here already becomes FILTERED, and XTuner makes another."""
        async with self._lock:
            await asyncio.to_thread(self._storage.opened)
        if items and self.repeats(task_name, items):
            await release_and_discard_rollout_groups([items])
            for item in items:
                item.status = XTunerStatus.FILTERED
        else:
            await super().put(items, task_name, **options)

    async def save(self, path: str | Path) -> None:
        async with self._lock:
            await asyncio.to_thread(self._storage.save, Path(path), type(self._policy).__name__)

    async def resume(self, path: str | Path) -> None:
        if len(self) > 0:
            raise RuntimeError("Cannot resume into a non-empty buffer")
        saved = orjson.loads((Path(path) / FILE).read_bytes())
        if saved["policy"] != type(self._policy).__name__:
            raise ValueError(f"the checkpoint has the policy {saved['policy']}")
        async with self._lock:
            await asyncio.to_thread(self._storage.open, saved)


class SyncReplayBufferConfig(theirs.SyncReplayBufferConfig):  # type: ignore[misc]
    """`url` of the server; `run`: a name, by which a trainer finds its groups without a checkpoint.

    Without a name, only a checkpoint finds them.
    """

    url: str
    run: str = ""

    def build(self) -> RunReplayBuffer:
        return RunReplayBuffer(theirs.FIFOReplayPolicy(), RunStorage(self.url, self.run))


class AsyncReplayBufferConfig(theirs.AsyncReplayBufferConfig):  # type: ignore[misc]
    """As `SyncReplayBufferConfig`; the stalest groups are taken first."""

    url: str
    run: str = ""

    def build(self) -> RunReplayBuffer:
        return RunReplayBuffer(theirs.StalenessReplayPolicy(), RunStorage(self.url, self.run))


class RunSampler(their_sampler.Sampler):  # type: ignore[misc]
    """XTuner's sampler without the prompts whose groups are in the buffer already."""

    async def sample(
        self, task_name: str, group_status: list[XTunerStatus] | None = None
    ) -> list[XTunerState]:
        while True:
            group: list[XTunerState] = await super().sample(task_name, group_status)
            is_new = group[0].status is XTunerStatus.INIT
            if not (is_new and self.replay_buffer.repeats(task_name, group)):
                return group


class SamplerConfig(their_sampler.SamplerConfig):  # type: ignore[misc]
    """XTuner's `SamplerConfig`, for a `RunReplayBuffer`."""

    def build(self, tokenizer: Any, replay_buffer: RunReplayBuffer) -> RunSampler:
        made = super().build(tokenizer, replay_buffer)
        return RunSampler(made.dataloader, made.prompt_repeat_k, replay_buffer)
