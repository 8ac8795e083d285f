"""I12: payload bytes are counted where groups move, so that the count is what the records say."""

from __future__ import annotations

from buffer.job import PayloadRef
from buffer.wire.rollout import PolicyVersion, Status
from tests.buffer.checkpointing import Trainer
from tests.buffer.scene import FIRST, Scene, rollout

RETRIED = {"on_straggler": "retry"}


def bytes_follow_the_groups_of_workers(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.enqueue(5)
    scene.check()
    part, other, *more = scene.claim(5)
    scene.submit(part, status=Status.ABORTED)
    scene.check()
    scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000)
    scene.submit(scene.claim()[0])
    scene.submit(other, filtered=True)
    for job in more:
        scene.submit(job)
    scene.check()
    scene.run.jobs.requeue(more[0].gid)
    scene.check()
    scene.run.jobs.drop(more[1].gid)
    scene.check()
    scene.take(1)
    scene.run.ledger.commit(scene.trainer, 1, 1)
    scene.check()


def bytes_follow_what_expires(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.ready(0, 0, 0, 1)
    for step in (1, 2):
        scene.take(step)
    scene.run.buffer.refresh_staleness("math")
    scene.check()


def bytes_follow_groups_from_outside(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    fresh = rollout(Status.COMPLETED, PolicyVersion("l0", 9))
    old = rollout(Status.EXPIRED, FIRST)
    gid, expired = scene.run.buffer.put("math", [[fresh], [old]])
    scene.check()
    for group in (gid, expired):
        scene.run.buffer.update(
            group,
            [rollout(Status.COMPLETED, PolicyVersion("l0", 9), response="longer than before")],
        )
        scene.check()


def bytes_follow_the_responses_of_dead_letters(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    keep = scene.run.dead_letters.keep_responses
    for is_begun in (False, True):
        scene.enqueue(1)
        (job,) = scene.claim()
        if is_begun:
            scene.submit(job, status=Status.ABORTED)
            scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000)
            (job,) = scene.claim()
        assert scene.run.jobs.release("w0", job, "failed") == "waiting"
        assert not keep(job, scene.failed(job))
        scene.run.jobs.resume_task(job.task)
        (job,) = scene.claim()
        dead = scene.bury(job)
        scene.check()
        assert keep(dead, scene.failed(dead))
        scene.run.payloads.collect()
        kept = scene.run.buffer.read(PayloadRef(dead.gid, dead.token, 1, 0, ""))
        assert kept.status is Status.FAILED
        scene.check()
        assert scene.run.jobs.requeue(dead.gid) == "dead"
        # another claim may hold it by now
        assert not keep(dead, scene.failed(dead))
        scene.check()
        (job,) = scene.claim()
        assert not job.is_begun
        again = scene.bury(job, keep=False)
        assert not keep(dead, scene.failed(dead))
        scene.check()
        assert keep(again, scene.failed(again))
        # it dies once more, with its worker, before a copy of that call arrives
        assert scene.run.jobs.requeue(dead.gid) == "dead"
        while scene.record(dead.gid)["stage"] != "dead":
            scene.claim()
            scene.expire_leases("w0")
            scene.run.jobs.reap()
        assert not keep(again, scene.failed(again))
        scene.run.payloads.collect()
        scene.check()
        assert scene.run.jobs.drop(dead.gid) == "dead"
        scene.check()


def responses_of_dead_letters_are_refused_for_good(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.enqueue(1)
    (job,) = scene.claim()
    dead = scene.bury(job, keep=False)
    for low_bytes in (2, 0):
        limits = scene.run.limits.model_copy(update={"low_bytes": low_bytes})
        scene.run.limits.adopt(limits)
        assert not scene.run.dead_letters.keep_responses(dead, scene.failed(dead))
        assert scene.run.payloads.collect() == (low_bytes > 0)
        scene.check()


def bytes_follow_what_comes_back_after_a_loss(scene: Scene) -> None:
    scene.open_producer()
    trainer = Trainer(scene)
    kept, lost = scene.ready(0, 0)
    moment = trainer.now()
    trainer.train(1, math=2)
    trainer.save()
    trainer.lose_all_since(moment)
    # its bytes were freed: the batch cannot come back, and both are archived
    assert trainer.open().recovery.changed == 2
    assert [scene.bit("archived", draw) for draw in (0, 1)] == [1, 1], (kept, lost)
    scene.check()
    scene.enqueue(1)
    (job,) = scene.claim()
    moment = trainer.now()
    scene.submit(job)
    payload = {key: value for key, value in trainer.now().items() if job.token in key}
    trainer.train(2)
    trainer.save(keep=1)
    trainer.lose_all_since(moment | payload)
    assert trainer.open().recovery.restored == 1
    scene.check()
