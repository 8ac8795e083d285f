"""`RolloutConsumer` for a data-parallel trainer: every rank reads its part of one batch.

Rank 0 is the trainer of the run: it alone takes, commits, pauses. The manifest goes to all ranks as
text (never pickle); each reads the groups that `balanced_shares` gives it by their tokens. A step
is whole or it fails: every rank reports what it could not read, and the checksum of its manifest,
before any of them may train. A rank that cannot read, or dies, fails the step on all ranks; nothing
is committed, and the same step is delivered again, byte for byte (I5).

    consumer.ranks.join()                            # the process group, restarts included
    consumer = ShardedConsumer(run)
    consumer.open(position=position)
    batch = consumer.take_batch(step, {"math": 16})  # this rank's groups, the manifest of all
    train(batch)                                     # gradients over all ranks
    write_my_part(step)
    consumer.confirm(step)                           # waits until every rank has written its part
    consumer.commit(step, keep=step)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from buffer.batches.position import Position
from buffer.control.task_status import ProduceBatchStatus
from buffer.errors import CheckpointNow, Fenced, PayloadMissing, RolloutMQError, WireError
from buffer.model.manifest import Manifest, ManifestEntry
from buffer.rollouts.group import RolloutGroup
from buffer.run import Run
from buffer.store.payloads import checksum
from consumer.batches.batch import Batch, Stopped
from consumer.batches.content_check import check_content
from consumer.batches.outlook import status_of_taken
from consumer.ranks import Ranks, balanced_shares
from consumer.rollout_consumer import RolloutConsumer


class StepFailed(RolloutMQError):
    """A rank could not do its part of a step, which is not committed and is delivered again."""


SHARED_ERRORS: Mapping[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointNow, Fenced, Stopped, TimeoutError)
}
"""Errors of rank 0 that every rank raises as they are, since the caller can act on them."""

GROUPS_TIMEOUT = timedelta(hours=12)
"""How long ranks wait for rank 0, which waits for groups. A rank that dies is noticed at once."""


class ShardedConsumer:
    """Represents one rank of a data-parallel trainer.

    All ranks call the same methods in the same order. `group`: a gloo group of all ranks (default:
    a new one); the gradients may use another backend.
    """

    def __init__(self, run: Run, group: dist.ProcessGroup | None = None) -> None:
        self._run = run
        self.ranks = Ranks(group or dist.new_group(backend="gloo", timeout=GROUPS_TIMEOUT))
        self.leader = RolloutConsumer(run, prefetch_bytes=0) if self.ranks.rank == 0 else None
        """on rank 0 only, the trainer of the run: to pause, publish_weights, evaluate"""
        self.vocabulary: int | None = None
        """number of the model's token ids; None: ids are not compared with it"""

    def open(
        self, *, position: Position | None = None, take_over: bool = False, regenerate: bool = False
    ) -> None:
        """Make rank 0 the trainer of the run; see `RolloutConsumer.open`."""

        def open_it() -> None:
            assert self.leader
            self.leader.open(
                position=position or Position(), take_over=take_over, regenerate=regenerate
            )

        self._on_leader(open_it)

    def close(self) -> None:
        """Give up the role."""
        if self.leader:
            self.leader.close()

    def take_batch(
        self,
        step: int,
        counts: Mapping[str, int],
        *,
        deadline_s: float | None = None,
        strict: bool = True,
    ) -> Batch:
        """Return this rank's part of step `step`, with the manifest of the whole batch.

        A group that some rank cannot read or train is quarantined, another one awaited, and the
        batch shared out again. Raises StepFailed on all ranks if one of them fails otherwise, or if
        the ranks do not have the same manifest.
        """

        def take() -> tuple[list[str], list[int], float, str]:
            assert self.leader
            started = time.monotonic()
            manifest = self.leader.take_manifest(step, counts, strict=strict, deadline_s=deadline_s)
            status = status_of_taken(self._run, step).value
            return manifest.lines, self._tokens(manifest), time.monotonic() - started, status

        lines, tokens, waited_s, status = self._on_leader(take)
        while True:
            manifest = Manifest.parse(step, lines)
            groups, problems = self._read_share(
                manifest, balanced_shares(tokens, self.ranks.size)[self.ranks.rank]
            )
            bad = self._agree(manifest, problems)
            if not bad:
                return Batch(step, groups, manifest, waited_s, ProduceBatchStatus(status))
            lines, tokens = self._on_leader(partial(self._quarantine, step, bad))

    def confirm(self, step: int) -> None:
        """Wait until all ranks have written their parts of the checkpoint of `step`.

        Then rank 0 may make it visible and commit. If a rank failed or died, all ranks raise
        StepFailed, or the error of the broken connection.
        """
        steps = self.ranks.gather(step)
        if any(found != step for found in steps):
            raise StepFailed(
                f"the ranks are at different steps: {steps}",
                hint="restart from the last checkpoint",
            )

    def commit(self, step: int, *, keep: int) -> None:
        """Commit `step`, whose checkpoint is complete and visible; see `RolloutConsumer.commit`."""

        def commit() -> None:
            assert self.leader
            self.leader.commit(step, keep=keep)

        self._on_leader(commit)

    # -- shares --------------------------------------------------------------------------

    def _tokens(self, manifest: Manifest) -> list[int]:
        """Return the generated tokens of each group by its record, or its bytes if it has none."""
        records = [self._run.keys.group(entry.gid) for entry in manifest.entries]
        found: list[Any] = self._run.store.each(
            "tokens", [("HGET", key, "tokens") for key in records], "control"
        )
        return [
            int(n or entry.payload.size) for n, entry in zip(found, manifest.entries, strict=True)
        ]

    def _read_share(
        self, manifest: Manifest, share: list[int]
    ) -> tuple[list[RolloutGroup], dict[str, str]]:
        """Read the groups at these positions; else return why not, by gid.

        The reason under the gid '' is one that quarantine does not remove.
        """
        entries = tuple(manifest.entries[position] for position in share)
        try:
            # the header of the whole batch: it defines which tokens are masked
            groups = self._run.buffer.load(Manifest(manifest.step, manifest.header, entries))
        except (WireError, PayloadMissing):
            return [], self._find_bad(entries)
        except RolloutMQError as error:
            return [], {"": f"{type(error).__name__}: {error}"}
        return groups, self._find_untrainable(groups)

    def _find_bad(self, entries: Sequence[ManifestEntry]) -> dict[str, str]:
        problems = {}
        for entry in entries:
            try:
                self._run.buffer.read(entry.payload)
            except RolloutMQError as error:
                problems[entry.gid] = f"{type(error).__name__}: {error}"
        return problems or {"": "a group could not be read at first, but can be now"}

    def _find_untrainable(self, groups: Sequence[RolloutGroup]) -> dict[str, str]:
        problems = {}
        for group in groups:
            try:
                check_content(group, self.vocabulary)
            except WireError as error:
                problems[group.gid] = f"{type(error).__name__}: {error}"
        return problems

    def _quarantine(self, step: int, bad: Mapping[str, str]) -> tuple[list[str], list[int]]:
        assert self.leader
        manifest = self.leader.quarantine(step, bad)
        return manifest.lines, self._tokens(manifest)

    # -- agreement -----------------------------------------------------------------------

    def _agree(self, manifest: Manifest, problems: dict[str, str]) -> dict[str, str]:
        """Return the unreadable groups of all ranks by gid, with the reasons.

        Raises StepFailed for any other problem.
        """
        content = checksum("\n".join(manifest.lines).encode())
        reports = self.ranks.gather({"content": content, "problems": problems})
        if len({report["content"] for report in reports}) > 1:
            raise StepFailed(f"step {manifest.step}: the ranks have different manifests: {reports}")
        all_problems = {
            gid: reason for report in reports for gid, reason in report["problems"].items()
        }
        if "" in all_problems:
            raise StepFailed(
                f"step {manifest.step}: {all_problems['']}",
                hint="take the step again; it is unchanged",
            )
        return all_problems

    def _on_leader(self, act: Callable[[], Any]) -> Any:
        """Call `act` on rank 0; return its result, or raise its error, on all ranks."""
        answer: dict[str, Any] = {}
        error: Exception | None = None
        if self.leader:
            try:
                answer = {"value": act()}
            except Exception as raised:
                error = raised
                answer = {"error": type(raised).__name__, "reason": str(raised)}
        answer = self.ranks.gather(answer)[0]
        if error:
            # after the exchange: the other ranks wait for it
            raise error
        if "error" in answer:
            kind = SHARED_ERRORS.get(answer["error"], StepFailed)
            raise kind(f"rank 0: {answer['error']}: {answer['reason']}")
        return answer["value"]
