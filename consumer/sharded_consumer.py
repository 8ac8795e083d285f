"""`RolloutConsumer` for a data-parallel trainer: one batch, of which every rank reads its share
only.

Rank 0 is the trainer of the run: it alone takes, commits, pauses. The manifest goes to all ranks as
text (never pickle); each reads the groups that `balanced_shares` gives it by their tokens. A step
is whole or it fails: every rank says what it read, and with what checksum of the manifest, before
any of them may train. Whoever cannot read, or dies, fails the step on all ranks; nothing is
committed, and the same step is delivered again, byte for byte (I5).

    consumer.ranks.join()                                # the process group of torchrun, restarts included
    consumer = ShardedConsumer(run)
    consumer.open(position=position)
    batch = consumer.take_batch(step, {"math": 16})      # this rank's groups; batch.manifest is the whole batch's
    train(batch)                                         # gradients over all ranks
    write_my_part(step); consumer.confirm(step)          # until every rank has; then rank 0 makes it visible
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
from buffer.model.group import RolloutGroup
from buffer.model.manifest import Manifest, ManifestEntry
from buffer.run import Run
from buffer.store.payloads import checksum
from consumer.batches.batch import Batch, Stopped
from consumer.batches.outlook import status_of_taken
from consumer.ranks import Ranks, balanced_shares
from consumer.rollout_consumer import RolloutConsumer


class StepFailed(RolloutMQError):
    """A rank could not do its part of a step. The step is not committed, and will be delivered
    again.
    """


TOLD: Mapping[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointNow, Fenced, Stopped, TimeoutError)
}
"""What rank 0 meets and the others can act upon: raised there as it is."""

PATIENCE = timedelta(hours=12)
"""How long ranks wait for rank 0, which waits for groups. A rank that dies is noticed at once."""


class ShardedConsumer:
    """One rank of a data-parallel trainer; all ranks call the same methods in the same order.

    `group`: of all of them, with gloo (default: made anew), whatever the gradients travel by.
    """

    def __init__(self, run: Run, group: dist.ProcessGroup | None = None) -> None:
        self._run = run
        self.ranks = Ranks(group or dist.new_group(backend="gloo", timeout=PATIENCE))
        self.leader = RolloutConsumer(run, prefetch_bytes=0) if self.ranks.rank == 0 else None
        """on rank 0: the trainer of the run, for what one rank does (pause, publish_weights,
        evaluate)
        """

    def open(
        self, *, position: Position | None = None, take_over: bool = False, regenerate: bool = False
    ) -> None:
        """Rank 0 becomes the trainer of the run; see `RolloutConsumer.open`."""

        def open_it() -> None:
            assert self.leader
            self.leader.open(
                position=position or Position(), take_over=take_over, regenerate=regenerate
            )

        self._on_leader(open_it)

    def close(self) -> None:
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
        """This rank's share of step `step`; `manifest` is that of the whole batch, the same on all
        ranks.

        A group that some rank cannot read is put aside, another one awaited, and the batch shared
        out anew. Raises StepFailed on all ranks when one of them fails otherwise, or the ranks do
        not hold the same manifest.
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
            lines, tokens = self._on_leader(partial(self._put_aside, step, bad))

    def confirm(self, step: int) -> None:
        """All ranks have written their parts of the checkpoint of `step`: rank 0 may make it
        visible, then commit.

        A rank that failed or died fails it on all: StepFailed, or the error of the broken
        connection.
        """
        said = self.ranks.say({"step": step})
        if any(answer["step"] != step for answer in said):
            raise StepFailed(
                f"the ranks are at different steps: {said}", hint="restart from the last checkpoint"
            )

    def commit(self, step: int, *, keep: int) -> None:
        """The checkpoint of `step` is whole and visible; see `RolloutConsumer.commit`."""

        def commit() -> None:
            assert self.leader
            self.leader.commit(step, keep=keep)

        self._on_leader(commit)

    # -- shares ----------------------------------------------------------------

    def _tokens(self, manifest: Manifest) -> list[int]:
        """Generated tokens of each group, as its record says; its bytes where it has none."""
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
        """The groups at these places; or, by gid, why one cannot be read. '' is what no quarantine
        helps against.
        """
        entries = tuple(manifest.entries[place] for place in share)
        try:
            return self._run.buffer.load(Manifest(manifest.step, manifest.header, entries)), {}
        except (WireError, PayloadMissing):
            return [], self._find_bad(entries)
        except RolloutMQError as error:
            return [], {"": f"{type(error).__name__}: {error}"}

    def _find_bad(self, entries: Sequence[ManifestEntry]) -> dict[str, str]:
        problems = {}
        for entry in entries:
            try:
                self._run.buffer.read(entry.payload)
            except RolloutMQError as error:
                problems[entry.gid] = f"{type(error).__name__}: {error}"
        return problems or {"": "a group could not be read, and then it could: take the step again"}

    def _put_aside(self, step: int, bad: Mapping[str, str]) -> tuple[list[str], list[int]]:
        assert self.leader
        manifest = self.leader.put_aside(step, bad)
        return manifest.lines, self._tokens(manifest)

    # -- agreement -------------------------------------------------------------

    def _agree(self, manifest: Manifest, problems: dict[str, str]) -> dict[str, str]:
        """The bad groups of all ranks, by gid, with why. StepFailed where something else is wrong."""
        content = checksum("\n".join(manifest.lines).encode())
        said = self.ranks.say({"content": content, "problems": problems})
        if len({answer["content"] for answer in said}) > 1:
            raise StepFailed(f"step {manifest.step}: the ranks hold different manifests: {said}")
        all_problems = {gid: why for answer in said for gid, why in answer["problems"].items()}
        if why := all_problems.get(""):
            raise StepFailed(
                f"step {manifest.step}: {why}", hint="take the step again; it is as it was"
            )
        return all_problems

    def _on_leader(self, act: Callable[[], Any]) -> Any:
        """What rank 0 gets from `act`, on all ranks; its error, on all ranks."""
        answer: dict[str, Any] = {}
        error: Exception | None = None
        if self.leader:
            try:
                answer = {"value": act()}
            except Exception as raised:
                error = raised
                answer = {"error": type(raised).__name__, "why": str(raised)}
        answer = self.ranks.say(answer)[0]
        if error:
            raise error
        if "error" in answer:
            raise TOLD.get(answer["error"], StepFailed)(
                f"rank 0: {answer['error']}: {answer['why']}"
            )
        return answer["value"]
