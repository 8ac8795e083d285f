"""Callbacks for optional features: what a process does with groups. They must not change them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

from buffer.job import Job, ReleaseKind, Result
from buffer.manifest import Manifest
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion


class Observer:
    """Receives the moments of one process: append an instance to `Run.observers`.

    Override the methods that matter. Each is called in the thread that acts, after the server has
    accepted the change, in the order of `Run.observers`. `began_ns` is when the call began, in ns
    since 1970 (`time.time_ns`). An exception reaches the caller, but the change is already made.
    """

    def enqueued(self, samples: Mapping[str, int], began_ns: int) -> None:
        """Receive the number of rollouts of each group that the producer started, by gid."""

    def claiming(self, queues: Sequence[tuple[str, str]], limit: int) -> None:
        """Receive the (task, lane) queues of a claim, before it is made."""

    def claimed(
        self, worker: str, weights: PolicyVersion | None, jobs: Sequence[Job], began_ns: int
    ) -> None:
        """Receive the groups that a worker was given."""

    def generating(
        self, gid: str, rollouts: int, engine: str, weights: PolicyVersion
    ) -> AbstractContextManager[object]:
        """Return a context in which a worker generates and judges one group."""
        return nullcontext()

    def judging(self) -> AbstractContextManager[object]:
        """Return a context, within `generating`, in which a judge answers."""
        return nullcontext()

    def submitted(
        self, worker: str, results: Sequence[Result], outcomes: Sequence[object], began_ns: int
    ) -> None:
        """Receive the results of a worker, and of each its `Stored` or the error."""

    def released(
        self, worker: str, job: Job, kind: ReleaseKind, reason: str, began_ns: int
    ) -> None:
        """Receive a group that a worker gave back without a result."""

    def taken(self, manifest: Manifest, began_ns: int) -> None:
        """Receive the manifest of a batch of the trainer, also when it is taken again."""

    def delivered(
        self, manifest: Manifest, groups: Sequence[RolloutGroup], lineage: str, waited_s: float
    ) -> None:
        """Receive the groups that the trainer gets: all of the batch, or the share of rank 0.

        `lineage`: of the trainer's weights. `waited_s`: how long it waited for them.
        """

    def measured(self, step: int) -> Mapping[str, float]:
        """Return further metrics of a train step that the trainer reports now."""
        return {}

    def reported(self, step: int, metrics: Mapping[str, float], task: str) -> None:
        """Receive the trainer's metrics of a train step, or of an evaluation of `task` after it."""

    def committed(self, step: int, began_ns: int) -> None:
        """Receive the step whose checkpoint is durable."""

    def closed(self) -> None:
        """Receive the end of the process's work; not of one that is killed."""


def all_of(contexts: Iterable[AbstractContextManager[object]]) -> AbstractContextManager[object]:
    """Enter contexts one after another; leave them in the reverse order."""
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack
