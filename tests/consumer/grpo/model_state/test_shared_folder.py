from __future__ import annotations

import os
from pathlib import Path

import pytest

from buffer.errors import WireError
from buffer.weights.folder_manifest import verify
from buffer.weights.shared_folder import FolderSender
from buffer.wire.rollout import PolicyVersion


def save(folder: Path) -> None:
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(bytes(range(256)))


def publish(shared: FolderSender, version: int) -> Path:
    path, _ = shared.write(PolicyVersion("ab12cd34", version), save)
    shared.prune()
    return Path(path)


@pytest.mark.parametrize("damage", ["torn", "changed", "gone", "manifest", "other"])
def test_reader_refuses_a_folder_that_is_not_what_was_published(
    tmp_path: Path, damage: str
) -> None:
    path, checksum = FolderSender(tmp_path).write(PolicyVersion("ab12cd34", 4), save)
    file = Path(path) / "model.safetensors"
    if damage == "torn":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "changed":
        file.write_bytes(bytes(reversed(range(256))))
    elif damage == "gone":
        file.unlink()
    elif damage == "manifest":
        (Path(path) / "manifest.json").write_text("{}", encoding="utf-8")
    else:
        checksum = FolderSender(tmp_path).write(PolicyVersion("ab12cd34", 5), save)[1]
    with pytest.raises((WireError, OSError)):
        verify(Path(path), checksum)


def test_write_leaves_nothing_when_saving_fails(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        save(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        FolderSender(tmp_path).write(PolicyVersion("ab12cd34", 4), fail)
    assert list(tmp_path.iterdir()) == []


def test_prune_keeps_the_newest_and_what_is_not_weights(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "notes-2024").mkdir()
    shared = FolderSender(tmp_path, keep=2)
    for version in range(4):
        publish(shared, version)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"precious", "notes-2024", "ab12cd34-000002", "ab12cd34-000003"}


def test_prune_keeps_what_was_just_published_when_the_clock_was_set_back(tmp_path: Path) -> None:
    shared = FolderSender(tmp_path, keep=2)
    for version in range(3):
        path = publish(shared, version)
        os.utime(path, (4e9, 4e9))
    assert publish(shared, 3).exists()


def test_clear_deletes_what_a_killed_writer_left(tmp_path: Path) -> None:
    shared = FolderSender(tmp_path)
    path = publish(shared, 1)
    (tmp_path / f".{path.name}.0123abcd.tmp").mkdir()
    (tmp_path / ".something.tmp").mkdir()
    shared.clear()
    assert {p.name for p in tmp_path.iterdir()} == {path.name, ".something.tmp"}
