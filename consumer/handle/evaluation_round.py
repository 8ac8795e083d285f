"""One evaluation: the draws of a held-out task, each once, answered by given weights or newer ones.

request ──▶ eval lane, before all training jobs ──▶ pool ──▶ take from the eval ledger
   ▲          └── every try failed ──▶ dead ──┐              │
   │                                          ▼              ▼
   │                     none waits or runs: all have ended: read, commit ──▶ groups, failures
   └───────── of older weights, or used by another evaluation ┘

A problem that fails is not replaced by another draw: it is a part of the result. Evaluations have
their own ledger, manifests and tasks, and move no training counter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import compress

from buffer.errors import ConfigError, PayloadMissing, WireError
from buffer.ids import group_id, split_group_id
from buffer.job import PayloadRef
from buffer.ledger.account import TaskAccount
from buffer.manifest import Manifest, NotReady
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from consumer.handle.reader import BatchReader
from consumer.handle.taker import BatchTaker, WaitOptions


class Evaluated(list[RolloutGroup]):
    """The groups of an evaluation, in the order of their draws.

    `failed`: gid and data source ("" if unknown) of each problem of which every try failed.
    `skipped`: problems that make no sense, which are left out (`Skip`).
    """

    def __init__(
        self,
        groups: Sequence[RolloutGroup],
        failed: Mapping[str, str],
        skipped: Collection[str] = (),
    ) -> None:
        super().__init__(groups)
        self.failed = failed
        self.skipped = skipped


class EvaluationRound:
    """Asks for `count` draws of `task`, of the weights that are the newest now or newer ones.

    Raises ConfigError for a task that is not for evaluation.
    """

    def __init__(self, run: Run, nonce: str, taker: BatchTaker, task: str, count: int) -> None:
        if task not in run.limits.eval_tasks:
            raise ConfigError(
                f"task {task[:80]!r} is not for evaluation",
                hint=f"the evaluation tasks are {', '.join(run.limits.eval_tasks) or 'none'}",
            )
        self._run = run
        self._nonce = nonce
        self._taker = taker
        self.task = task
        self._count = count
        self.version = run.control.state().weights.version
        self._step = 0
        account = self._account()
        # another trainer may not have finished an evaluation of this size
        draws = range(int(run.progress(task).get("begins", 0)), account.target)
        steps = run.evaluations.steps()
        is_taken = steps.taken > steps.committed
        is_left = is_taken or account.completed or _is_open(account, draws)
        self._draws = draws if is_left and len(draws) == count else self._next_draws(account)
        self._request(account)

    def finish(self, options: WaitOptions, *, allows_newer: bool) -> Evaluated:
        """Wait for all problems; without `allows_newer`, they are of the weights `version` only."""
        while True:
            manifest = self._taker.wait(
                self._run.evaluations, self._take, self._step, {self.task: self._count}, options
            )
            found = self._read(manifest, allows_newer)
            if found is not None:
                return found

    def poll(self) -> Evaluated | None:
        """Return the result if all problems have ended; late ones may be of newer weights."""
        answer = self._take()
        return None if isinstance(answer, NotReady) else self._read(answer, allows_newer=True)

    def _account(self) -> TaskAccount:
        tasks = self._run.account.totals().tasks
        return next(account for account in tasks if account.task == self.task)

    def _next_draws(self, account: TaskAccount) -> range:
        first = max(account.cursor, account.target)
        return range(first, first + self._count)

    def _request(self, account: TaskAccount) -> None:
        # absolute, so requesting again adds nothing; the server may have lost it
        if account.target < self._draws.stop:
            draws = self._draws
            self._run.evaluations.set_target(self._nonce, self.task, draws.start, draws.stop)

    def _take(self, _: Mapping[str, int] | None = None) -> Manifest | NotReady:
        """Take what is there once all problems have ended; an empty batch if all failed."""
        ledger, account = self._run.evaluations, self._account()
        steps = ledger.steps()
        self._step = steps.committed + 1
        if steps.taken < self._step:
            self._request(account)
            if _is_open(account, self._draws):
                memory, trained = self._run.memory.use(), self._run.ledger.steps()
                is_stuck = memory.refuses_all or (memory.refuses_fresh and not account.running)
                return NotReady(
                    {self.task: (account.completed, self._count)},
                    checkpoint_now=is_stuck and trained.taken > trained.freed,
                )
            if not account.completed:
                return Manifest(self._step, "", ())
        count = min(account.completed, 1024)  # groups that a batch contains at most
        return ledger.take(self._nonce, self._step, {self.task: count})

    def _read(self, manifest: Manifest, allows_newer: bool) -> Evaluated | None:
        """Read the groups and commit their step; return None if others must be generated."""
        groups: list[RolloutGroup] = []
        if manifest.entries:
            reader = BatchReader(self._run, trains=False)
            manifest, groups = self._taker.read(self._run.evaluations, manifest, reader)
            # also if they are discarded: the step must end before the next one can be taken
            self._run.evaluations.commit(self._nonce, self._step, self._step)
        problems = {group_id(self.task, draw) for draw in self._draws}
        own = sorted((g for g in groups if g.gid in problems), key=lambda group: group.gid)
        if groups and not own:
            return None  # what another trainer had taken, or groups that were requeued since
        entries = [entry for entry in manifest.entries if entry.gid in problems]
        versions = {entry.version for entry in entries if entry.version is not None}
        missing = problems - {group.gid for group in own}
        skipped = self._ended(missing, "skipped")
        failed = self._failed(missing - skipped)
        is_newer = not allows_newer and max(versions, default=self.version) > self.version
        if failed is None or is_newer or min(versions, default=self.version) < self.version:
            self._draws = self._next_draws(self._account())
            return None
        return Evaluated(own, failed, skipped)

    def _failed(self, gids: set[str]) -> dict[str, str] | None:
        """Return the data source of each problem that failed; None if one was answered."""
        found = {}
        for record in self._run.groups.find({"gid": {"$in": sorted(gids)}}) if gids else ():
            if record.stage != "dead":
                return None
            try:
                prompt = self._run.buffer.read(PayloadRef(record.gid, "init", 1, 0, ""))
                found[record.gid] = prompt.shared.data_source or ""
            except (PayloadMissing, WireError):
                found[record.gid] = ""
        ended = gids - found.keys()
        if self._ended(ended, "archived"):
            return None  # by another evaluation
        return found | dict.fromkeys(sorted(ended), "")

    def _ended(self, gids: set[str], end: str) -> set[str]:
        names, bitmap = sorted(gids), self._run.keys.ended(self.task, end)
        reads = [("GETBIT", bitmap, split_group_id(gid)[1]) for gid in names]
        return set(compress(names, self._run.store.send("evaluated", reads)))


def _is_open(account: TaskAccount, draws: range) -> bool:
    """Return whether a problem is still to be drawn, or a group of the task to come."""
    begun = account.waiting + account.running + account.aborted + account.expired
    return account.cursor < draws.stop or begun > 0
