"""Files of large columns: freed, saved, restored and removed with their group or run (I14)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.errors import SnapshotError, WireError
from buffer.ids import group_id
from buffer.maintenance.column_files import ColumnFolder
from buffer.run.run import Run
from buffer.wire.rollout import Status
from tests.buffer.keyspace import run_keys
from tests.buffer.scene import Scene

GID = group_id("math", 0)
COLUMN = np.arange(40, dtype="<i4")


@pytest.fixture
def filed_scene(make_scene: Callable[..., Scene], tmp_path: Path) -> Callable[..., Scene]:
    return lambda **changes: make_scene(columns=str(tmp_path / "columns"), **changes)


def write(scene: Scene, count: int, task: str = "math") -> list[str]:
    """Write a file for each of the next draws."""
    start = scene.run.jobs.cursor(task)
    gids = [group_id(task, start + i) for i in range(count)]
    for gid in gids:
        scene.run.columns.put(gid, "ids.npy", COLUMN)
    return gids


def filed(scene: Scene) -> set[str]:
    return set(scene.run.columns.gids())


def sweep(scene: Scene) -> int:
    janitor = Run(scene.store, scene.name, scene.run.nonce, scene.run.limits).janitor
    swept = [janitor.sweep()]
    while swept[-1].has_more:
        swept.append(janitor.sweep())
    return sum(s.columns for s in swept)


# -- the folder ----------------------------------------------------------------


def test_a_file_is_found_by_its_address_wherever_the_folder_is(tmp_path: Path) -> None:
    folder = ColumnFolder(tmp_path / "here")
    address = folder.put(GID, "ids.npy", COLUMN)
    assert folder.put(GID, "ids.npy", COLUMN) == address
    (tmp_path / "here").rename(tmp_path / "elsewhere")
    moved = ColumnFolder(tmp_path / "elsewhere")
    assert moved.read(address, "<i4", 40).tolist() == COLUMN.tolist()
    assert list(moved.gids()) == [GID]


@pytest.mark.parametrize(
    "address",
    [
        *("file:///etc/passwd", "https://host/math-0000000000/x", "/etc/passwd", "owner.json"),
        *(f"{GID}{end}" for end in ("", "/", "/..", "/.x", "/a/b", "/../../x", "/x\0")),
        *(f"../{GID}/x", "math/x", "/x"),
    ],
)
def test_an_address_of_nothing_in_the_folder_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(WireError, match="no file of a run"):
        ColumnFolder(tmp_path).read(address, "<i4", 40)


def test_no_link_is_followed(tmp_path: Path) -> None:
    folder = ColumnFolder(tmp_path / "columns")
    name, _, crc = folder.put(GID, "ids.npy", COLUMN).partition("#")
    (tmp_path / "outside").mkdir()
    (tmp_path / "columns" / name).rename(tmp_path / "outside" / "ids.npy")
    (tmp_path / "columns" / name).symlink_to(tmp_path / "outside" / "ids.npy")
    linked = group_id("math", 1)
    (tmp_path / "columns" / linked).symlink_to(tmp_path / "outside")
    for address in (f"{name}#{crc}", f"{linked}/ids.npy#{crc}"):
        with pytest.raises(WireError):
            folder.read(address, "<i4", 40)
    folder.free(GID)
    folder.free(GID)
    assert (tmp_path / "outside" / "ids.npy").exists()


@given(st.integers(0, 2**20), st.integers(1, 255), st.booleans())
def test_a_column_in_a_file_is_what_was_written_or_refused(
    at: int, change: int, is_cut: bool
) -> None:
    with TemporaryDirectory() as root:
        folder = ColumnFolder(Path(root))
        address = folder.put(GID, "ids.npy", COLUMN)
        assert folder.read(address, "<i4", 40).tolist() == COLUMN.tolist()
        file = Path(root) / address.partition("#")[0]
        data = bytearray(file.read_bytes())
        if is_cut:
            del data[at % len(data) :]
        else:
            data[at % len(data)] ^= change
        file.write_bytes(data)
        for changed in (address, address.partition("#")[0]):
            with pytest.raises(WireError, match="CRC-32"):
                folder.read(changed, "<i4", 40)


# -- freed with their groups ----------------------------------------------------


def test_files_live_as_long_as_their_group(filed_scene: Callable[..., Scene]) -> None:
    scene = filed_scene(max_tries=1, stale_threshold=9)
    gids = write(scene, 9)
    waiting, running, ready, aborted, taken, archived, filtered, dead, _dropped = gids
    scene.open_trainer()
    scene.enqueue(9, samples=[2] * 8 + [0])
    jobs = {job.gid: job for job in scene.claim(8)}
    scene.run.jobs.release("w0", jobs[waiting], "handback")
    scene.submit(jobs[aborted], status=Status.ABORTED)
    scene.submit(jobs[filtered], filtered=True)
    scene.run.jobs.release("w0", jobs[dead], "failed")
    scene.submit(jobs[archived])
    scene.take(1)
    scene.submit(jobs[taken])
    scene.take(2)
    scene.run.ledger.commit(scene.trainer, 2, 1)
    scene.submit(jobs[ready])
    (unknown,) = write(scene, 1)  # the server may have lost it
    assert sweep(scene) == 3
    assert filed(scene) == {waiting, running, ready, aborted, taken, dead, unknown}
    assert sweep(scene) == 0
    scene.run.jobs.drop(dead)
    assert sweep(scene) == 1
    scene.check()


def test_files_of_archived_groups_live_as_long_as_their_batch_is_retained(
    filed_scene: Callable[..., Scene],
) -> None:
    scene = filed_scene(retain_batches=1)
    scene.open_trainer()
    batches = []
    for step in range(1, 4):
        gids = write(scene, 2)
        scene.ready(step, step, lineage="l1")
        batches.append(set(gids))
        scene.take(step, math=2)
        scene.run.ledger.commit(scene.trainer, step, step)
        sweep(scene)
        assert filed(scene) == batches[-1]
    # half archived: its first group is, its batch is not
    scene.raw.hset(scene.keys.ledger("train"), mapping={"freed": 2, "forgotten": 2})
    assert sweep(scene) == 0
    scene.raw.hset(scene.keys.ledger("train"), mapping={"freed": 3, "forgotten": 3})
    scene.raw.unlink(scene.keys.batch("train", 3))
    assert sweep(scene) == 2


def test_what_a_crash_left_is_found_by_a_later_sweep(filed_scene: Callable[..., Scene]) -> None:
    scene = filed_scene()
    gids = write(scene, 3)
    scene.enqueue(3, samples=[0, 0, 0])
    # a folder half deleted, a file half written, and one of a worker that was given up
    root = scene.run.columns.root
    assert root
    (root / gids[0] / "ids.npy").unlink()
    (root / gids[1] / "ids.npy").rename(root / gids[1] / ".ids.npy.0a1b2c3d")
    assert sweep(scene) == 3
    scene.run.columns.put(gids[2], "late.npy", COLUMN)
    assert sweep(scene) == 1
    assert filed(scene) == set()


def test_the_sweep_of_a_workers_heartbeats_touches_no_disk(
    filed_scene: Callable[..., Scene],
) -> None:
    scene = filed_scene()
    write(scene, 1)
    scene.enqueue(1, samples=[0])
    scene.raw.hset(scene.keys.clock, mapping={"seen_ms": 10**6, "swept_ms": 0})
    assert scene.run.janitor.sweep_in_turn().columns == 0
    assert scene.run.janitor.sweep().columns == 1


def test_runs_that_share_a_folder_delete_nothing_of_each_other(
    filed_scene: Callable[..., Scene], tmp_path: Path
) -> None:
    scene = filed_scene()
    other = ColumnFolder.of_run(scene.run.limits.columns, "other", scene.run.nonce)
    earlier = ColumnFolder.of_run(scene.run.limits.columns, scene.name, "another")
    write(scene, 1)
    scene.enqueue(1, samples=[0])
    for folder in (other, earlier):
        folder.put(GID, "ids.npy", COLUMN)
    (tmp_path / "columns" / GID).mkdir()
    assert sweep(scene) == 1
    write(scene, 1)
    scene.run.columns.remove()
    scene.run.columns.remove()
    assert filed(scene) == set()
    assert [list(folder.gids()) for folder in (other, earlier)] == [[GID], [GID]]
    assert (tmp_path / "columns" / GID).is_dir()


def test_the_nonce_of_a_snapshot_leads_nowhere_else(tmp_path: Path) -> None:
    root = ColumnFolder.of_run(str(tmp_path), "demo", "/../../etc").root
    assert root
    assert root.resolve().parent == tmp_path.resolve()


def test_a_disk_that_fails_stops_nothing(
    filed_scene: Callable[..., Scene],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = filed_scene()
    write(scene, 1)
    scene.enqueue(1, samples=[0])

    def fail(*_: object, **__: object) -> None:
        raise OSError("stale handle")

    with monkeypatch.context() as broken:
        broken.setattr(ColumnFolder, "free", fail)
        assert sweep(scene) == 0
    assert "stale handle" in caplog.text
    assert sweep(scene) == 1


# -- saved and restored with their run ----------------------------------------------


def saved(scene: Scene, folder: Path) -> list[str]:
    """Save a run with a retained, a ready and an ended group; return the addresses of the first two."""
    scene.open_trainer()
    gids = write(scene, 3)
    scene.enqueue(3, samples=[2, 2, 0])
    first, second = scene.claim(2)
    scene.submit(first)
    scene.take(1)
    scene.run.ledger.commit(scene.trainer, 1, 1)
    scene.submit(second)
    scene.run.save(folder)
    return [scene.run.columns.put(gid, "ids.npy", COLUMN) for gid in gids[:2]]


def test_a_restored_run_has_the_files_of_its_groups(
    filed_scene: Callable[..., Scene], tmp_path: Path
) -> None:
    scene = filed_scene(retain_batches=1)
    addresses = saved(scene, tmp_path / "s")
    copies = [
        Run.restore(scene.store, tmp_path / "s", name=f"{scene.name}-here"),
        Run.restore(
            scene.store, tmp_path / "s", name=f"{scene.name}-new", columns=tmp_path / "new"
        ),
    ]
    assert [run.limits.columns for run in copies] == [
        str(tmp_path / name) for name in ("columns", "new")
    ]
    for run in copies:
        for address in addresses:
            assert run.columns.read(address, "<i4", 40).tolist() == COLUMN.tolist()
        run.columns.remove()
    assert scene.run.columns.read(addresses[1], "<i4", 40).tolist() == COLUMN.tolist()


def test_a_restore_wants_a_folder_that_nobody_uses(
    filed_scene: Callable[..., Scene], tmp_path: Path
) -> None:
    scene = filed_scene()
    saved(scene, tmp_path / "s")
    for key in run_keys(scene.raw, scene.name):
        scene.raw.unlink(key)
    with pytest.raises(SnapshotError, match="not empty"):
        Run.restore(scene.store, tmp_path / "s")
    assert not run_keys(scene.raw, scene.name)
    (tmp_path / "columns").rename(tmp_path / "aside")
    Run.restore(scene.store, tmp_path / "s")
    assert filed(scene)


def test_a_restore_that_fails_leaves_no_files(
    filed_scene: Callable[..., Scene], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = filed_scene()
    saved(scene, tmp_path / "s")
    before = sorted(tmp_path.rglob("*"))

    def fail(*_: object, **__: object) -> None:
        raise SnapshotError("no")

    for step in (
        "buffer.snapshot.loader.shutil.copytree",
        "buffer.snapshot.loader.SnapshotLoader._publish",
    ):
        with monkeypatch.context() as broken:
            broken.setattr(step, fail)
            with pytest.raises(SnapshotError, match="no"):
                Run.restore(scene.store, tmp_path / "s", name=f"{scene.name}-again")
        assert sorted(tmp_path.rglob("*")) == before
        assert not run_keys(scene.raw, f"{scene.name}-again")


def test_an_altered_file_is_found_before_anything_is_loaded(
    filed_scene: Callable[..., Scene], tmp_path: Path
) -> None:
    scene = filed_scene()
    saved(scene, tmp_path / "s")
    file = next((tmp_path / "s" / "files").rglob("ids.npy"))
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(SnapshotError, match="altered"):
        Run.restore(
            scene.store, tmp_path / "s", name=f"{scene.name}-again", columns=tmp_path / "new"
        )
    assert not (tmp_path / "new").exists()
