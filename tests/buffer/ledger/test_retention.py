"""What is kept of archived batches, and for how long (I6, I12)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from buffer.errors import ConfigError, LedgerError
from buffer.manifest import Manifest
from buffer.wire.group import RolloutGroup
from tests.buffer.keyspace import payload_keys
from tests.buffer.scene import Scene


def train(scene: Scene, steps: range) -> dict[int, Manifest]:
    batches = {}
    for step in steps:
        scene.ready(step, step, lineage="l1")
        batches[step] = scene.take(step, math=2)
        scene.run.ledger.commit(scene.trainer, step, step)
    return batches


def read(scene: Scene, manifest: Manifest) -> list[RolloutGroup]:
    return [scene.run.buffer.read(entry.payload) for entry in manifest.entries]


def payloads(scene: Scene) -> int:
    while scene.run.payloads.collect():
        pass
    return len(payload_keys(scene.raw, scene.name))


def test_the_last_batches_stay_readable_until_they_fall_out(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(retain_batches=2)
    scene.open_trainer()
    batches = train(scene, range(1, 5))
    assert scene.run.ledger.archive.steps() == range(3, 5)
    assert payloads(scene) == 4
    for step in (3, 4):
        manifest = scene.run.ledger.manifest(step)
        assert manifest is not None
        assert manifest.archived
        assert manifest.entries == batches[step].entries
        assert [group.gid for group in read(scene, manifest)] == batches[step].gids
        with pytest.raises(LedgerError, match="committed"):
            scene.take(step)
    assert scene.run.ledger.manifest(2) is None
    assert (scene.counters()["archived"], scene.counters()["taken"]) == ("8", "0")
    scene.check()


def test_a_restart_continues_from_its_checkpoint_with_retained_batches_behind_it(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(retain_batches=3)
    scene.open_trainer()
    train(scene, range(1, 3))
    scene.ready(2, 2, lineage="l1")
    third = scene.take(3)
    scene.open_trainer(step=2, lineage="l2", take_over=True)
    assert scene.take(3) == third
    with pytest.raises(LedgerError, match="already freed"):
        scene.open_trainer(step=1, lineage="l3", take_over=True)
    assert scene.run.ledger.archive.steps() == range(1, 3)
    scene.check()


def test_batches_wait_for_their_export_when_that_is_the_policy(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(retain_until_exported=True)
    scene.open_trainer()
    train(scene, range(1, 4))
    scene.run.janitor.sweep()
    assert scene.run.ledger.archive.steps() == range(1, 4)
    assert scene.run.ledger.archive.forget(exported=2) == 2
    assert scene.run.ledger.archive.forget(exported=1) == 2
    scene.run.janitor.sweep()
    assert scene.run.ledger.archive.steps() == range(3, 4)
    assert payloads(scene) == 2
    scene.check()


def test_what_was_retained_is_freed_by_anybody_when_the_run_retains_less(
    make_scene: Callable[..., Scene],
) -> None:
    kept = make_scene(retain_batches=9)
    kept.open_trainer()
    train(kept, range(1, 4))
    limits = kept.run.limits.model_copy(update={"retain_batches": 1})
    less = type(kept.run)(kept.store, kept.name, kept.run.nonce, limits)
    less.janitor.sweep()
    assert less.ledger.archive.steps() == range(3, 4)
    assert payloads(kept) == 2
    kept.check()


def test_forget_goes_in_slices_and_leaves_a_manifest(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(retain_batches=1)
    scene.open_trainer()
    train(scene, range(1, 2))
    keys = scene.keys
    reply = scene.store.call(
        "forget", keys.slots(), {"retain": 0, "wait": 0, "exported": 0, "limit": 1}
    )
    assert reply == ["OK", "0", "1", "0"]
    half = scene.run.ledger.manifest(1)
    assert half is not None
    assert len(read(scene, half)) == 1
    scene.check()


@pytest.mark.parametrize("failing", ["buffer.curation.line_file.sync", "pathlib.Path.rename"])
def test_nothing_is_freed_before_the_export_is_on_disk(
    make_scene: Callable[..., Scene], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    scene = make_scene(retain_until_exported=True)
    scene.open_trainer()
    train(scene, range(1, 3))

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as broken:
        broken.setattr(failing, fail)
        with pytest.raises(ConfigError, match="disk full"):
            scene.run.export_archived(tmp_path / "f.jsonl")
    assert list(tmp_path.iterdir()) == []
    assert scene.run.ledger.archive.steps() == range(1, 3)
    assert scene.run.export_archived(tmp_path / "f.jsonl").groups == 4
    assert scene.run.ledger.archive.steps() == range(3, 3)


def test_an_unreadable_group_does_not_keep_its_batch_for_ever(
    make_scene: Callable[..., Scene], tmp_path: Path
) -> None:
    scene = make_scene(retain_until_exported=True, retain_batches=1)
    scene.open_trainer()
    batches = train(scene, range(1, 3))
    lost = batches[1].entries[0].payload
    scene.raw.delete(scene.keys.payload(lost.gid, lost.token))
    done = scene.run.export_archived(tmp_path / "f.jsonl")
    assert (done.groups, list(done.unreadable), done.steps) == (3, [lost.gid], range(1, 3))
    # exported, and retained all the same; the next file does not hold it again
    assert scene.run.ledger.archive.steps() == range(2, 3)
    assert not scene.run.export_archived(tmp_path / "g.jsonl").steps
