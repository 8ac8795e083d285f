"""The processes of a history: what each knows, and which operations it may start.

Each is a plain value. `starts` gives the operations that it may start now; `ended` is the process
after one of them returned. A process that dies is replaced by `reborn`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from buffer.errors import Fenced, LedgerError, RoleHeld
from buffer.groups.claim import Claim
from buffer.ids import group_id
from buffer.job import Job
from buffer.ledger.position import Position
from buffer.manifest import Manifest, NotReady
from buffer.wire.rollout import PolicyVersion
from proofs.model_check.operations import TASK, Finished, Pending

FIRST = PolicyVersion("initial", 0)
NewName = Callable[[], str]
"""Returns a nonce that was never used in this history."""


class Start(NamedTuple):
    """An operation that a process may start. `slot`: it waits for one operation in each."""

    slot: int
    pending: Pending
    costs: str = ""
    """the field of the budget that it uses up"""


class Worker(NamedTuple):
    """A rollout worker. Its heartbeats have a thread of their own."""

    name: str
    nonce: str = ""
    is_registered: bool = False
    weights: PolicyVersion = FIRST
    jobs: tuple[tuple[Job, tuple[PolicyVersion, ...]], ...] = ()
    """what it holds, with the weights of the tokens that each has from an earlier claim"""
    dead: tuple[Job, ...] = ()
    """groups that died in its hands, whose responses it has not kept yet"""
    kept: tuple[Job, ...] = ()
    """jobs with turns that it has kept"""
    epoch: int = 0
    """the newest state of the control hash that it knows"""
    under_way: tuple[Pending | None, Pending | None] = (None, None)
    capacity: int = 1
    beats: bool = True

    def starts(self, new_name: NewName) -> Iterator[Start]:
        main, beat = self.under_way
        if beat is None and self.is_registered and self.beats:
            held = tuple(job for job, _ in self.jobs)
            beats = (self.name, self.nonce, self.weights, self.epoch, held)
            yield Start(1, Pending("heartbeat", beats))
        if main is not None:
            return
        if not self.is_registered:
            yield Start(0, Pending("register", (self.name, self.nonce)))
            return
        if len(self.jobs) < self.capacity:
            args = (self.name, self.nonce, new_name(), self.weights, self.capacity)
            yield Start(0, Pending("claim", args))
        for job, history in self.jobs:
            done = (*history, self.weights)
            yield Start(0, Pending("submit", (self.name, job, done, "completed")))
            yield Start(0, Pending("submit", (self.name, job, done, "aborted")), "aborts")
            yield Start(0, Pending("submit", (self.name, job, done, "filtered")), "filters")
            if job not in self.kept:
                said = (self.name, job, history, self.weights)
                yield Start(0, Pending("keep_turns", said), "turns")
            yield Start(0, Pending("release", (self.name, job, "failed")), "failures")
            yield Start(0, Pending("release", (self.name, job, "handback")), "handbacks")
        yield from self._together()
        for job in self.dead:
            yield Start(0, Pending("keep_responses", (self.name, job, (self.weights,))))

    def _together(self) -> Iterator[Start]:
        """What it holds, in one call: completed, or the last one aborted."""
        if len(self.jobs) < 2:
            return
        made = [(job, (*history, self.weights)) for job, history in self.jobs]
        for last, costs in (("completed", ""), ("aborted", "aborts")):
            ends = ["completed"] * (len(made) - 1) + [last]
            all_of_it = tuple((*each, end) for each, end in zip(made, ends, strict=True))
            yield Start(0, Pending("submit_together", (self.name, all_of_it)), costs)

    def ended(self, slot: int, pending: Pending, over: Finished, made: Any) -> Worker:
        done = self._replace(under_way=_without(self.under_way, slot))
        match pending.name, over:
            case "register", Finished(PolicyVersion() as weights, None):
                return done._replace(is_registered=True, weights=weights)
            case "claim", Finished(Claim(refusal="UNKNOWN"), None):
                return done._replace(is_registered=False)
            case "claim", Finished(Claim(control=control, jobs=jobs), None):
                claimed = tuple((job, made(job)) for job in jobs)
                assert control is not None
                knows = done._replace(weights=control.weights, epoch=control.epoch)
                return knows._replace(jobs=(*done.jobs, *claimed))
            case "heartbeat", Finished(error=Fenced()):
                return done._replace(is_registered=False, jobs=())
            case "heartbeat", Finished(beat, None):
                epoch = beat.control.epoch if beat.control else done.epoch
                is_known = done.is_registered and beat.known
                return done._replace(is_registered=is_known, epoch=epoch).without(beat.lost)
            case "keep_turns", Finished(None, None):
                _, job, history, weights = pending.args
                held = dict(done.jobs)
                if job in held:  # it may have lost the group since
                    held[job] = (*history, weights, weights)
                return done._replace(jobs=tuple(held.items()), kept=(*done.kept, job))
            case (("keep_turns" | "submit" | "release"), Finished(stage, error)):
                assert error is None or isinstance(error, Fenced), error
                job = pending.args[1]
                died = (job,) if stage == "dead" else ()
                return done.without((job,))._replace(dead=(*done.dead, *died))
            case (("keep_responses" | "submit_together"), Finished(_, None)):
                (job, *_) = pending.args[1:]
                ended = (job,) if isinstance(job, Job) else tuple(each for each, *_ in job)
                return done.without(ended)._replace(
                    dead=tuple(j for j in done.dead if j not in ended)
                )
        raise AssertionError(f"{pending.name} of {self.name} ended with {over}")

    def without(self, lost: tuple[Job, ...]) -> Worker:
        return self._replace(jobs=tuple(held for held in self.jobs if held[0] not in lost))

    def reborn(self, new_name: NewName) -> Worker:
        return self._replace(
            nonce=new_name(), is_registered=False, weights=FIRST, jobs=(), dead=(), kept=(), epoch=0,
            under_way=(None, None),
        )  # fmt: skip


class Producer(NamedTuple):
    """Draws `groups` groups, and starts aborted and expired ones again."""

    groups: int
    draws: int = 1
    """groups that it offers in one call: the server starts as many as there is room for"""
    takes_over: bool = True
    nonce: str = ""
    cursor: int | None = None
    """None: it has not opened the run"""
    under_way: tuple[Pending | None] = (None,)
    is_opened_first: bool = False
    """it has opened the run when the history begins"""
    name: str = "producer"

    def starts(self, new_name: NewName) -> Iterator[Start]:
        if self.under_way != (None,):
            return
        if self.cursor is None:
            yield Start(0, Pending("open_producer", (self.nonce, self.takes_over)))
            return
        if self.cursor < self.groups:
            args = (self.nonce, new_name(), self.cursor, self.groups, self.draws)
            yield Start(0, Pending("enqueue", args))
        for status in ("aborted", "expired"):
            yield Start(0, Pending("reissue", (self.nonce, status, self.groups)))
        yield Start(0, Pending("halt", (self.nonce, "enough")), "side_calls")
        yield Start(0, Pending("beat", (self.nonce, "producer", False)), "side_calls")
        yield Start(0, Pending("beat", (self.nonce, "producer", True)), "side_calls")

    def ended(self, slot: int, pending: Pending, over: Finished, made: Any) -> Producer:
        done = self._replace(under_way=_without(self.under_way, slot))
        match pending.name, over:
            case (("open_producer" | "enqueue"), Finished(int(cursor), None)):
                return done._replace(cursor=cursor)
            case "beat", Finished(_, None):
                return done._replace(cursor=None) if pending.args[2] else done
            case (("reissue" | "halt"), Finished(_, None)):
                return done
            case _, Finished(error=Fenced() | RoleHeld()):
                return done._replace(cursor=None)
        raise AssertionError(f"{pending.name} of the producer ended with {over}")

    def reborn(self, new_name: NewName) -> Producer:
        return Producer(self.groups, self.draws, self.takes_over, new_name())


class Trainer(NamedTuple):
    """Takes batches of `batch` groups for `steps` steps; each step ends with a checkpoint."""

    steps: int
    batch: int = 1
    kept: int = 1
    """checkpoints that the server must keep the batches of"""
    takes_over: bool = True
    nonce: str = ""
    checkpoints: tuple[str, ...] = (Position().model_dump_json(),)
    """the newest two on disk, newest last: they survive a death"""
    position: str = ""
    """"": it has not opened the run"""
    manifest: Manifest | None = None
    """the batch that it trains"""
    todo: str = "take"
    under_way: tuple[Pending | None] = (None,)
    is_opened_first: bool = False
    """it has opened the run when the history begins"""
    name: str = "trainer"

    @property
    def step(self) -> int:
        return Position.model_validate_json(self.position or self.checkpoints[-1]).step

    def starts(self, new_name: NewName) -> Iterator[Start]:
        if self.under_way != (None,):
            return
        if not self.position:
            args = (self.nonce, self.takes_over, f"l{self.nonce}")
            yield Start(0, Pending("open_trainer", (*args, self.checkpoints[-1])))
            if len(self.checkpoints) > 1:
                yield Start(0, Pending("open_trainer", (*args, self.checkpoints[0])), "older")
            return
        if self.todo == "take" and self.step < self.steps:
            yield Start(0, Pending("take", (self.nonce, self.step + 1, self.batch)))
        elif self.todo == "train":
            yield from self._trains()
        elif self.todo == "commit":
            yield Start(0, Pending("commit", (self.nonce, self.step, self._keep())))
        yield Start(0, Pending("set_target", (self.nonce, 9)), "side_calls")
        yield Start(0, Pending("hold", (self.nonce, new_name(), "run")), "side_calls")
        yield Start(0, Pending("beat", (self.nonce, "trainer", False)), "side_calls")
        yield Start(0, Pending("beat", (self.nonce, "trainer", True)), "side_calls")

    def _trains(self) -> Iterator[Start]:
        assert self.manifest is not None
        step = self.manifest.step
        if self.manifest.open_places:
            yield Start(0, Pending("refill", (self.nonce, step)))
        else:
            weights = PolicyVersion(f"l{self.nonce}", step)
            yield Start(0, Pending("publish", (self.nonce, weights)))
        for entry in self.manifest.entries:
            yield Start(0, Pending("quarantine", (self.nonce, step, entry)), "bad_groups")

    def _keep(self) -> int:
        """Return the step of the oldest checkpoint that is kept; 0 is the beginning of the run."""
        return max(0, self.step + 1 - self.kept)

    def ended(self, slot: int, pending: Pending, over: Finished, made: Any) -> Trainer:
        done = self._replace(under_way=_without(self.under_way, slot))
        match pending.name, over:
            case _, Finished(error=Fenced() | RoleHeld()):
                return done._closed()
            case "open_trainer", Finished(str(position), None):
                # a newer checkpoint than the one that was opened is abandoned
                left = done.checkpoints[: done.checkpoints.index(pending.args[3]) + 1]
                return done._replace(position=position, todo="take", checkpoints=left)
            case "open_trainer", Finished(error=LedgerError()):
                # two trainers that wait for each other have no checkpoints in common
                is_newest = pending.args[3] == done.checkpoints[-1]
                is_kept = is_newest or self.kept > 1
                assert not is_kept or not self.takes_over, over.error
                return done
            case (("take" | "quarantine" | "refill"), Finished(Manifest() as manifest, None)):
                size = len(manifest.entries) + manifest.open_places.total()
                assert size == self.batch, f"I4: {size} groups instead of {self.batch}"
                return done._replace(manifest=manifest, todo="train")
            case "take", Finished(NotReady(checkpoint_now=True), None):
                # nothing is started until a commit frees memory
                return done._replace(todo="commit")
            case (("take" | "refill" | "set_target" | "hold"), Finished(_, None)):
                return done
            case "beat", Finished(_, None):
                return done._closed() if pending.args[2] else done
            case "publish", Finished(int(cursor), None):
                return done._trained(cursor)
            case "commit", Finished(None, None):
                return done._replace(todo="take")
        raise AssertionError(f"{pending.name} of the trainer ended with {over}")

    def _closed(self) -> Trainer:
        return self._replace(position="", manifest=None, todo="take")

    def _trained(self, cursor: int) -> Trainer:
        """Write a checkpoint, which is committed next."""
        assert self.manifest is not None
        trained = Position.model_validate_json(self.position)
        trained.add(self.manifest)  # raises for a group that was trained before
        trained.cursors = {TASK: cursor}
        trained.forget(max(0, trained.step + 1 - self.kept))
        saved = trained.model_dump_json()
        checkpoints = (*self.checkpoints, saved)[-2:]
        return self._replace(todo="commit", position=saved, checkpoints=checkpoints, manifest=None)

    def reborn(self, new_name: NewName) -> Trainer:
        return Trainer(
            self.steps, self.batch, self.kept, self.takes_over, new_name(), self.checkpoints
        )


class Janitor(NamedTuple):
    """Does what any process may do, one thing at a time."""

    operations: tuple[str, ...] = ("reap",)
    under_way: tuple[Pending | None] = (None,)
    name: str = "janitor"

    def starts(self, new_name: NewName) -> Iterator[Start]:
        if self.under_way == (None,):
            for operation in self.operations:
                yield Start(0, Pending(operation, ()))

    def ended(self, slot: int, pending: Pending, over: Finished, made: Any) -> Janitor:
        assert over.error is None, over.error
        return self._replace(under_way=(None,))

    def reborn(self, new_name: NewName) -> Janitor:
        return Janitor(self.operations)


class Operator(NamedTuple):
    """Pauses, drops and requeues; each is paid for by the budget."""

    groups: int
    open_lanes: str = ""
    """lanes that stay open while the run is paused"""
    is_paused: bool = False
    under_way: tuple[Pending | None] = (None,)
    name: str = "operator"

    def starts(self, new_name: NewName) -> Iterator[Start]:
        if self.under_way != (None,):
            return
        mode = "run" if self.is_paused else "abort"
        costs = "" if self.is_paused else "pauses"
        yield Start(0, Pending("pause", (mode, new_name(), self.open_lanes)), costs)
        for draw in range(self.groups):
            gid = group_id(TASK, draw)
            yield Start(0, Pending("drop", (gid, "")), "commands")
            yield Start(0, Pending("drop", (gid, "w0")), "commands")
            yield Start(0, Pending("requeue", (gid, new_name())), "commands")

    def ended(self, slot: int, pending: Pending, over: Finished, made: Any) -> Operator:
        paused = pending.args[0] == "abort" if pending.name == "pause" else self.is_paused
        return self._replace(under_way=(None,), is_paused=paused)

    def reborn(self, new_name: NewName) -> Operator:
        return self._replace(under_way=(None,))


Process = Worker | Producer | Trainer | Janitor | Operator


def _without(under_way: tuple[Any, ...], slot: int) -> Any:
    return tuple(None if n == slot else pending for n, pending in enumerate(under_way))
