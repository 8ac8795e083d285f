"""A run in which every script runs, in every branch that changes something."""

from __future__ import annotations

from pathlib import Path

import orjson

from buffer.config.assignments import parse_settings
from buffer.control.call_limit import Caller, CallerState, CallLimit
from buffer.control.control import Mode
from buffer.control.task_status import TaskStop
from buffer.groups.verdicts import Verdicts
from buffer.ids import new_nonce
from buffer.job import EndedEarly
from buffer.ledger.position import Position
from buffer.maintenance.regeneration import Regeneration
from buffer.manifest import Manifest
from buffer.run.run import Run
from buffer.run.settings import LiveSettings
from buffer.weights.copies import CopySender
from buffer.weights.redis_chunks import VersionStore
from buffer.wire.rollout import PolicyVersion, Status
from tests.buffer.scene import FIRST, Scene, rollout, turn
from tests.buffer.time_machine import put_back, remember


def tell_a_whole_story(scene: Scene, folder: Path) -> None:
    """Every script, in every branch that changes something."""
    run = scene.run
    CopySender(VersionStore(run.store, scene.keys), folder).write(FIRST, save_weights)
    scene.open_producer()
    scene.open_trainer()
    scene.enqueue(9, samples=[2, 2, 0, 2, 2, 2, 2, 2, 2])
    ready, partial, filtered, back, aborted, failed, buried, _ = scene.claim(8)
    scene.beat([ready, partial])
    scene.submit(ready)
    scene.submit(partial, status=Status.ABORTED)
    scene.submit(filtered, filtered=True)
    run.jobs.release("w0", back, "handback")
    run.jobs.release("w0", aborted, "aborted")
    run.jobs.release("w0", failed, "failed")
    run.jobs.reissue(scene.producer, "math", "aborted", 1000)
    scene.claim(9, worker="w1")
    scene.take_back(buried.gid, worker=scene.record(buried.gid)["owner"])
    scene.expire_leases("w1")
    run.jobs.reap()
    run.fleet.fence("w1")
    run.fleet.fence("w0")
    scene.nonces.clear()
    survivors = scene.claim(9)
    kept = scene.turns(survivors[-1])
    for number in range(2):
        kept.add(turn(number))
        kept.store()
    run.jobs.release("w0", survivors.pop(), "failed")
    for job in survivors:
        scene.submit(job)
    put_right_by_hand(scene)
    scene.take(2, strict=False)
    run.ledger.commit(scene.trainer, 2, 1)
    run.buffer.refresh_staleness("math")
    run.jobs.reissue(scene.producer, "math", "expired", 1000)
    end_what_is_too_old(scene)
    run.ledger.set_target(scene.trainer, "quiz", 0, 3)
    run.control.set_mode("trainer", Mode.ABORT, nonce=scene.trainer)
    run.control.publish_weights(scene.trainer, PolicyVersion("l1", 2), "/w/2", "sum")
    run.control.set_mode("trainer", Mode.RUN, nonce=scene.trainer)
    scene.enqueue(1)
    (job, *_) = scene.claim(weights=PolicyVersion("l1", 2))
    scene.submit(job, PolicyVersion("l1", 2))
    scene.open_trainer(step=1, lineage="l2", take_over=True)
    run.fleet.deregister("w0", scene.worker())
    scene.raw.zadd(scene.keys.workers, {"w1": 1})
    run.jobs.reap()
    lines = [
        {
            "gid": gid, "task": "math", "response_ids": [1], "logprobs": [0.0],
            "reward": {"score": 1.0},
        }
        for gid in "ab"
    ]  # fmt: skip
    (folder / "f.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    run.import_groups(folder / "f.jsonl")
    limit_calls(scene)
    keep_verdicts(scene)
    (outside,) = run.buffer.put("math", [[rollout(Status.COMPLETED, PolicyVersion("l2", 1))]])
    run.buffer.update(
        outside, [rollout(Status.COMPLETED, PolicyVersion("l2", 1), response="better")]
    )
    lose_and_recover(scene)
    run.set(parse_settings(LiveSettings, ["max_tries=3", "tail_batch_max_tries=1"]))
    scene.enqueue(1)
    (job, *_) = scene.claim(weights=run.control.state().weights)
    run.jobs.release("w0", job, "aborted")
    run.task_stops.publish(scene.producer, "math", TaskStop("broken", 0, "no rows"))
    run.task_stops.publish(scene.producer, "code", TaskStop("enough", 3, "half"))
    run.jobs.resume_task("math")
    scene.beat([])  # on a busy machine, all of this may take longer than a lease
    assert run.receipts.silent() == ["w0"]
    assert scene.receipt(run.control.state().epoch) == "OK"
    run.control.report(scene.trainer, 3, {"rewards/mean": 0.5})
    run.control.report(scene.trainer, 3, {"eval/score": 0.5}, task="math")
    run.control.renew_role("trainer", scene.trainer)
    run.control.renew_role("trainer", scene.trainer, closing=True)
    run.control.renew_role("producer", scene.producer, closing=True)
    make_again(scene)


def make_again(scene: Scene) -> None:
    run = scene.run
    again = Regeneration(Position(run_nonce=run.nonce), take_over=True)
    Run.create(scene.store, run.name, run.nonce, run.limits, FIRST, "/w", regeneration=again)
    scene.nonces.clear()
    scene.open_producer()
    scene.open_trainer(lineage="l5", position=Position(run_nonce=run.nonce))
    scene.enqueue(2)
    scene.check()


def lose_and_recover(scene: Scene) -> None:
    """Batches that come back, that are gone, and that were never there; then all the way back to
    the first step.
    """
    run = scene.run
    taken = scene.run.ledger.steps()[0]
    scene.nonces.clear()
    scene.open_trainer(step=taken, lineage="l3", take_over=True)
    scene.enqueue(5)
    jobs = scene.claim(9, weights=run.control.state().weights)
    for job in jobs:
        scene.submit(job, None)
    moment = remember(scene.raw, scene.name)
    trainer = scene.trainer
    position = Position(step=taken, cursors={"math": run.jobs.cursor("math") + 2})
    for step in range(1, taken + 1):
        if manifest := run.ledger.manifest(step):
            position.add(manifest)
    for step in (taken + 1, taken + 2):
        position.add(scene.take(step))
    lost = position.model_copy(deep=True)
    gone = scene.take(taken + 3)
    lost.add(Manifest.parse(gone.step, [gone.header, f"{gone.gids[0]} lost 1 9 - 2 -"]))
    for known in (position, lost, Position()):
        put_back(scene.raw, scene.name, moment)
        scene.trainer = trainer
        scene.take(taken + 1, math=2)
        run.trainers.open(
            nonce := new_nonce(), lineage="l4", take_over=True, position=known, regenerate=True
        )
        scene.trainer = nonce
        scene.check()
    run.jobs.next_draw(scene.producer, "math")
    scene.enqueue(2)


def end_what_is_too_old(scene: Scene) -> None:
    """After step 2: one group in the queue, one that runs, and one whose tokens are younger."""
    jobs = scene.run.jobs
    scene.enqueue(3)
    waiting, running, younger = scene.claim(3)
    assert scene.beat([running, younger], oldest=FIRST).expiring == (running, younger)
    scene.submit(waiting, status=Status.ABORTED)
    jobs.reissue(scene.producer, "math", "aborted", 1000)
    assert jobs.expire_waiting("math") == 1
    jobs.release("w0", running, "expired", "", EndedEarly(4, 2, {"l0": 0}))
    jobs.release("w0", younger, "expired", "", EndedEarly(4, 2, {"l1": 1}))
    assert jobs.drop(younger.gid) == "aborted"


def save_weights(folder: Path) -> None:
    (folder / "model").write_bytes(b"weights")


def put_right_by_hand(scene: Scene) -> None:
    """Batch 1, and groups that are no good."""
    scene.ready(0, 0, 0)
    scene.ready(0, task="code")
    swapped, kept, removed = scene.take(1, math=2, code=1).entries
    for entry in (swapped, removed):
        scene.run.ledger.quarantine(scene.trainer, 1, entry, "not good")
    assert scene.take(1).gids[1:] == [kept.gid]
    (late,) = scene.ready(0, task="code")
    assert isinstance(refilled := scene.run.ledger.refill(scene.trainer, 1), Manifest)
    assert refilled.gids[1:] == [kept.gid, late]
    assert scene.run.fleet.unbar("w0") == 2
    for gid, before in (
        (swapped.gid, "dead"),
        (removed.gid, "dead"),
        (scene.ready(0)[0], "completed"),
    ):
        assert scene.run.jobs.requeue(gid) == before
    assert scene.run.jobs.drop(removed.gid) == "waiting"
    (job, other) = scene.claim(2)
    assert scene.run.jobs.drop(job.gid, revoke="w0") == "running"
    scene.submit(other)
    assert scene.run.jobs.drop(other.gid) == "completed"
    scene.enqueue(1)
    *others, job = scene.claim(9)
    for other in others:
        scene.submit(other)
    scene.bury(job)


def keep_verdicts(scene: Scene) -> None:
    verdicts = Verdicts(scene.run.context, "math", entries=2, size=100)
    for digest in ("a", "b", "c"):
        verdicts.note(digest, b"verdict")
    assert verdicts.find("b") == b"verdict"


def limit_calls(scene: Scene) -> None:
    """The keys are those of the run, so that what watches it watches them, too."""
    limit = CallLimit("demo", at_once=2)
    one, other = (Caller(scene.run.store, limit, f"{scene.name} {n}", 60_000) for n in range(2))
    for caller in (one, other):
        caller._keys, caller._store = scene.keys, scene.run.store
        caller.ask(CallerState(), [5, 5, 5])
    one.ask(CallerState(known=1, ended=1, unused=3, refused=1, pause_ms=100), [5])
