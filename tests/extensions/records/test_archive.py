from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from buffer.errors import RolloutMQError
from buffer.redis.store import Store
from rolloutmq.extensions.records.archive import Archive, ArchiveFailed, Archiver, audit
from rolloutmq.extensions.records.step_file import RecordDamaged
from tests.buffer.scene import LIMITS, Scene
from tests.extensions.bucket.conftest import s3, url  # noqa: F401
from tests.servers import Server

STEPS = 4


@pytest.fixture
def scene(server_of: Callable[[str], Server], run_name: str, tmp_path: Path) -> Iterator[Scene]:
    yield from make_scene(server_of("valkey"), run_name, str(tmp_path / "archive"))


def make_scene(server: Server, name: str, place: str, **limit: int) -> Iterator[Scene]:
    changes = {"retain_until_exported": True, "archive": place, "stale_threshold": 9}
    limits = LIMITS.model_copy(update=changes | limit)
    store = Store(server.url, deadline_s=400.0)
    with server.connect() as raw:
        scene = Scene(store, raw, name, limits)
        scene.server_url = server.url  # type: ignore[attr-defined]
        yield scene
    store.close()


def train(scene: Scene, *steps: int, kept: int = 9) -> dict[int, list[str]]:
    """Take and commit steps of two groups; the groups of each."""
    taken = {}
    for step in steps:
        scene.ready(step - 1, step - 1)
        taken[step] = scene.take(step, math=2).gids
        scene.run.ledger.commit(scene.trainer, step, min(step, kept))
    return taken


def test_a_committed_batch_leaves_the_server_for_a_file_with_the_same_groups(scene: Scene) -> None:
    scene.open_trainer()
    scene.ready(0, 0)
    manifest = scene.take(1, math=2)
    sent = scene.run.buffer.load(manifest)
    archiver = Archiver(scene.run, {"run": {"name": "r"}}, Path("none"))
    scene.run.ledger.commit(scene.trainer, 1, 1)
    archiver.committed(1, 0)
    archiver.closed()

    archive = Archive(scene.run.limits.archive)
    assert archive.steps() == [1]
    assert scene.run.ledger.archive.steps() == range(2, 2)  # the server has freed it
    file = archive.open(1)
    file.check()
    assert file.manifest.gids == manifest.gids
    assert file.facts.config == {"run": {"name": "r"}}
    for known, read in zip(sent, file.groups(), strict=True):
        assert {name: column.tolist() for name, column in known.columns.items()} == {
            name: column.tolist() for name, column in read.columns.items()
        }
    scene.check()


def test_a_trainer_that_is_killed_anywhere_leaves_whole_files_of_all_steps(scene: Scene) -> None:
    folder = Path(scene.run.limits.archive)
    scene.ready(*[0] * 2 * STEPS)
    draw = random.Random(5)
    kills = 0
    for at in [*(draw.randint(1, 12) for _ in range(7)), 0]:
        command = [sys.executable, "-m", "tests.extensions.records.archiving"]
        server = scene.server_url  # type: ignore[attr-defined]
        done = subprocess.run([*command, server, scene.name, str(STEPS), str(at)], check=False)
        kills += done.returncode == -signal.SIGKILL
        assert done.returncode in (0, -signal.SIGKILL)
        for step in Archive(str(folder)).steps():
            Archive(str(folder)).open(step).check()
    assert kills > 1
    archive = Archive(str(folder))
    assert archive.steps() == list(range(1, STEPS + 1))
    gids = [gid for step in archive.steps() for gid in archive.open(step).manifest.gids]
    assert len(set(gids)) == 2 * STEPS
    assert [path.name for path in folder.iterdir() if path.suffix != ".rmq"] in ([], [".new"])
    scene.check()


def test_any_flipped_bit_is_found(scene: Scene) -> None:
    scene.open_trainer()
    archiver = Archiver(scene.run, {}, Path("none"))
    train(scene, 1)
    archiver.committed(1, 0)
    archiver.closed()
    file = Path(scene.run.limits.archive) / "step-0000001.rmq"
    whole = file.read_bytes()
    draw = random.Random(1)
    for position in {0, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(200))}:
        flipped = bytearray(whole)
        flipped[position] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
        with pytest.raises(RolloutMQError) as raised:
            Archive(str(file.parent)).open(1).check()
        assert file.name in raised.value.message
    file.write_bytes(whole[:-1])
    with pytest.raises(RecordDamaged):
        Archive(str(file.parent)).open(1).check()


def test_a_new_history_replaces_the_later_files_of_the_one_before(scene: Scene) -> None:
    scene.open_trainer()
    archive = Archive(scene.run.limits.archive)
    archiver = Archiver(scene.run, {}, Path("none"))
    train(scene, 1, 2, 3)
    archiver.committed(3, 0)
    archiver.closed()
    assert archive.steps() == [1, 2, 3]
    assert archive.open(2).facts.step == 2
    second = Path(scene.run.limits.archive, "step-0000002.rmq")
    with archive.new_step(2) as path:
        shutil.copyfile(second, path)
    assert archive.steps() == [1, 2]
    with pytest.raises(ArchiveFailed, match="step 3"):
        archive.open(3)


def test_a_full_place_keeps_the_batch_on_the_server(scene: Scene, tmp_path: Path) -> None:
    scene.open_trainer()
    place = Path(scene.run.limits.archive)
    place.parent.mkdir(exist_ok=True)
    place.write_text("no folder")
    train(scene, 1)
    archiver = Archiver(scene.run, {}, Path("none"))
    archiver.closed()
    assert scene.run.ledger.archive.steps() == range(1, 2)
    place.unlink()
    archiver = Archiver(scene.run, {}, Path("none"))  # the next trainer
    archiver.closed()
    assert Archive(str(place)).steps() == [1]
    assert audit(scene.run) == []
    file = place / "step-0000001.rmq"
    file.rename(place / "elsewhere")
    assert "step 1" in " ".join(audit(scene.run))
    (place / "elsewhere").rename(file)
    assert not scene.run.ledger.archive.steps()
    scene.check()


def test_fsck_reads_what_the_server_has_and_the_names_of_all(
    server_of: Callable[[str], Server], run_name: str, tmp_path: Path
) -> None:
    place = tmp_path / "archive"
    for scene in make_scene(server_of("valkey"), run_name, str(place), retain_batches=1):
        scene.open_trainer()
        archiver = Archiver(scene.run, {}, Path("none"))
        train(scene, 1, 2, 3)
        train(scene, 4, kept=3)
        archiver.committed(4, 0)
        archiver.closed()
        assert scene.run.ledger.archive.steps() == range(3, 4)
        assert Archive(str(place)).steps() == [1, 2, 3, 4]
        assert audit(scene.run) == []
        whole = (place / "step-0000003.rmq").read_bytes()
        for step in (1, 3, 4):
            file = place / f"step-{step:07d}.rmq"
            file.write_bytes(file.read_bytes()[:-9])
        (found,) = audit(scene.run)
        assert "step-0000003" in found
        (place / "step-0000003.rmq").write_bytes(whole)
        (found,) = audit(scene.run)
        assert "step-0000004" in found
        (place / "step-0000002.rmq").unlink()
        assert "step 2" in " ".join(audit(scene.run))


def test_fsck_names_a_file_that_is_gone_while_the_server_has_its_batch(scene: Scene) -> None:
    scene.open_trainer()
    archiver = Archiver(scene.run, {}, Path("none"))
    train(scene, 1, 2, 3, kept=0)
    archiver.committed(3, 0)
    archiver.closed()
    assert scene.run.ledger.archive.exported() == 0
    assert audit(scene.run) == []
    Path(scene.run.limits.archive, "step-0000002.rmq").unlink()
    (found,) = audit(scene.run)
    assert "step 2" in found


def test_a_bucket_holds_an_archive(
    server_of: Callable[[str], Server],
    run_name: str,
    url: str,  # noqa: F811
) -> None:
    for scene in make_scene(server_of("valkey"), run_name, url + "/archive"):
        scene.open_trainer()
        archiver = Archiver(scene.run, {}, Path("none"))
        gids = train(scene, 1, 2)
        archiver.committed(2, 0)
        archiver.closed()
        archive = Archive(url + "/archive")
        assert archive.steps() == [1, 2]
        for step in (1, 2):
            file = archive.open(step)
            file.check()
            assert file.manifest.gids == gids[step]
            assert np.concatenate([g.response_ids for g in file.groups()]).tolist() == 4 * [5, 6]
        with pytest.raises(ArchiveFailed, match="step 9"):
            archive.open(9)
