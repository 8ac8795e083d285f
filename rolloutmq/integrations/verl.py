"""verl's fully-async message queue on a run: the queue outlives the job, and drops nothing.

Start verl with this module in place of `verl.experimental.fully_async_policy.fully_async_main`:

    python -m rolloutmq.integrations.verl … +rolloutmq.server=redis://host:6379 +rolloutmq.run=mine

A sample is a group of task `verl`, and a step of verl's trainer is a step of the run: the first
`get_sample` of a step takes its whole batch. It is committed at the first `get_sample` after verl's
checkpoint. When the job is started again, samples after the checkpoint are delivered again, in the
same order. Nothing in the store is a pickle: verl's own two calls of cloudpickle, around
`put_sample` and `get_sample`, are undone and made again in the process that calls.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from functools import cached_property
from typing import Any

from buffer.control.control import Mode
from buffer.run import Run
from buffer.wire.rollout import RolloutState, Status
from rolloutmq.integrations import plain_values
from rolloutmq.integrations.verl_samples import KEY, sample_of, states_of
from rolloutmq.integrations.verl_steps import TASK, VALIDATION, MessageQueue, TrainerSteps


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
        """Store what a validation returned."""
        value = _unpickled(data)
        extra = {KEY: plain_values.encode(value, "data"), "pickled": value is not data}
        state = RolloutState(status=Status.COMPLETED, extra=extra)
        await asyncio.to_thread(self._run.buffer.put, VALIDATION, [[state]], ageless=True)

    def get_validate_sync(self) -> Any | None:
        """Return the next result of a validation; None without one."""
        groups = self._run.buffer.get(1, VALIDATION)
        if not groups or not self._run.buffer.delete(groups[0].gid):
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
    """Run verl's fully-async trainer with this queue."""
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
    from rolloutmq.integrations import verl

    verl.main()  # classes of `__main__` could not be found by other processes
