"""`rolloutmq key`: files that only their owner may read, and that no mistake overwrites."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from buffer.redis.signing import Key, read_keys
from tests.rolloutmq.conftest import ROOT, in_process


def key(folder: Path, *words: str) -> str:
    done = in_process("key", *words, cwd=folder)
    said = done.stdout + done.stderr
    assert not re.search("[0-9a-f]{64}", said)
    assert done.returncode in (0, 2), said
    return f"{done.returncode} {said}"


def test_keys_are_made_renewed_and_revoked(tmp_path: Path) -> None:
    known, own = tmp_path / "workers.keys", tmp_path / "gpu7.key"
    create = ("gpu7", "--keys", known.name, "--out", own.name)
    assert key(tmp_path, *create) == "0 gpu7.key has the new key of gpu7\n"
    first = Key.read(own)
    assert read_keys(known) == {"gpu7": [first.secret]}
    key(tmp_path, "gpu8", "--keys", known.name, "--out", "gpu8.key")
    key(tmp_path, *create)
    assert read_keys(known)["gpu7"] == [first.secret, Key.read(own).secret]
    key(tmp_path, *create, "--revoke")
    assert read_keys(known)["gpu7"] == [Key.read(own).secret]
    said = key(tmp_path, "gpu7", "--keys", known.name, "--revoke")
    assert said == "0 gpu7 has no key any more\n"
    assert list(read_keys(known)) == ["gpu8"]
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("gpu7", "--keys", "known"), "add --out gpu7.key"),
        (("gpu7", "--keys", "known", "--out", "known"), "has keys of others"),
        (("gpu8", "--keys", "known", "--out", "own"), "has keys of others"),
        (("gpu7", "--keys", "known", "--out", "text"), "64 hex"),
        (("gpu8", "--keys", "known", "--revoke"), "has no key of gpu8"),
        (("a/b", "--keys", "known", "--out", "new"), "cannot be used"),
    ],
)
def test_a_mistake_changes_no_file(tmp_path: Path, words: tuple[str, ...], reason: str) -> None:
    key(tmp_path, "gpu7", "--keys", "known", "--out", "own")
    text = tmp_path / "text"
    text.write_text("important\n")
    text.chmod(0o600)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    said = key(tmp_path, *words)
    assert said.startswith("2 ")
    assert reason in said
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_worker_has_the_name_of_its_key(tmp_path: Path) -> None:
    key(tmp_path, "gpu7", "--keys", "workers.keys", "--out", "gpu7.key")
    config, file = str(ROOT / "configs" / "demo.toml"), f"worker.key_file={tmp_path}/gpu7.key"
    done = in_process("worker", config, "--id", "gpu8", "--set", file)
    assert done.returncode == 2
    assert "has keys of gpu7, not of gpu8" in done.stderr
