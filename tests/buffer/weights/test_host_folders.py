from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from buffer.errors import WireError
from buffer.weights import host_folders
from buffer.weights.host_folders import HostFolders
from tests.waits import until

PROCESS = """
import sys, time
from pathlib import Path
from buffer.weights.host_folders import HostFolders
def fill(folder):
    (folder / "half").write_bytes(b"x")
    with open(sys.argv[1], "a") as log:
        log.write("fill\\n")
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    (folder / "weights").write_bytes(b"w")
folders = HostFolders()
folder = folders.get("v1", fill, lambda folder: None)
print(sorted(file.name for file in folder.iterdir()), flush=True)
sys.stdin.read()
folders.close()
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the folders of this test's processes lie."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / f"rolloutmq-weights-{os.getuid()}"


def never(folder: Path) -> None:
    raise AssertionError(f"{folder} is filled or checked")


def passes(folder: Path) -> None:
    """Every folder is as it should be."""


def filled(text: str) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "weights").write_text(text)

    return fill


def test_one_process_fills_the_next_takes_over_and_the_last_deletes(
    tmp_path: Path, home: Path
) -> None:
    log, gate = tmp_path / "log", tmp_path / "gate"
    command = [sys.executable, "-c", PROCESS, str(log), str(gate)]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdin=-1, stdout=-1, text=True)

    def fills() -> int:
        return log.read_text().count("fill") if log.exists() else 0

    dies = start()
    until(lambda: fills() == 1, "a process that fills")
    others = [start() for _ in range(3)]
    dies.kill()
    dies.communicate()
    until(lambda: fills() == 2, "the next one")
    gate.touch()
    for process in others:
        assert process.stdout
        assert process.stdout.readline() == "['half', 'weights']\n"
    assert fills() == 2
    others[0].kill()
    others[0].communicate()
    assert {file.name for file in home.iterdir()} == {"v1", "v1.lock"}
    for process in others[1:]:
        process.communicate("")
        assert process.returncode == 0
    assert not list(home.iterdir())


def test_a_folder_is_kept_while_used_filled_again_where_damaged_and_swept(home: Path) -> None:
    one, two = HostFolders(), HostFolders()
    first = one.get("v1", filled("1"), passes)
    assert two.get("v1", never, never) == first
    second = one.get("v2", filled("2"), passes)
    one.keep_only(second)
    assert first.exists()
    two.close()
    assert not first.exists()

    def refuse(folder: Path) -> None:
        raise WireError("damaged")

    (second / "weights").write_text("?")
    assert one.get("v2", never, passes) == second
    assert (one.get("v2", filled("2"), refuse) / "weights").read_text() == "2"
    with pytest.raises(WireError):
        one.get("v3", refuse, passes)
    assert (one.get("v3", filled("3"), passes) / "weights").read_text() == "3"
    with pytest.raises(WireError, match="not a name"):
        one.get("../v4", never, passes)
    (home / ".old.1.tmp").mkdir()
    (home / "old").mkdir()
    (home / "old.lock").touch()
    three = HostFolders()
    three.get("v2", never, never)
    assert {file.name for file in home.iterdir()} == {"v2", "v2.lock", "v3", "v3.lock"}
    one.close()
    three.close()
    assert not list(home.iterdir())
    home.chmod(0o755)
    with pytest.raises(WireError, match="other users"):
        one.get("v1", never, passes)


def test_a_process_that_stalls_is_not_waited_for(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir(mode=0o700)
    monkeypatch.setattr(host_folders, "STALL_S", 0.1)
    with (home / "v1.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folders = HostFolders()
        folder = folders.get("v1", filled("1"), passes)
        assert folder.name.startswith("v1-")
        folders.close()
