"""Files that payloads refer to: freed with their group, saved and restored with their run (I14)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.errors import ConfigError, MediaError, SnapshotError
from buffer.ids import group_id
from buffer.redis.media_folder import MediaFolder
from buffer.run import Run
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import MediaRef, RolloutState, Status
from tests.buffer.keyspace import run_keys
from tests.buffer.scene import Scene

GID = group_id("math", 0)


@pytest.fixture
def folder(tmp_path: Path) -> MediaFolder:
    made = MediaFolder(tmp_path / "m", "demo", "n")
    made.claim()
    return made


@pytest.fixture
def scene_with_media(make_scene: Callable[..., Scene], tmp_path: Path) -> Callable[..., Scene]:
    return lambda **changes: make_scene(media=str(tmp_path / "media"), **changes)


def media_of(scene: Scene) -> MediaFolder:
    assert scene.run.media is not None
    return scene.run.media


def illustrate(scene: Scene, count: int, task: str = "math") -> list[str]:
    """Files for the next draws, as a sampler writes them: before the groups are there."""
    start = scene.run.jobs.cursor(task)
    gids = [group_id(task, start + i) for i in range(count)]
    for gid in gids:
        media_of(scene).put(gid, "image.npy", f"image of {gid}".encode())
    return gids


def illustrated(scene: Scene) -> set[str]:
    return set(media_of(scene).gids())


def sweep(scene: Scene) -> int:
    """All folders, by a janitor of its own."""
    janitor = Run(scene.store, scene.name, scene.run.nonce, scene.run.limits).janitor
    swept = [janitor.sweep()]
    while swept[-1].has_more:
        swept.append(janitor.sweep())
    return sum(s.media for s in swept)


# -- the folder ----------------------------------------------------------------


def test_file_is_found_by_its_uri_wherever_the_folder_is(
    folder: MediaFolder, tmp_path: Path
) -> None:
    uri = folder.put(GID, "0.experts.npy", b"abc")
    assert uri == f"run://{GID}/0.experts.npy"
    assert folder.put(GID, "0.experts.npy", b"abcd") == uri
    assert folder.path(uri).read_bytes() == b"abcd"
    folder.root.rename(tmp_path / "elsewhere")
    moved = MediaFolder(tmp_path / "elsewhere", "demo", "n")
    assert moved.path(uri).read_bytes() == b"abcd"
    assert (list(moved.gids()), moved.names(GID), moved.names(group_id("math", 1))) == (
        [GID],
        ["0.experts.npy"],
        [],
    )


@pytest.mark.parametrize(
    "uri",
    [
        *("file:///etc/passwd", "https://host/run/math-0000000000/x", f"run:/{GID}/x"),
        *(f"run://{GID}{end}" for end in ("", "/", "/..", "/.x", "/a/b", "/../../x", "/x\0")),
        *(f"run://../{GID}/x", "run://math/x", "run:///x", "run://owner.json"),
    ],
)
def test_uri_of_nothing_in_the_folder_is_refused(folder: MediaFolder, uri: str) -> None:
    with pytest.raises(ConfigError, match="no file of a run"):
        folder.path(uri)


@given(st.integers(0, 2**20), st.integers(1, 255), st.booleans())
def test_a_column_in_a_file_is_what_was_written_or_refused(
    at: int, change: int, is_cut: bool
) -> None:
    with TemporaryDirectory() as root:
        folder = MediaFolder(Path(root), "run", "nonce")
        column = np.arange(40, dtype="<i4")
        address = folder.put_column(GID, "ids.npy", column)
        assert folder.read_column(address, "<i4", 40).tolist() == column.tolist()
        file = folder.path(address.partition("#")[0])
        data = bytearray(file.read_bytes())
        if is_cut:
            del data[at % len(data) :]
        else:
            data[at % len(data)] ^= change
        file.write_bytes(data)
        with pytest.raises(MediaError, match="CRC-32"):
            folder.read_column(address, "<i4", 40)
        with pytest.raises(MediaError, match="CRC-32"):
            folder.read_column(address.partition("#")[0], "<i4", 40)


def test_folder_belongs_to_one_run(folder: MediaFolder, tmp_path: Path) -> None:
    folder.claim()
    for name, nonce in (("demo", "another"), ("other", "n")):
        stranger = MediaFolder(folder.root, name, nonce)
        assert not stranger.is_ours()
        with pytest.raises(ConfigError, match="not empty"):
            stranger.claim()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    with pytest.raises(ConfigError, match="not empty"):
        MediaFolder(tmp_path / "photos", "demo", "n").claim()


def test_freeing_is_harmless_when_repeated_and_follows_no_link(
    folder: MediaFolder, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("x")
    folder.put(GID, "a", b"a")
    (folder.root / GID / "link").symlink_to(tmp_path / "precious")
    assert folder.names(GID) == ["a"]
    folder.free(GID)
    folder.free(GID)
    assert list(folder.gids()) == []
    assert (tmp_path / "precious").read_text() == "x"


# -- freed with their groups ----------------------------------------------------


def test_files_live_as_long_as_their_group(scene_with_media: Callable[..., Scene]) -> None:
    scene = scene_with_media(max_tries=1, stale_threshold=9)
    gids = illustrate(scene, 9)
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
    (not_drawn_yet,) = illustrate(scene, 1)
    assert sweep(scene) == 3
    assert illustrated(scene) == {waiting, running, ready, aborted, taken, dead, not_drawn_yet}
    assert sweep(scene) == 0
    scene.run.jobs.drop(dead)
    assert sweep(scene) == 1
    assert (
        media_of(scene).path(f"run://{ready}/image.npy").read_bytes()
        == f"image of {ready}".encode()
    )
    scene.check()


def test_files_of_archived_groups_live_as_long_as_their_batch_is_retained(
    scene_with_media: Callable[..., Scene],
) -> None:
    scene = scene_with_media(retain_batches=1)
    scene.open_trainer()
    batches = []
    for step in range(1, 4):
        gids = illustrate(scene, 2)
        scene.ready(step, step, lineage="l1")
        batches.append(set(gids))
        scene.take(step, math=2)
        scene.run.ledger.commit(scene.trainer, step, step)
        sweep(scene)
        assert illustrated(scene) == batches[-1]
    # half archived: its first group is, its batch is not
    scene.raw.hset(scene.keys.ledger("train"), mapping={"freed": 2, "forgotten": 2})
    assert sweep(scene) == 0
    scene.raw.hset(scene.keys.ledger("train"), mapping={"freed": 3, "forgotten": 3})
    scene.raw.unlink(scene.keys.batch("train", 3))
    assert sweep(scene) == 2


def test_what_a_crash_left_is_found_by_a_later_sweep(
    scene_with_media: Callable[..., Scene],
) -> None:
    scene = scene_with_media()
    gids = illustrate(scene, 2)
    scene.enqueue(2, samples=[0, 0])
    # one folder half deleted, one written to again by a worker that was given up
    media_of(scene).path(f"run://{gids[0]}/image.npy").unlink()
    assert sweep(scene) == 2
    media_of(scene).put(gids[1], "late.npy", b"")
    assert sweep(scene) == 1
    assert illustrated(scene) == set()


def test_the_sweep_of_a_workers_heartbeats_touches_no_disk(
    scene_with_media: Callable[..., Scene],
) -> None:
    scene = scene_with_media()
    illustrate(scene, 1)
    scene.enqueue(1, samples=[0])
    scene.raw.hset(scene.keys.clock, mapping={"seen_ms": 10**6, "swept_ms": 0})
    assert scene.run.janitor.sweep_in_turn().media == 0
    assert scene.run.janitor.sweep().media == 1


def test_nothing_is_deleted_that_is_not_ours(
    scene_with_media: Callable[..., Scene], tmp_path: Path
) -> None:
    scene = scene_with_media()
    illustrate(scene, 1)
    scene.enqueue(1, samples=[0])
    owner = tmp_path / "media" / "owner.json"
    owner.rename(tmp_path / "owner.json")
    assert sweep(scene) == 0
    (tmp_path / "owner.json").rename(owner)
    assert sweep(scene) == 1


def test_a_disk_that_fails_stops_nothing(
    scene_with_media: Callable[..., Scene],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = scene_with_media()
    illustrate(scene, 1)
    scene.enqueue(1, samples=[0])

    def fail(*_: object, **__: object) -> None:
        raise OSError("stale handle")

    with monkeypatch.context() as broken:
        broken.setattr(MediaFolder, "free", fail)
        assert sweep(scene) == 0
    assert "stale handle" in caplog.text
    assert sweep(scene) == 1


# -- saved and restored with their run ----------------------------------------------


def saved(scene: Scene, folder: Path) -> list[str]:
    """Save a run with files of a ready, a retained and an ended group; return the first two gids."""
    scene.open_trainer()
    gids = illustrate(scene, 3)
    media_of(scene).put(gids[1], "empty", b"")
    media_of(scene).put(gids[1], "big", bytes(range(256)) * 20)
    scene.enqueue(3, samples=[2, 2, 0])
    first, second = scene.claim(2)
    ref = MediaRef(kind="image", uri=f"run://{second.gid}/big", tokens=2)
    states = [
        RolloutState(
            index=i, prompt_ids=[1, 2, 3], multimodal=[ref], response_ids=[4], logprobs=[-1], spans=[(0, 1, 0, "l0")],
            routed_experts=f"run://{second.gid}/experts-{i}.npy", status=Status.COMPLETED, reward={"score": 1.0},
            finish_reason="stop",
        )
        for i in range(2)
    ]  # fmt: skip
    for i in range(2):
        media_of(scene).put(second.gid, f"experts-{i}.npy", np.full(3, i, "<i2").tobytes())
    scene.submit(first)
    scene.take(1)
    scene.run.ledger.commit(scene.trainer, 1, 1)
    scene.run.buffer.submit("w0", second, RolloutGroup(second.gid, "math", states), 2)
    scene.run.save(folder)
    return gids[:2]


def test_a_resumed_run_has_the_files_of_its_groups(
    scene_with_media: Callable[..., Scene], tmp_path: Path
) -> None:
    scene = scene_with_media(retain_batches=1)
    archived, ready = saved(scene, tmp_path / "s")
    again = Run.restore(
        scene.store, tmp_path / "s", name=f"{scene.name}-again", media=tmp_path / "new"
    )
    assert again.media is not None
    assert again.limits == scene.run.limits.model_copy(update={"media": str(tmp_path / "new")})
    names = {gid: again.media.names(gid) for gid in again.media.gids()}
    assert names[archived] == ["image.npy"]
    assert names[ready] == ["big", "empty", "experts-0.npy", "experts-1.npy", "image.npy"]
    for gid in (archived, ready):
        for name in again.media.names(gid):
            uri = f"run://{gid}/{name}"
            assert again.media.path(uri).read_bytes() == media_of(scene).path(uri).read_bytes()
    # what payloads say is as it was, and true in either folder
    group = again.buffer.read(scene.payload(ready))
    assert group.states[1].routed_experts == f"run://{ready}/experts-1.npy"
    assert again.media.path(group.states[0].multimodal[0].uri).stat().st_size == 5120
    assert again.media.is_ours()
    assert not MediaFolder(again.media.root, scene.name, scene.run.nonce).is_ours()


def test_resume_wants_a_folder_that_nobody_uses(
    scene_with_media: Callable[..., Scene], tmp_path: Path
) -> None:
    scene = scene_with_media()
    saved(scene, tmp_path / "s")
    name = f"{scene.name}-again"
    with pytest.raises(SnapshotError, match="two runs cannot share"):
        Run.restore(scene.store, tmp_path / "s", name=name)
    with pytest.raises(SnapshotError, match="not empty"):
        Run.restore(scene.store, tmp_path / "s", name=name, media=tmp_path / "media")
    assert not run_keys(scene.raw, name)
    for key in run_keys(scene.raw, scene.name):
        scene.raw.unlink(key)
    with pytest.raises(SnapshotError, match="not empty"):
        Run.restore(scene.store, tmp_path / "s")
    (tmp_path / "media").rename(tmp_path / "aside")
    resumed = Run.restore(scene.store, tmp_path / "s")
    assert resumed.media is not None
    assert resumed.media.is_ours()


def test_a_resume_that_fails_leaves_no_files(
    scene_with_media: Callable[..., Scene], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_with_media()
    saved(scene, tmp_path / "s")

    def fail(*_: object, **__: object) -> None:
        raise SnapshotError("no")

    for step in (
        "buffer.snapshot.loader.shutil.copytree",
        "buffer.snapshot.loader.SnapshotLoader._publish",
    ):
        with monkeypatch.context() as broken:
            broken.setattr(step, fail)
            with pytest.raises(SnapshotError, match="no"):
                Run.restore(
                    scene.store, tmp_path / "s", name=f"{scene.name}-again", media=tmp_path / "new"
                )
        assert sorted(path.name for path in tmp_path.iterdir()) == ["media", "s"]
        assert not run_keys(scene.raw, f"{scene.name}-again")


def test_an_altered_file_is_found_before_anything_is_loaded(
    scene_with_media: Callable[..., Scene], tmp_path: Path
) -> None:
    scene = scene_with_media()
    saved(scene, tmp_path / "s")
    file = next((tmp_path / "s" / "files").rglob("image.npy"))
    file.write_bytes(file.read_bytes().replace(b"image of", b"image 0f"))
    with pytest.raises(SnapshotError, match="altered"):
        Run.restore(scene.store, tmp_path / "s", name=f"{scene.name}-again", media=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_run_without_files_knows_no_folder(scene: Scene, tmp_path: Path) -> None:
    scene.run.save(tmp_path / "s")
    assert scene.run.media is None
    with pytest.raises(SnapshotError, match="no media folder"):
        Run.restore(scene.store, tmp_path / "s", name="x", media=tmp_path / "new")
