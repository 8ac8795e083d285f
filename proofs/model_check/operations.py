"""The operations of processes: calls of the product's own classes, stopped behind each call.

An operation is a function of a run and of values that do not change. It is carried out call by call:
the replies that it has received so far are given to it again, and its next call of the server is
carried out. So what an operation waits for is a plain value, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from buffer.control.control import ALL_LANES
from buffer.control.task_status import TaskStop
from buffer.control.worker_record import HeartbeatReport, WorkerState
from buffer.errors import Fenced, RolloutMQError
from buffer.groups.submit import Stored
from buffer.ids import group_id
from buffer.job import Job, Result
from buffer.ledger.position import Position
from buffer.manifest import Manifest, ManifestEntry, NotReady
from buffer.redis.scripts import Arg, unfenced
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, RolloutState, Status, VersionSpan

TASK = "t"


class Pending(NamedTuple):
    """An operation under way, with the replies of its first calls."""

    name: str
    args: tuple[Any, ...]
    replies: tuple[Any, ...] = ()


class Called(BaseException):
    """Stops an operation behind a call. Not an Exception: the product must not handle it."""

    def __init__(self, what: str, reply: Any) -> None:
        super().__init__(what)
        self.what = what
        self.reply = reply


class Finished(NamedTuple):
    """An operation has returned, or raised an error of the product."""

    result: Any
    error: RolloutMQError | None = None


class SteppedStore(Store):
    """Carries out one call of an operation; `around` is given the call."""

    def __init__(self, url: str) -> None:
        super().__init__(url, deadline_s=0.0)
        self.replies: list[Any] = []
        self.is_stepped = False
        self.around: Callable[[str, Callable[[], Any]], Any] = lambda _, operation: operation()

    def retrying(self, what: str, operation: Callable[[], Any], **options: Any) -> Any:
        if not self.is_stepped:
            return super().retrying(what, operation, **options)
        if self.replies:
            return thawed(self.replies.pop(0))
        raise Called(what, frozen(self.around(what, operation)))


def frozen(reply: Any) -> Any:
    """Return a reply as a value that does not change."""
    return tuple(map(frozen, reply)) if isinstance(reply, list | tuple) else reply


def thawed(reply: Any) -> Any:
    return list(map(thawed, reply)) if isinstance(reply, tuple) else reply


def advance(run: Run, store: SteppedStore, pending: Pending) -> Called | Finished:
    store.replies = list(pending.replies)
    store.is_stepped = True
    try:
        # an operation is a function of this module
        return Finished(globals()[pending.name](run, *pending.args))
    except Called as call:
        return call
    except RolloutMQError as error:
        return Finished(None, error)
    finally:
        store.is_stepped = False


class _Waits(BaseException):
    pass


def is_over(run: Run, store: SteppedStore, pending: Pending) -> Finished | None:
    """Return how an operation ended that needs no further call."""

    def stop(what: str, operation: Callable[[], Any]) -> Any:
        raise _Waits

    around = store.around
    store.around = stop
    try:
        over = advance(run, store, pending)
        assert isinstance(over, Finished)
        return over
    except _Waits:
        return None
    finally:
        store.around = around


# -- of workers ---------------------------------------------------------------------------------


def register(run: Run, worker: str, nonce: str) -> Any:
    return run.fleet.register(worker, nonce, {})[1].weights


def claim(run: Run, worker: str, nonce: str, token: str, weights: PolicyVersion, limit: int) -> Any:
    return run.jobs.claim(worker, nonce, token, weights, limit)


def heartbeat(
    run: Run, worker: str, nonce: str, weights: PolicyVersion, ack: int, held: tuple[Job, ...]
) -> Any:
    report = HeartbeatReport(ack, weights, WorkerState.IDLE)
    return run.fleet.heartbeat(worker, nonce, report, held)


def submit(
    run: Run, worker: str, job: Job, made_by: tuple[PolicyVersion, ...], status: str
) -> None:
    filtered = status == "filtered"
    group = _group(job.gid, made_by, "completed" if filtered else status)
    run.buffer.submit(worker, job, group, 1, filtered=filtered)


def submit_together(
    run: Run, worker: str, done: tuple[tuple[Job, tuple[PolicyVersion, ...], str], ...]
) -> None:
    results = [Result(job, _group(job.gid, made_by, how), 1) for job, made_by, how in done]
    outcomes = run.buffer.submit_many(worker, results)
    assert all(isinstance(outcome, Stored | Fenced) for outcome in outcomes), outcomes


def keep_turns(
    run: Run, worker: str, job: Job, made_by: tuple[PolicyVersion, ...], weights: PolicyVersion
) -> None:
    """Keep two turns of an agent, each in a call of its own."""
    kept = run.buffer.keep_turns(job, _group(job.gid, made_by, "aborted"))
    for _ in range(2):
        kept.add(_group(job.gid, (weights,), "aborted").states[0])
        kept.store()


def release(run: Run, worker: str, job: Job, kind: Any) -> str:
    return run.jobs.release(worker, job, kind)


def keep_responses(run: Run, worker: str, job: Job, made_by: tuple[PolicyVersion, ...]) -> bool:
    return run.dead_letters.keep_responses(job, _group(job.gid, made_by, "failed"))


def deregister(run: Run, worker: str, nonce: str) -> bool:
    return run.fleet.deregister(worker, nonce)


@cache
def _group(gid: str, made_by: tuple[PolicyVersion, ...], status: str) -> RolloutGroup:
    state = RolloutState(
        index=0,
        prompt_ids=[1],
        response_ids=[5] * len(made_by),
        logprobs=[-0.5] * len(made_by),
        spans=[VersionSpan(n, 1, w.version, w.lineage) for n, w in enumerate(made_by)],
        status=Status(status),
        finish_reason="stop" if status == "completed" else "abort",
        reward={"score": 1.0} if status == "completed" else None,
    )
    return RolloutGroup(gid, TASK, [state])


@cache
def _prompt(gid: str) -> bytes:
    return group_bytes.encode(RolloutGroup(gid, TASK, [RolloutState(index=0, prompt_ids=[1])]))


def made_by(run: Run, job: Job) -> tuple[PolicyVersion, ...]:
    """Return the weights of the tokens that a job has: its bytes are immutable, and must be there."""
    group = run.buffer.read(job.payload)
    spans = [span for state in (group.states[0], *group.turns) for span in state.spans]
    return tuple(PolicyVersion(span.lineage, span.version) for span in spans)


# -- of producers -------------------------------------------------------------------------------


def open_producer(run: Run, nonce: str, take_over: bool) -> int:
    run.control.open_producer(nonce, take_over=take_over)
    return run.jobs.next_draw(nonce, TASK)


def enqueue(run: Run, nonce: str, operation: str, cursor: int, target: int, draws: int = 1) -> int:
    gids = [group_id(TASK, cursor + n) for n in range(draws)]
    run.payloads.write_prompts({gid: _prompt(gid) for gid in gids})
    return run.jobs.enqueue(nonce, operation, TASK, cursor, [1] * draws, target).cursor


def reissue(run: Run, nonce: str, status: str, target: int) -> int:
    return run.jobs.reissue(nonce, TASK, status, target)


# -- of trainers --------------------------------------------------------------------------------


def open_trainer(run: Run, nonce: str, take_over: bool, lineage: str, checkpoint: str) -> str:
    position = Position.model_validate_json(checkpoint)
    run.trainers.open(nonce, lineage=lineage, take_over=take_over, position=position)
    return position.model_dump_json()


def take(run: Run, nonce: str, step: int, count: int) -> Manifest | NotReady:
    return run.ledger.take(nonce, step, {TASK: count})


def publish(run: Run, nonce: str, weights: PolicyVersion) -> int:
    run.control.publish_weights(nonce, weights, f"/{weights}", "")
    return run.jobs.cursor(TASK)


def commit(run: Run, nonce: str, step: int, keep: int) -> None:
    run.ledger.commit(nonce, step, keep)


def quarantine(run: Run, nonce: str, step: int, entry: ManifestEntry) -> Manifest:
    return run.ledger.quarantine(nonce, step, entry, "unusable")


def refill(run: Run, nonce: str, step: int) -> Manifest | NotReady:
    return run.ledger.refill(nonce, step)


def set_target(run: Run, nonce: str, target: int) -> None:
    run.ledger.set_target(nonce, TASK, 0, target)


def hold(run: Run, nonce: str, operation: str, mode: str) -> None:
    _set_mode(run, "trainer", nonce, operation, mode, "")


# -- of the holders of roles ---------------------------------------------------------------------


def halt(run: Run, nonce: str, kind: Any) -> None:
    run.task_stops.publish(nonce, TASK, TaskStop(kind))


def beat(run: Run, nonce: str, role: Any, closing: bool) -> None:
    run.control.renew_role(role, nonce, closing=closing)


# -- of any process -----------------------------------------------------------------------------


def reap(run: Run) -> Any:
    return run.jobs.reap()


def refresh(run: Run) -> Any:
    return run.buffer.refresh_staleness(TASK)


def collect(run: Run) -> Any:
    return run.payloads.collect()


def expire_waiting(run: Run) -> Any:
    return run.jobs.expire_waiting(TASK)


def drop(run: Run, gid: str, revoke: str) -> Any:
    return run.jobs.drop(gid, revoke=revoke)


def requeue(run: Run, gid: str, operation: str) -> Any:
    return run.jobs.requeue(gid, operation=operation)


def pause(run: Run, mode: str, operation: str, lanes: str) -> None:
    _set_mode(run, "operator", "", operation, mode, lanes)


def _set_mode(run: Run, who: str, nonce: str, operation: str, mode: str, lanes: str) -> None:
    """`RunControl.set_mode` makes a new name for each call, which could not be repeated here."""
    arguments: dict[str, Arg] = {"operation": operation, "who": who, "mode": mode, "nonce": nonce}
    open_lanes = ALL_LANES if mode == "run" else lanes
    further: dict[str, Arg] = {
        "lanes": open_lanes,
        "orphan_ms": "",
        "change": int(who == "trainer"),
    }
    unfenced(run.store.call("control", run.keys.slots(), {**arguments, **further}), "trainer")
