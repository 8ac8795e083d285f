"""miles' data buffer with its groups in a run: finished groups outlive the process that made them.

    REDIS_URL=redis://host:6379/0 ROLLOUTMQ_RUN=my-rl     (in the environment of the Ray job)
    --fully-async --save FOLDER --load FOLDER
    --custom-async-data-buffer-path rolloutmq.extensions.trainers.miles.RunDataBuffer

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
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from miles.rollout.filter_hub.base_types import MetricGatherer, call_dynamic_filter
from miles.rollout.fully_async_data_buffer import DataBuffer, DataBufferInput
from miles.utils.misc import load_function
from miles.utils.types import AdapterRef, RewardSpec, Sample

from buffer.errors import ConfigError, WireError
from buffer.groups.replay_buffer import MAX_READ
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status, VersionSpan
from consumer.handle.async_consumer import AsyncRolloutConsumer

TOKEN_FIELDS = ("rollout_log_probs", "loss_mask", "teacher_log_probs")

NAMED = {"adapter": AdapterRef, "reward_spec": RewardSpec}
"""Fields that are small objects of miles."""

LOST = ("multimodal_inputs", "multimodal_train_inputs", "rollout_indexer_topk")
"""Fields for which a run has no column."""


@dataclass(frozen=True)
class MilesVersions:
    """What miles' weight versions are in the run: it counts from 1 again in each process."""

    first_step: int
    """step of the weights of version 1"""
    interval: int
    """steps between two updates of weights"""
    lineage: str

    def step(self, version: int) -> int:
        """Return the train step after which weights were made."""
        return self.first_step + (version - 1) * self.interval

    def since(self, first_step: int, version: str) -> str:
        """Return the number here of a version of a process that began at `first_step`."""
        return str(max(0, int(version) - (self.first_step - first_step) // self.interval))


def members(group: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each sample with its trajectory: "3", or "3/" where that is a list of samples."""
    for number, item in enumerate(group):
        if isinstance(item, list):
            yield from ((f"{number}/", sample) for sample in item)
        else:
            yield str(number), item


def taken_apart(
    group: Sequence[Any], reward_key: str | None, versions: MilesVersions
) -> list[RolloutState]:
    """Return the rollouts of a group. Raises WireError for a field that has no column."""
    samples = [*members(group)]
    prompts = [each.tokens[: len(each.tokens) - each.response_length] for _, each in samples]
    alike = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False))
    shared = sum(1 for _ in alike)
    states = []
    for index, (session, sample) in enumerate(samples):
        state = _rollout(sample, shared, versions)
        state.index, state.session_id = index, session
        if (reward := sample.reward) is not None:
            state.reward = {"score": float(reward[reward_key] if reward_key else reward)}
        states.append(state)
    return states


def _rollout(sample: Any, prompt: int, versions: MilesVersions) -> RolloutState:
    """Return a sample whose first `prompt` tokens are those of its group's prompt.

    Further tokens of its prompt are response tokens that are not trained.
    """
    fields = sample.to_dict()
    if lost := [name for name in LOST if fields.pop(name) is not None]:
        raise WireError(
            f"sample {sample.index} has {', '.join(lost)}, which a run cannot keep",
            hint="use miles' own buffer for this model",
        )
    tokens, experts = fields.pop("tokens"), fields.pop("rollout_routed_experts")
    given = {name: fields.pop(name) for name in TOKEN_FIELDS}
    fields |= {name: fields[name] and asdict(fields[name]) for name in NAMED}
    fields |= {"first_step": versions.first_step, "label": None}
    fields["given"] = [name for name, values in given.items() if values is not None]
    length = len(tokens) - prompt
    before = length - sample.response_length

    def column(name: str, missing: float) -> list[float]:
        values = [missing] * sample.response_length if given[name] is None else given[name]
        return [0] * before + list(values)

    teacher = given["teacher_log_probs"] is not None
    oldest = sample.oldest_weight_version
    spans = []
    if oldest is not None and length:
        spans = [VersionSpan(0, length, versions.step(oldest), versions.lineage)]
    return RolloutState(
        prompt_ids=tokens[:prompt],
        response=fields.pop("response"),
        response_ids=tokens[prompt:],
        logprobs=column("rollout_log_probs", 0.0),
        response_mask=column("loss_mask", 1),
        teacher_logprobs={"teacher": column("teacher_log_probs", 0.0)} if teacher else None,
        routed_experts=experts,
        spans=spans,
        finish_reason="length" if sample.status is Sample.Status.TRUNCATED else "stop",
        status=Status.COMPLETED,
        ground_truth=sample.label,
        extra=fields,
    )


def put_together(group: RolloutGroup, versions: MilesVersions) -> Any:
    """Return a group with its prompts, as miles' own objects."""
    trajectories: dict[str, list[Any]] = {}
    for state in group.states:
        trajectories.setdefault(str(state.session_id), []).append(_sample(state, versions))
    prompts = [deepcopy(samples[0]) for samples in trajectories.values()]
    for prompt in prompts:
        prompt.reset_for_retry()
    items = [
        samples if session.endswith("/") else samples[0]
        for session, samples in trajectories.items()
    ]
    return DataBufferInput(prompt_group=prompts, group=items)


def _sample(state: RolloutState, versions: MilesVersions) -> Any:
    fields = dict(state.extra)
    first_step = fields.pop("first_step")
    assert state.prompt_ids is not None
    mask = state.response_mask  # None: all ones
    columns: dict[str, Any] = {
        "rollout_log_probs": state.logprobs,
        "loss_mask": np.ones(len(state.response_ids), int) if mask is None else mask,
        "teacher_log_probs": (state.teacher_logprobs or {}).get("teacher"),
    }
    start = len(state.response_ids) - fields["response_length"]
    fields |= {name: columns[name][start:].tolist() for name in fields.pop("given")}
    fields |= {name: fields[name] and kind(**fields[name]) for name, kind in NAMED.items()}
    experts = state.routed_experts
    fields |= {
        "tokens": np.concatenate([state.prompt_ids, state.response_ids]).tolist(),
        "response": state.response,
        "label": state.ground_truth,
        "rollout_routed_experts": None if experts is None else np.asarray(experts, np.int32),
        "weight_versions": [versions.since(first_step, each) for each in fields["weight_versions"]],
    }
    return Sample.from_dict(fields)


def group_index(group: RolloutGroup) -> int | None:
    """Return the number of the prompt's draw in miles' data source."""
    index: int | None = group.states[0].extra["group_index"]
    return index


TASK = "miles"

NONCE = "rolloutmq.nonce"
"""File beside miles' checkpoints; it distinguishes the run from others of its name."""

TRACKER = "latest_checkpointed_iteration.txt"
"""File of the checkpoints' folder with the rollout id of the newest complete one."""

COUNTED = ("aborted_groups_filtered", "stale_groups_filtered", "repeated_groups_dropped")

POLL_S = 0.2  # while the buffer is full


class RunDataBuffer(DataBuffer):  # type: ignore[misc]
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
        states = taken_apart(input.group, self._args.reward_key, self._versions)
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
                deleted = await asyncio.to_thread(run.delete, stale)
                self._counts["stale_groups_filtered"] += deleted
            await self._take()
        return self._groups.popleft()

    def get_metrics(self) -> dict[str, float]:
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
        self._versions = MilesVersions(self._step, args.update_weights_interval, lineage)
        return run

    async def _take(self) -> None:
        batch = await self._consumer.take_batch(
            self._step + 1, {TASK: self._args.rollout_batch_size}
        )
        self._step += 1
        self._seen.update(map(group_index, batch.groups))
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
