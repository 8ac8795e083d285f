"""`rolloutmq logs`: every line once and in order, through rotations and new lives of a process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import orjson
from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.cli.log_files import LogFiles
from rolloutmq.run_owner import own
from tests.rolloutmq.conftest import ROOT, in_process


def line(second: int, message: str, **fields: object) -> str:
    time = f"2026-01-02T03:{second // 60:02d}:{second % 60:02d}.000"
    entry = {"time": time, "level": "info", "role": "x", "message": message}
    return orjson.dumps(entry | fields).decode() + "\n"


def append(folder: Path, name: str, text: str) -> None:
    with (folder / f"{name}.log").open("a", encoding="utf-8") as log:
        log.write(text)


def rotate(path: Path) -> None:
    shutil.copyfile(path, path.with_name(path.name + ".1"))
    os.truncate(path, 0)


ACTS = st.lists(st.sampled_from(["trainer", "worker-0", "rotate", "poll"]), max_size=40)


@given(ACTS, st.integers(0, 5))
def test_every_line_is_read_once_in_order(acts: list[str], first: int) -> None:
    folder = Path(tempfile.mkdtemp())
    log = folder / "trainer.log"
    for number in range(first):
        append(folder, "trainer", line(0, str(number)))
    files = LogFiles(folder, "")
    seen = [str(entry.fields["message"]) for entry in files.last(100)]
    written = [str(number) for number in range(first)]
    looked = log.stat().st_size if first else 0
    is_cut = False
    for act in [*acts, "poll"]:
        if act == "poll":
            seen += [str(entry.fields["message"]) for entry in files.new()]
            looked = log.stat().st_size if log.exists() else 0
            is_cut = False
        elif act == "rotate" and looked and not is_cut:
            # it is after 64 MiB, so there is a look between two, and before it has grown again
            rotate(log)
            is_cut = True
        elif act == "worker-0" or (not is_cut or log.stat().st_size + 200 < looked):
            append(folder, act.replace("rotate", "trainer"), line(len(written), f"{len(written)}"))
            written.append(str(len(written)))
    shutil.rmtree(folder)
    assert sorted(seen, key=int) == written


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    whole = line(1, "whole")
    append(tmp_path, "trainer", line(0, "before") + whole[:20])
    files = LogFiles(tmp_path, "trainer")
    assert [entry.fields["message"] for entry in files.last(9)] == ["before"]
    assert files.new() == []
    append(tmp_path, "trainer", whole[20:])
    assert [entry.fields["message"] for entry in files.new()] == ["whole"]


def test_lines_of_all_processes_by_time_with_what_is_not_json_below_its_line(
    tmp_path: Path,
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    append(logs, "trainer", line(1, "loads") + "Traceback \x1b[2J\n  ValueError\n" + line(9, "ok"))
    append(logs, "worker-0", line(2, "claims", gid="math-1", seconds=0.123456))
    append(logs, "run", "what the launcher prints\n")
    done = in_process("logs", "--run-dir", str(tmp_path))
    assert [row.split(maxsplit=1)[1] for row in done.stdout.splitlines()] == [
        "trainer     loads",
        r"trainer     Traceback \x1b[2J",
        "trainer       ValueError",
        "worker-0    claims  gid math-1  seconds 0.1235",
        "trainer     ok",
    ]
    done = in_process("logs", "-n", "1", "--json", "--run-dir", str(tmp_path))
    assert orjson.loads(done.stdout)["file"] == "trainer"
    done = in_process("logs", "worker", "--run-dir", str(tmp_path))
    assert len(done.stdout.splitlines()) == 1
    done = in_process("logs", "judge", "--run-dir", str(tmp_path))
    assert done.returncode == 2
    assert "one of run, trainer, worker-0" in done.stderr or "trainer, worker-0" in done.stderr


def test_following_ends_with_the_run_and_shows_what_was_written_last(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    append(logs, "trainer", line(1, "first"))
    with own(tmp_path, "demo", [], 8):
        following = subprocess.Popen(
            [sys.executable, "-m", "rolloutmq", "logs", "-f", "--run-dir", str(tmp_path)],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert following.stdout
        assert "first" in following.stdout.readline()
        append(logs, "worker-0", line(2, "a file that is new"))
        assert "a file that is new" in following.stdout.readline()
        append(logs, "trainer", line(3, "last"))
    assert "last" in following.communicate(timeout=400)[0]
    assert following.returncode == 0
