from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from buffer.errors import ConfigError, GroupHeld, PayloadMissing, WireError
from buffer.groups.claim import has_ended, never_started
from buffer.groups.job_queue import JobQueue
from buffer.groups.kept_turns import KeptTurns
from buffer.groups.pools import AGING, Pools, expire_all
from buffer.groups.put_groups import GroupPut, arguments_of, stamped
from buffer.groups.submit import Stored, Submission, SubmitOutcome
from buffer.ids import IMPORTED_FROM, group_id, new_nonce, split_group_id
from buffer.job import Job, PayloadRef, Result
from buffer.ledger.ledger import BatchLedger
from buffer.manifest import Manifest, NotReady
from buffer.query.scan import GroupScan
from buffer.redis.scripts import unknown_reply
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, RolloutState, Status


class ReplayBuffer(Pools):
    """Finished groups by task and status: what workers submit, others put, and trainers take."""

    def put(
        self,
        task: str,
        groups: Sequence[Sequence[RolloutState]],
        *,
        weights: PolicyVersion | None = None,
        ageless: bool = False,
        retryable: bool | None = None,
    ) -> dict[str, str]:
        """Add groups that no worker holds; return the pool or end of each by its new gid, in order.

        A group goes to the pool of its status, or counts as expired if too stale for the next step.
        Expired and stale members start again if `retryable` (default: as the run does), else the
        group is dropped. Tokens after the last span of a rollout get the version `weights`; without
        it, every rollout needs spans, or the groups are `ageless`: no policy of this run made them.

        All groups are checked before the first is added; the caller's rollouts are not changed.

        Raises:
            WireError: a group is empty, has an INIT, FAILED or FILTERED rollout, or cannot be
                encoded.
            ConfigError: there is no such task.
            MemoryFull: the run holds as many payload bytes as it may.
        """
        intake = GroupPut(self._context, self._payloads, "put")
        copies = [stamped(states, weights, ageless) for states in groups]
        for states in copies:
            intake.check(RolloutGroup(group_id(task, IMPORTED_FROM), task, states))
        retry = self._limits.retries_expired(task) if retryable is None else retryable
        placed: dict[str, str] = {}
        for states in copies:
            make_group = partial(RolloutGroup, task=task, states=states)
            gid, pool = intake.put(task, make_group, retryable=retry)
            placed[gid] = pool
        intake.close()
        return placed

    def update(
        self,
        gid: str,
        states: Sequence[RolloutState],
        *,
        weights: PolicyVersion | None = None,
        ageless: bool = False,
        replaces: str = "",
    ) -> None:
        """Replace the rollouts of a group in a pool, for example to change rewards.

        The group goes to the pool of its new status (completed or aborted) and keeps its place in
        the order. `weights` and `ageless` are those of `put`. `replaces`: the payload token that
        the caller has read (default: the present one).

        Raises:
            GroupHeld: the group is in no pool or has other bytes by now; nothing was changed.
            WireError: the rollouts are no result.
        """
        task = split_group_id(gid)[0]
        group = RolloutGroup(gid, task, stamped(states, weights, ageless))
        if group.status not in (Status.COMPLETED, Status.ABORTED):
            raise WireError(
                f"group {gid} is {group.status}",
                hint="only completed or aborted groups can replace it",
            )
        data = group_bytes.encode_checked(group)
        seen = replaces or self._payload_token(gid)
        match self._update(group, self._payloads.write(gid, new_nonce(), data), seen):
            case ["OK"]:
                return
            case ["CHANGED", token]:
                raise GroupHeld(
                    f"{gid} has changed: its payload is {token[:8]}…, not {seen[:8]}…",
                    hint="read it again",
                )
            case ["NOT_POOLED", stage]:
                raise GroupHeld(f"{gid} is in no pool: it is {stage}")
            case ["ENDED", stage]:
                raise has_ended(gid, stage)
            case ["UNKNOWN"]:
                raise never_started(gid)
            case ["MISSING", size]:
                raise PayloadMissing(
                    f"group {gid}: {size} of {len(data)} bytes arrived", hint="update it again"
                )
            case reply:
                raise unknown_reply("update", reply)

    def _payload_token(self, gid: str) -> str:
        found = self._store.ask("update", "HGET", self._keys.group(gid), "payload")
        return found.decode() if found else "init"

    def _update(self, group: RolloutGroup, ref: PayloadRef, replaces: str) -> list[str]:
        keys = self._keys
        gid = group.gid
        task = group.task
        return self._store.call(
            "update",
            keys.slots(gid=gid, task=task),
            {
                "gid": gid,
                "draw": split_group_id(gid)[1],
                "replaces": replaces,
                "token": ref.token,
                **arguments_of(group, ref, self._limits),
            },
            keys.payload_chunks(gid, ref.token, ref.chunks),
            durable=True,
        )

    def submit(
        self,
        worker: str,
        job: Job,
        group: RolloutGroup,
        new_tokens: int,
        *,
        filtered: bool = False,
    ) -> Stored:
        """Submit one group (see `Result`); raise its error."""
        result = Result(job, group, new_tokens, filtered)
        (outcome,) = self.submit_many(worker, [result])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def submit_many(self, worker: str, results: Sequence[Result]) -> list[SubmitOutcome]:
        """Submit the groups that a worker finished, in one round trip; return the outcome of each.

        An error concerns one group alone. Raises StoreUnavailable when the server does not answer;
        the same results may then be submitted again (I13).
        """
        began_ns = time.time_ns()
        submission = Submission(self._context, self._payloads)
        outcomes = submission.submit(worker, results)
        for observer in self._context.observers:
            observer.submitted(worker, results, outcomes, began_ns)
        return outcomes

    def keep_turns(self, job: Job, group: RolloutGroup) -> KeptTurns:
        """Return what keeps the turns of the agents of a claimed group while it runs."""
        return KeptTurns(self._context, self._payloads, job, group)

    # -- for trainers --------------------------------------------------------

    def take_batch(
        self, nonce: str, step: int, counts: Mapping[str, int], *, strict: bool = True
    ) -> dict[str, list[RolloutGroup]] | NotReady:
        """Take the groups of train step `step`, and return them by task.

        `counts`: groups of each task, of which it takes all or none (NotReady); without `strict`,
        those that are ready. `nonce` is that of the open trainer. A step that was taken before is
        returned as it was (I5). Raises Fenced, LedgerError, PayloadMissing or WireError;
        `RolloutConsumer` instead waits, and quarantines unreadable groups.
        """
        ledger = BatchLedger(self._context)
        answer = ledger.take(nonce, step, counts, strict=strict)
        if isinstance(answer, NotReady):
            return answer
        groups = self.load(answer)
        return {task: [group for group in groups if group.task == task] for task in counts}

    def load(
        self, manifest: Manifest, known: Mapping[PayloadRef, RolloutGroup] | None = None
    ) -> list[RolloutGroup]:
        """Return the groups of a batch, in order, with tokens that are too stale masked.

        The result is the same at every call (I5). `known` groups are not read again. Raises
        PayloadMissing or WireError.
        """
        refs = [entry.payload for entry in manifest.entries]
        loaded = dict(known or {})
        missing = [ref for ref in refs if ref not in loaded]
        loaded.update(zip(missing, self.read_many(missing), strict=True))
        groups = [loaded[ref] for ref in refs]
        if manifest.token_threshold is not None:
            for group in groups:
                group.mask = group.fresh_mask(
                    manifest.step, manifest.token_threshold, manifest.forks
                )
        return groups

    # -- for all processes ---------------------------------------------------

    def refresh_staleness(self, *tasks: str, statuses: Collection[str] = AGING) -> dict[str, int]:
        """Expire the groups of these tasks (default: all that train) that became too stale.

        `statuses`: completed and aborted, or one of them. Returns how many groups of each task were
        moved; O(log N + moved). Takes check staleness themselves (I8). Raises ConfigError for an
        unknown task or another status.
        """
        names = [self._known(task) for task in (tasks or self._limits.training_tasks)]
        if unknown := sorted({*map(str, statuses)}.difference(AGING)):
            raise ConfigError(
                f"groups that are {' or '.join(unknown)} do not become too stale",
                hint=f"statuses: {', '.join(AGING)}",
            )
        return {
            task: sum(expire_all(self._context, task, status) for status in statuses)
            for task in names
            if self._limits.threshold(task) is not None
        }

    def delete(self, which: str | Mapping[str, Any]) -> int:
        """Drop a group by its gid, or all groups in pools that match a query; return how many.

        A single group may also wait or be dead. Raises GroupHeld if it runs, is in a batch, or has
        ended otherwise, and QueryError for a wrong query.
        """
        jobs = JobQueue(self._context)
        if isinstance(which, str):
            return int(jobs.drop(which) != "dropped")
        ledgers = [BatchLedger(self._context, name) for name in ("train", "eval")]
        scan = GroupScan(self._context, ledgers)
        deleted = 0
        for record in scan.find({"$and": [{"stage": "pool"}, which]}):
            with contextlib.suppress(GroupHeld):
                deleted += jobs.drop(record.gid) != "dropped"
        return deleted
