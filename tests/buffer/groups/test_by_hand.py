"""Requeue, drop and quarantine: groups that operators and trainers move (I1, I5, I8, I11)."""

from __future__ import annotations

import pytest

from buffer.errors import Fenced, LedgerError
from buffer.job import Job
from buffer.manifest import Manifest, ManifestEntry
from buffer.wire.rollout import Status
from tests.buffer.scene import Scene


def bury(scene: Scene, reason: str = "no good") -> Job:
    """Make a dead group that had tokens before it died."""
    scene.enqueue(1)
    (job,) = scene.claim()
    scene.submit(job, status=Status.ABORTED)
    scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000)
    for _ in range(scene.run.limits.max_tries):
        (job,) = scene.claim()
        assert job.payload.token != "init"
        scene.run.jobs.release("w0", job, "failed", reason)
    assert scene.record(job.gid)["stage"] == "dead"
    return job


def quarantine(
    scene: Scene, step: int, entry: ManifestEntry, reason: str = "bad bytes"
) -> Manifest:
    return scene.run.ledger.quarantine(scene.trainer, step, entry, reason)


# -- requeue ----


# -- drop ----


# -- quarantine ----


def test_quarantine_is_refused_to_a_zombie_after_commit_and_outside_of_the_batch(
    scene: Scene,
) -> None:
    zombie = scene.open_trainer()
    scene.ready(0, 0, 0)
    first = scene.take(1)
    with pytest.raises(LedgerError, match="not in the batch"):
        quarantine(scene, 2, first.entries[0])
    scene.open_trainer(lineage="l2", take_over=True)
    with pytest.raises(Fenced):
        scene.run.ledger.quarantine(zombie, 1, first.entries[0], "")
    scene.take(1)
    scene.run.ledger.commit(scene.trainer, 1, 0)
    before = scene.dump()
    with pytest.raises(LedgerError, match="step 1 is committed"):
        quarantine(scene, 1, first.entries[0])
    assert scene.dump() == before


def test_dead_letters_are_listed_newest_first_with_strange_reasons(scene: Scene) -> None:
    first = bury(scene, 'he said "no"\n\x1b[31m')
    scene.open_trainer()
    (gid,) = scene.ready(0)
    quarantine(scene, 1, scene.take(1).entries[0], 'bytes "\\" \x00')
    letters = {letter.gid: letter for letter in scene.run.dead_letters.newest()}
    assert len(scene.run.dead_letters) == 2
    assert (letters[first.gid].reason, letters[first.gid].tries) == ('he said "no"\n\\u001b[31m', 3)
    assert (letters[gid].reason, letters[gid].step, letters[gid].worker) == (
        'bytes "\\" \x00',
        1,
        "w0",
    )
    assert all(letter.age_ms >= 0 and letter.task == "math" for letter in letters.values())
