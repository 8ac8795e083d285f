"""Finished groups, by task and status: what workers submit, what others put, and what trainers
take.

`buffer.groups.pools` looks at them; here they change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from buffer.batches.ledger import BatchLedger
from buffer.errors import GroupHeld, PayloadMissing, WireError
from buffer.groups.intake import Intake, described, stamped
from buffer.groups.job_queue import JobQueue
from buffer.groups.order_index import expire_all
from buffer.groups.pools import Pools
from buffer.groups.submit import Stored, Submission, SubmitOutcome
from buffer.model import wire
from buffer.model.group import RolloutGroup
from buffer.model.ids import IMPORTED_FROM, group_id, new_nonce, split_group_id
from buffer.model.job import Job, PayloadRef, Result
from buffer.model.manifest import Manifest, NotReady
from buffer.model.order_policy import OrderFunction
from buffer.model.rollout import PolicyVersion, RolloutState, Status
from buffer.query.scan import GroupScan
from buffer.store.payloads import pin_listed


class ReplayBuffer(Pools):
    """The pools of one run."""

    order_function: OrderFunction | None = None
    """the run's order policy where it is a user's: loaded and set by whoever submits"""

    def put(
        self,
        task: str,
        groups: Sequence[Sequence[RolloutState]],
        *,
        weights: PolicyVersion | None = None,
        ageless: bool = False,
        retryable: bool | None = None,
    ) -> dict[str, str]:
        """Add groups that no worker holds: of a loop of your own, or from elsewhere. Returns where
        each is, by its new gid, in order.

        A completed, aborted or expired group (`group_status`) goes to the pool of that status; one
        that is too old for the next train step counts as expired. Expired ones start again from
        their prompt if `retryable` (default: as the run does), else they are dropped. Tokens behind
        the last span of a rollout get the version `weights`; without it, every rollout needs spans,
        or the groups are `ageless`.

        All groups are checked before the first is added: WireError for an empty group, one that has
        an INIT, FAILED or FILTERED rollout, or one that cannot be encoded; ConfigError for an
        unknown task. Then each goes in by itself, and for good. The states of the caller are not
        changed.
        """
        intake = Intake(
            self._store, self._keys, self._limits, self._payloads, "put", self.order_function
        )
        copies = [stamped(states, weights, ageless) for states in groups]
        for states in copies:
            group = RolloutGroup(group_id(task, IMPORTED_FROM), task, states)
            intake.check(group)
            wire.encode_checked(group)
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
        """Give a group of a pool other rollouts: other rewards, say, or an end to an interrupted
        one.

        It goes to the pool of its new status (completed or aborted), and keeps its arrival, and its
        turn in `fifo` and `length_fair`. `weights` and `ageless` as in `put`. `replaces`: the
        payload token of what the caller has seen (`run.record`); default: what is there now. Raises
        GroupHeld, and changes nothing, when the group is in no pool or has other bytes by now;
        WireError for what cannot be a result.
        """
        task = split_group_id(gid)[0]
        group = RolloutGroup(gid, task, stamped(states, weights, ageless))
        if group.status not in (Status.COMPLETED, Status.ABORTED):
            raise WireError(
                f"group {gid} is {group.status}",
                hint="only completed or aborted groups can be given",
            )
        data = wire.encode_checked(group)
        seen = replaces or self._token(gid)
        reply = self._update(group, self._payloads.write(gid, new_nonce(), data), seen)
        match reply[0]:
            case "CHANGED":
                raise GroupHeld(
                    f"{gid} has changed: its bytes are {reply[1][:8]}…, not {seen[:8]}…",
                    hint="read it again",
                )
            case "NOT_POOLED":
                raise GroupHeld(f"{gid} is in no pool: it is {reply[1]}")
            case "ENDED":
                raise GroupHeld(f"{gid} has ended: it is {reply[1]}")
            case "UNKNOWN":
                raise GroupHeld(f"{gid} was never started", hint="see rolloutmq ls")
            case "MISSING":
                raise PayloadMissing(
                    f"group {gid}: {reply[1]} of {len(data)} bytes arrived", hint="update it again"
                )

    def _token(self, gid: str) -> str:
        found = self._store.retrying(
            "update", lambda: self._store.control.hget(self._keys.group(gid), "payload")
        )
        return found.decode() if found else "init"

    def _update(self, group: RolloutGroup, ref: PayloadRef, replaces: str) -> list[str]:
        keys = self._keys
        gid = group.gid
        task = group.task
        reply = self._store.call(
            "update",
            keys.slots(gid=gid, task=task),
            {
                "gid": gid,
                "draw": split_group_id(gid)[1],
                "replaces": replaces,
                "token": ref.token,
                **described(group, ref, self._limits, self.order_function),
            },
            keys.in_slot(keys.payload_chunks(gid, ref.token, ref.chunks)),
            group.made_by(self._limits.token_lag(task) != ""),
            durable=True,
        )
        pin_listed(self._store, keys)
        return reply

    def submit(
        self, worker: str, job: Job, group: RolloutGroup, new_tokens: int, *, filtered: bool = False
    ) -> Stored:
        """Submit one completed, aborted or filtered group; raise what `submit_many` returns for it.

        `new_tokens` counts the tokens that were generated since the claim.
        """
        (outcome,) = self.submit_many(worker, [Result(job, group, new_tokens, filtered)])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def submit_many(self, worker: str, results: Sequence[Result]) -> list[SubmitOutcome]:
        """Submit the groups that a worker finished, in one round trip; return what became of each.

        Each group is submitted for itself and for good: `Stored`, or the error that concerns it
        alone (`SubmitOutcome`). Raises StoreUnavailable when the server does not answer; the same
        results may then be submitted again (I13).
        """
        submission = Submission(
            self._store, self._keys, self._limits, self._payloads, self.order_function
        )
        return submission.submit(worker, results)

    # -- the consumer's side -------------------------------------------------

    def take_batch(
        self, nonce: str, step: int, counts: Mapping[str, int], *, strict: bool = True
    ) -> dict[str, list[RolloutGroup]] | NotReady:
        """The groups of train step `step` by task, `counts` of each: all, or nothing (NotReady);
        without `strict`, what there is. For the trainer that `BatchLedger.open` made `nonce`, which
        commits the step in the end.

        A step that was taken comes back as it was. Raises Fenced, LedgerError, PayloadMissing,
        WireError; see `consumer.rollout_consumer` for one that waits, and puts aside what cannot be
        read.
        """
        answer = BatchLedger(self._store, self._keys, self._limits).take(
            nonce, step, counts, strict=strict
        )
        if isinstance(answer, NotReady):
            return answer
        groups = self.load(answer)
        return {
            task: [group for group in groups if group.task == task]
            for task, count in counts.items()
            if count > 0
        }

    def load(
        self, manifest: Manifest, known: Mapping[PayloadRef, RolloutGroup] | None = None
    ) -> list[RolloutGroup]:
        """The groups of a batch, in order; tokens that were too old by themselves are masked. The
        same whenever it is asked (I5). `known` ones were read before. Raises PayloadMissing or
        WireError.
        """
        refs = [entry.payload for entry in manifest.entries]
        here = dict(known or {})
        missing = [ref for ref in refs if ref not in here]
        here.update(zip(missing, self.read_many(missing), strict=True))
        groups = [here[ref] for ref in refs]
        if manifest.token_threshold is not None:
            for group in groups:
                group.mask = group.fresh_mask(
                    manifest.step, manifest.token_threshold, manifest.forks
                )
        return groups

    # -- anybody's -----------------------------------------------------------

    def refresh_staleness(self, *tasks: str, limit: int = 250) -> dict[str, int]:
        """Move what the next train step may not use any more out of the pools of these tasks
        (default: all that train); how many groups of each that were. In slices of `limit`; costs
        O(log N + moved).

        The step is the server's, one behind the last that was taken: no caller can expire groups
        for a step that is far away. Nothing depends on it being called (I8).
        """
        sizes = self.count_statuses(*(tasks or self._limits.training_tasks))
        return {
            task: self._expire(task, limit) if size.stale else 0 for task, size in sizes.items()
        }

    def _expire(self, task: str, limit: int) -> int:
        store = self._store
        keys = self._keys
        limits = self._limits
        return sum(
            expire_all(store, keys, limits, task, status, limit)
            for status in ("completed", "aborted")
        )

    def delete(self, which: str | Mapping[str, Any]) -> int:
        """End a group by its gid, or all groups in pools that fit a question (`buffer.query`); how
        many have ended now.

        A gid may also be one that waits or is dead; GroupHeld if it runs, is in a batch, or has
        ended otherwise. What fits a question, but runs or is taken before its turn comes, is left
        alone. QueryError for a wrong question.
        """
        jobs = JobQueue(self._store, self._keys, self._limits)
        if isinstance(which, str):
            return int(jobs.drop(which) != "dropped")
        ledgers = [
            BatchLedger(self._store, self._keys, self._limits, name) for name in ("train", "eval")
        ]
        scan = GroupScan(self._store, self._keys, self._limits, ledgers)
        deleted = 0
        for record in scan.find({"$and": [{"stage": "pool"}, which]}):
            with contextlib.suppress(GroupHeld):
                deleted += jobs.drop(record.gid) != "dropped"
        return deleted
