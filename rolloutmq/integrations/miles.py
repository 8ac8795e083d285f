"""miles' data buffer with its groups in a run: finished groups outlive the process that made them.

    REDIS_URL=redis://host:6379/0 ROLLOUTMQ_RUN=my-rl     (in the environment of the Ray job)
    --fully-async --save FOLDER --load FOLDER
    --custom-async-data-buffer-path rolloutmq.integrations.miles.RunDataBuffer

The buffer lives in miles' RolloutManager, and takes a batch of the run for each rollout id. A step
is committed once miles' checkpoint of it is complete, as its tracker file says.

the process dies                            the next one
  before `put` has returned                 draws and generates the prompt again
  after that, before the group is trained   gets the group, and drops a second one of its prompt
  before the checkpoint of its step         gets the batch of the step again
"""

from __future__ import annotations

import asyncio
import os
import secrets
from argparse import Namespace
from collections import Counter, deque
from pathlib import Path
from typing import Any

from miles.rollout.filter_hub.base_types import MetricGatherer, call_dynamic_filter
from miles.rollout.fully_async_data_buffer import DataBuffer
from miles.utils.misc import load_function
from miles.utils.types import Sample

from buffer.errors import ConfigError
from buffer.groups.pools import MAX_READ
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from buffer.run import Run
from consumer.handle.async_consumer import AsyncRolloutConsumer
from rolloutmq.integrations import miles_samples
from rolloutmq.integrations.miles_samples import Versions, group_index, members

TASK = "miles"

NONCE = "rolloutmq.nonce"
"""File beside miles' checkpoints; it distinguishes the run from others of its name."""

TRACKER = "latest_checkpointed_iteration.txt"
"""File of the checkpoints' folder with the rollout id of the newest complete one."""

COUNTED = ("aborted_groups_filtered", "stale_groups_filtered", "repeated_groups_dropped")

POLL_S = 0.2  # while the buffer is full


class RunDataBuffer(DataBuffer):  # type: ignore[misc]
    """Groups of one run."""

    def __init__(self, input: Any) -> None:
        self._args: Namespace = input.args
        self._handle_unused = input.unused_handler_fn
        self._filter = load_function(self._args.dynamic_sampling_filter_path)
        self._filtered = MetricGatherer()
        self._counts = Counter[str]()
        self._groups: deque[Any] = deque()
        self._seen: set[int | None] = set()
        self._opening = asyncio.Lock()
        self._run: Run | None = None

    async def put(self, input: Any) -> None:
        """Add a group to the run; wait while it holds as many as it may."""
        run = await self._opened()
        samples = [sample for _, sample in members(input.group)]
        if any(sample.status is Sample.Status.ABORTED for sample in samples):
            self._counts["aborted_groups_filtered"] += 1
            self._handle_unused(input.prompt_group)
            return
        verdict = call_dynamic_filter(self._filter, self._args, input.group)
        if not verdict.keep:
            self._filtered.on_dynamic_filter_drop(reason=verdict.reason)
            return
        if samples[0].group_index in self._seen:
            self._counts["repeated_groups_dropped"] += 1
            return
        states = miles_samples.taken_apart(input.group, self._args.reward_key, self._versions)
        most = int(self._args.async_data_buffer_capacity_factor * self._args.rollout_batch_size)
        while await asyncio.to_thread(run.buffer.count, TASK) >= most:
            await asyncio.sleep(POLL_S)
        await asyncio.to_thread(run.buffer.put, TASK, [states], ageless=True, retryable=False)

    async def get(self, current_version: int | None = None, **context: Any) -> Any:
        """Return the next group; before the first of a batch, drop stale ones and take it."""
        run = await self._opened()
        if not self._groups:
            await self._commit()
            if current_version is not None and self._args.max_weight_staleness is not None:
                oldest = self._versions.step(current_version - self._args.max_weight_staleness)
                stale = {"stage": "pool", "version": {"$lt": oldest}}
                deleted = await asyncio.to_thread(run.buffer.delete, stale)
                self._counts["stale_groups_filtered"] += deleted
            await self._take()
        return self._groups.popleft()

    def get_metrics(self) -> dict[str, float]:
        """Return what happened since the last call."""
        found = {name: float(self._counts.pop(name, 0)) for name in COUNTED}
        found["queue_size"] = float(self._run.buffer.count(TASK)) if self._run else 0.0
        metrics = {f"rollout/fully_async/{name}": value for name, value in found.items()}
        metrics.update(self._filtered.collect())
        self._filtered = MetricGatherer()
        return metrics

    async def _opened(self) -> Run:
        async with self._opening:
            if self._run is None:
                run = await asyncio.to_thread(self._open)
                waiting = await asyncio.to_thread(run.buffer.get, MAX_READ, TASK)
                self._seen.update(map(group_index, waiting))
                while self._step < run.ledger.steps()[0]:
                    await self._take()  # what the dead process had taken
                self._run = run
            return self._run

    def _open(self) -> Run:
        args = self._args
        if not args.save:
            raise ConfigError("miles has no folder for checkpoints", hint="give it --save FOLDER")
        first = args.start_rollout_id
        self._step = self._committed = _saved_steps(args.load) if first is None else int(first)
        file = Path(args.save) / NONCE
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(secrets.token_hex(16), encoding="utf-8")
        limits = RunLimits(
            steps=max(args.num_rollout, self._step + 1),
            batch_size=args.rollout_batch_size,
            tasks={TASK: TaskLimits()},
            order="fifo",
            stale_threshold=10**9,  # miles' own versions decide, in `get`
        )
        store = Store(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0"), name="miles")
        name = os.environ.get("ROLLOUTMQ_RUN", TASK)
        run = Run.create(store, name, file.read_text(encoding="utf-8"), limits)
        self._consumer = AsyncRolloutConsumer(run)
        self._consumer.blocking.producer_timeout_s = None  # miles itself generates
        self._consumer.blocking.open(self._step, take_over=True)
        lineage = self._consumer.blocking.lineage
        self._versions = Versions(self._step, args.update_weights_interval, lineage)
        return run

    async def _take(self) -> None:
        batch = await self._consumer.take_batch(
            self._step + 1, {TASK: self._args.rollout_batch_size}
        )
        self._step += 1
        self._seen.update(map(group_index, batch.groups))
        put_together = miles_samples.put_together
        self._groups.extend(put_together(group, self._versions) for group in batch.groups)

    async def _commit(self) -> None:
        """Commit the steps of miles' newest complete checkpoint."""
        saved = min(_saved_steps(self._args.save), self._step)
        if saved > self._committed:
            await self._consumer.commit(saved, keep=saved)
            self._committed = saved


def _saved_steps(folder: str | None) -> int:
    """Return how many rollout ids the newest checkpoint in a folder has trained."""
    tracker = Path(folder or "") / TRACKER
    return int(tracker.read_text(encoding="utf-8")) + 1 if folder and tracker.exists() else 0
