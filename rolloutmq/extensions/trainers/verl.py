"""verl's fully-async message queue on a run: the queue outlives the job, and drops nothing.

Start verl with this module in place of `verl.experimental.fully_async_policy.fully_async_main`:

    python -m rolloutmq.extensions.trainers.verl … \
        +rolloutmq.server=redis://host:6379 +rolloutmq.run=mine

A sample is a group of task `verl`, and a step of verl's trainer is a step of the run: the first
`get_sample` of a step takes its whole batch. It is committed at the first `get_sample` after verl's
checkpoint. When the job is started again, samples after the checkpoint are delivered again, in the
same order. Nothing in the store is a pickle: verl's own two calls of cloudpickle, around
`put_sample` and `get_sample`, are undone and made again in the process that calls.

Ids, masks, logprobs, rewards and versions of a sample are columns of the group. All else is in
`extra`, with the tensors that the columns do not give back bit by bit; padding is not stored.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from buffer.control.control import Mode
from buffer.errors import WireError
from buffer.run.run import Run
from buffer.wire.rollout import RolloutState, Status, VersionSpan, no_tokens
from rolloutmq.extensions.trainers import plain_values
from rolloutmq.extensions.trainers.verl_steps import TASK, VALIDATION, MessageQueue, TrainerSteps

KEY = "verl"
"""In `extra`: all of a sample that has no field of a rollout, as `plain_values` encodes it."""


def states_of(sample: Any, sync: int, lineage: str) -> list[RolloutState]:
    """Return the rollouts of a sample; verl counts its weights in `sync` steps.

    Raises WireError, with its name, for a field that is missing or cannot be encoded.
    """
    data = sample.full_batch
    # the tokens of an answer can be of several weights, of which verl keeps the first and the last
    weights = _column(data.non_tensor_batch, "min_global_steps").tolist()
    if None in weights:
        raise WireError("RolloutSample.full_batch: min_global_steps has None: the engine sets none")
    prompts, answers, attention, trained, logprobs = (
        _column(data.batch, name).cpu().numpy()
        for name in ("prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs")
    )
    scores = data.batch["rm_scores"].sum(1).tolist() if "rm_scores" in data.batch else None
    width = prompts.shape[1]
    is_read = attention.astype(bool)
    # a group has one prompt; rows with another one are stored as tensors, too
    prompt = prompts[0][is_read[0, :width]]
    states = []
    for n, row in enumerate(answers):
        length = int(is_read[n, width:].sum())
        states.append(
            RolloutState(
                index=n,
                status=Status.COMPLETED,
                prompt_ids=prompt,
                response_ids=row[:length],
                response_mask=trained[n, :length],
                logprobs=logprobs[n, :length],
                spans=[VersionSpan(0, length, sync * weights[n], lineage)] if length else [],
                reward={"score": scores[n]} if scores else None,
                finish_reason="length" if length == len(row) else "stop",
            )
        )
    is_padding = ~is_read[:, :width]
    shape = [width, answers.shape[1], int(prompts[is_padding][0]) if is_padding.any() else 0]
    rebuilt = _tensors(states, *shape)
    rest = {
        "shape": shape,
        "epoch": sample.epoch,
        "batch": {
            name: None if name in rebuilt and _same(tensor, rebuilt[name]) else tensor
            for name, tensor in data.batch.items()
        },
        "non_tensor_batch": data.non_tensor_batch,
        "meta_info": data.meta_info,
        "rollout_status": sample.rollout_status,
    }
    encoded = plain_values.encode(rest, "RolloutSample")
    for state in states:
        state.extra = {"sample_id": sample.sample_id, KEY: encoded}
    return states


def sample_of(states: Sequence[RolloutState]) -> Any:
    """Return the sample that `states_of` took apart. Raises WireError."""
    from tensordict import TensorDict
    from verl import DataProto
    from verl.experimental.fully_async_policy.detach_utils import RolloutSample

    rest = plain_values.decode(states[0].extra[KEY])
    rebuilt = _tensors(states, *rest["shape"])
    batch = {
        name: rebuilt[name] if tensor is None else tensor for name, tensor in rest["batch"].items()
    }
    data = DataProto(
        TensorDict(batch, batch_size=len(states)), rest["non_tensor_batch"], rest["meta_info"]
    )
    sample_id = states[0].extra["sample_id"]
    return RolloutSample(data, sample_id, rest["epoch"], rest["rollout_status"])


def _column(batch: Any, name: str) -> Any:
    if batch is None or name not in batch:
        raise WireError(
            f"RolloutSample.full_batch has no {name}",
            hint="set actor_rollout_ref.rollout.calculate_log_probs=True, as the fully-async "
            "trainer needs it",
        )
    return batch[name]


def _tensors(states: Sequence[RolloutState], width: int, longest: int, pad: int) -> dict[str, Any]:
    """Return the tensors of verl's batch that follow from the columns, padded as verl does."""
    import torch

    count = len(states)
    prompt = no_tokens() if states[0].prompt_ids is None else states[0].prompt_ids
    start = width - len(prompt)
    prompts = np.full((count, width), pad, "<i8")
    answers = np.full((count, longest), pad, "<i8")
    attention = np.zeros((count, width + longest), "<i8")
    trained = np.zeros((count, longest), "<i8")
    logprobs, scores = np.zeros((2, count, longest), "<f4")
    for n, state in enumerate(states):
        end = len(state.response_ids)
        prompts[n, start:] = prompt
        answers[n, :end] = state.response_ids
        attention[n, start : width + end] = 1
        trained[n, :end] = 1 if state.response_mask is None else state.response_mask
        logprobs[n, :end] = state.logprobs
        scores[n, end - 1] = (state.reward or {}).get("score", 0.0)
    arrays = {
        "prompts": prompts,
        "responses": answers,
        "input_ids": np.concatenate([prompts, answers], 1),
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(1) - 1, 0),
        "response_mask": trained,
        "rollout_log_probs": logprobs,
        "rm_scores": scores,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _same(tensor: Any, rebuilt: Any) -> bool:
    return tensor.dtype == rebuilt.dtype and bool(tensor.equal(rebuilt))


class MessageQueueClient:
    """Replaces verl's client: the same methods. One process puts, and one gets."""

    def __init__(self, queue_actor: MessageQueue) -> None:
        self.queue_actor = queue_actor
        self._putting = threading.Lock()
        self._getting = threading.Lock()
        self._given: deque[Any] = deque()  # samples of the step that are still to be returned

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray copies the client: each process opens its own connections
        return MessageQueueClient, (self.queue_actor,)

    @cached_property
    def _run(self) -> Run:
        return self.queue_actor.open()

    @cached_property
    def _steps(self) -> TrainerSteps:
        return TrainerSteps(self._run, self.queue_actor)

    async def put_sample(self, sample: Any) -> bool:
        """Store a sample; None ends the run. Returns True, and never waits for the trainer.

        verl's rollouter reads the size of the queue, and starts nothing while it is full. It waits
        for its samples under the lock that the trainer needs before its next `get_sample`, so that
        a put that waited for the trainer would wait forever. Raises Fenced once another job has
        opened the run, and WireError for a sample that cannot be stored.
        """
        await asyncio.to_thread(self._put, sample)
        return True

    def _put(self, sample: Any) -> None:
        run, queue = self._run, self.queue_actor
        # the rollouter of a job that was killed may still be alive
        weights = run.control.renew_role("producer", queue.job).weights
        if sample is None:
            run.control.set_mode("operator", Mode.FINISH)
            return
        value = _unpickled(sample)
        states = states_of(value, queue.sync, weights.lineage)
        for state in states:
            state.extra["pickled"] = value is not sample
        with self._putting:
            run.buffer.put(TASK, [states])

    async def get_sample(self) -> tuple[Any, int]:
        """Return the next sample and the number left, or (None, 0) once the rollouter has ended."""
        return await asyncio.to_thread(self.get_sample_sync)

    def get_sample_sync(self) -> tuple[Any, int]:
        with self._getting:
            if not self._given:
                self._given.extend(self._steps.take())
            if not self._given:
                return None, 0
            states = self._given.popleft().states
            sample = sample_of(states)
            given = _pickled(sample) if states[0].extra["pickled"] else sample
            return given, self.get_queue_size_sync()

    async def put_validate(self, data: Any) -> None:
        value = _unpickled(data)
        extra = {KEY: plain_values.encode(value, "data"), "pickled": value is not data}
        state = RolloutState(status=Status.COMPLETED, extra=extra)
        await asyncio.to_thread(self._run.buffer.put, VALIDATION, [[state]], ageless=True)

    def get_validate_sync(self) -> Any | None:
        """Return the next result of a validation; None without one."""
        groups = self._run.buffer.get(1, VALIDATION)
        if not groups or not self._run.delete(groups[0].gid):
            return None
        extra = groups[0].shared.extra
        value = plain_values.decode(extra[KEY])
        return _pickled(value) if extra["pickled"] else value

    async def get_queue_size(self) -> int:
        return await asyncio.to_thread(self.get_queue_size_sync)

    def get_queue_size_sync(self) -> int:
        return len(self._given) + self._run.buffer.count(TASK)

    async def get_statistics(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.get_statistics_sync)

    def get_statistics_sync(self) -> dict[str, Any]:
        found = next(task for task in self._run.account.totals().tasks if task.task == TASK)
        trained = found.taken + found.archived
        return {
            "queue_size": found.completed + len(self._given),
            "total_produced": found.put,
            "total_consumed": trained - len(self._given),
            "dropped_samples": found.put - found.completed - trained,
            "max_queue_size": self.queue_actor.max_queue_size,
        }

    async def get_memory_usage(self) -> dict[str, Any]:
        held = (await asyncio.to_thread(self._run.memory.count)).held
        return {
            "queue_samples": await self.get_queue_size(),
            "estimated_memory_bytes": held,
            "estimated_memory_mb": held / 2**20,
        }

    async def clear_queue(self) -> None:
        """Keep all samples: verl calls this at the end of each job, and also after its failure."""

    async def shutdown(self) -> None:
        """End the run for its trainer, too, until the job is started again."""
        await self.put_sample(None)
        # a cached property: it has no value in a process that got nothing
        if steps := vars(self).get("_steps"):
            steps.close()


def _unpickled(value: Any) -> Any:
    """Return what the caller's own process has just pickled: its rollouter puts such bytes."""
    if type(value) is not bytes:
        return value
    import ray

    return ray.cloudpickle.loads(value)


def _pickled(value: Any) -> bytes:
    """Return `value` as verl's trainer expects it, for the process that unpickles it next."""
    import ray

    data: bytes = ray.cloudpickle.dumps(value)
    return data


def main() -> None:
    import ray
    from verl.experimental.fully_async_policy import fully_async_main as verl_main

    class RunTaskRunner(verl_main.FullyAsyncTaskRunner.__ray_actor_class__):  # type: ignore[misc]
        def _initialize_components(self, config: Any) -> None:
            # Ray sends the class with a copy of its module's names
            names = super()._initialize_components.__globals__
            names.update(MessageQueue=MessageQueue, MessageQueueClient=MessageQueueClient)
            super()._initialize_components(config)

    verl_main.FullyAsyncTaskRunner = ray.remote(num_cpus=1)(RunTaskRunner)
    verl_main.main()


if __name__ == "__main__":
    from rolloutmq.extensions.trainers import verl

    verl.main()  # classes of `__main__` could not be found by other processes
