"""What the order, retention and quarantine add to a run is in its snapshot (I5)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from buffer.errors import GroupHeld, PayloadMissing, SnapshotError
from buffer.job import Job
from buffer.manifest import Manifest
from buffer.run import Run
from buffer.wire.rollout import Status
from tests.buffer.scene import FIRST, Scene, extend
from tests.buffer.snapshot.test_snapshot import resumed

Make = Callable[..., Scene]


def submit(scene: Scene, job: Job, length: int) -> None:
    """A completed group whose responses have `length` tokens."""
    group = scene.run.buffer.read(job.payload)
    for _ in range(length // 2):
        group = extend(group, Status.COMPLETED, FIRST)
    scene.run.buffer.submit("w0", job, group, 2 * length)


def ready(scene: Scene, *lengths: int) -> list[str]:
    scene.enqueue(len(lengths))
    jobs = scene.claim(len(lengths))
    for job, length in zip(jobs, lengths, strict=True):
        submit(scene, job, length)
    return [job.gid for job in jobs]


def lived(make_scene: Make, order: str = "staleness", **limits: object) -> Scene:
    """Step 1 is archived and retained, a group of step 2 was quarantined, groups were requeued and
    dropped by hand.
    """
    scene = make_scene(order=order, retain_batches=2, stale_threshold=9, **limits)
    scene.open_trainer(lineage="l0")
    gids = ready(scene, 2, 2, 40, 2, 8, 2, 40, 2, 2, 8)
    first = scene.take(1, math=2)
    bad = scene.take(2, math=2).entries[0]
    scene.run.ledger.quarantine(scene.trainer, 2, bad, "damaged")
    left = [gid for gid in gids if scene.record(gid)["stage"] == "pool"]
    scene.run.jobs.requeue(left[0])
    scene.run.jobs.drop(left[1])
    scene.run.ledger.commit(scene.trainer, 1, 1)
    assert scene.run.ledger.archive.steps() == range(1, 2)
    assert scene.record(first.gids[0]) == {}
    scene.check()
    return scene


def again(scene: Scene, folder: Path) -> Scene:
    scene.rest()
    scene.run.save(folder)
    return resumed(scene, folder)


def read(run: Run, manifest: Manifest | None) -> list[bytes]:
    assert manifest is not None
    return [bytes(run.payloads.read(entry.payload)) for entry in manifest.entries]


@pytest.mark.parametrize("order", ["staleness", "fifo"])
def test_resumed_run_delivers_the_same_batches_in_either_order(
    make_scene: Make, tmp_path: Path, order: str
) -> None:
    scene = lived(make_scene, order)
    other = again(scene, tmp_path / "s")
    other.check()
    assert other.run.limits == scene.run.limits
    kept = scene.dump()
    there = other.dump()
    batches = ("ledger:train", "batch:train:1", "batch:train:2")
    for key in ("progress:math", "dead", *batches):
        assert there.get(key) == kept.get(key), key
    for run in (scene, other):
        run.open_trainer(1, "l1", take_over=True)
    assert other.take(2) == scene.take(2)
    assert other.take(2).revision == 1
    for step in (3, 4, 5):
        if step == 4:
            # lengths that came before go on with their turns, a new one does not catch up
            assert ready(other, 40, 2, 200, 8) == ready(scene, 40, 2, 200, 8)
        ours = scene.take(step, math=2)
        theirs = other.take(step, math=2)
        assert theirs.gids == ours.gids
        assert [other.run.buffer.read(e.payload).response_ids.tolist() for e in theirs.entries] == [
            scene.run.buffer.read(e.payload).response_ids.tolist() for e in ours.entries
        ]
    other.check()


def test_retained_batches_stay_readable_and_are_freed_as_before(
    make_scene: Make, tmp_path: Path
) -> None:
    scene = lived(make_scene)
    other = again(scene, tmp_path / "s")
    manifest = other.run.ledger.manifest(1)
    assert manifest is not None
    assert manifest.archived
    assert read(other.run, manifest) == read(scene.run, scene.run.ledger.manifest(1))
    assert other.run.ledger.archive.steps() == range(1, 2)
    other.open_trainer(1, "l1")
    other.take(2), other.take(3), other.take(4)
    other.run.ledger.commit(other.trainer, 4, 3)
    other.run.janitor.sweep()
    assert other.run.ledger.archive.steps() == range(2, 4)
    for entry in manifest.entries:
        with pytest.raises(PayloadMissing):
            other.run.payloads.read(entry.payload)
    other.check()


def test_batch_that_is_half_archived_is_whole_after_the_resume(
    make_scene: Make, tmp_path: Path
) -> None:
    scene = make_scene(retain_batches=1)
    scene.open_trainer(lineage="l0")
    scene.ready(0, 0, 0, 0, 0)
    taken = scene.take(1, math=5)
    keys = scene.keys
    tasks = list(scene.run.limits.tasks)
    reply = scene.store.call(
        "commit",
        keys.slots(),
        {"nonce": scene.trainer, "step": 1, "keep": 1, "limit": 3},
        [keys.slots(task=task) for task in tasks],
        tasks,
    )
    assert reply == ["OK", "1", "0"]
    other = again(scene, tmp_path / "s")
    other.check()
    other.open_trainer(1, "l1")
    other.run.ledger.commit(other.trainer, 1, 1)
    assert other.counters()["archived"] == "5"
    manifest = other.run.ledger.manifest(1)
    assert manifest is not None
    assert manifest.entries == taken.entries
    assert read(other.run, manifest) == read(scene.run, taken)
    other.check()


def test_group_that_died_of_its_bytes_does_not_stop_a_snapshot(
    make_scene: Make, tmp_path: Path
) -> None:
    scene = make_scene()
    scene.open_trainer(lineage="l0")
    scene.ready(0, 0)
    entry = scene.take(1).entries[0]
    name = scene.keys.payload(entry.gid, entry.payload.token)
    scene.raw.delete(name)
    with pytest.raises(SnapshotError, match=entry.gid):
        scene.run.save(tmp_path / "no")
    scene.run.ledger.quarantine(scene.trainer, 1, entry, "gone")
    other = again(scene, tmp_path / "s")
    other.check()
    assert other.raw.get(other.keys.payload(entry.gid, entry.payload.token)) == scene.raw.get(name)
    assert [letter.reason for letter in other.run.dead_letters.newest()] == ["gone"]
    assert other.run.jobs.requeue(entry.gid) == "dead"
    (job,) = other.claim()
    assert (job.gid, other.run.buffer.read(job.payload).status) == (entry.gid, Status.INIT)
    other.submit(job)
    other.check()


def test_revoked_group_that_ran_is_not_in_the_snapshot(make_scene: Make, tmp_path: Path) -> None:
    scene = make_scene()
    scene.enqueue(2)
    gone, kept = scene.claim(2)
    scene.run.jobs.drop(gone.gid, revoke="w0")
    other = again(scene, tmp_path / "s")
    assert [job.gid for job in other.claim(9)] == [kept.gid]
    with pytest.raises(GroupHeld, match="dropped"):
        other.run.jobs.requeue(gone.gid)
    other.check()
