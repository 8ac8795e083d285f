"""`rolloutmq logs`: every line once and in order, through rotations and new lives of a process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.run_owner import own
from rolloutmq.views.explain import log_files
from rolloutmq.views.explain.log_files import Entry, LogFiles, LogFilter
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
        "trainer     loads", r"trainer     Traceback \u001b[2J", "trainer       ValueError",
        "worker-0    claims  gid math-1  seconds 0.1235", "trainer     ok",
    ]  # fmt: skip
    done = in_process("logs", "-n", "1", "--json", "--run-dir", str(tmp_path))
    assert orjson.loads(done.stdout)["file"] == "trainer"
    done = in_process("logs", "worker", "--run-dir", str(tmp_path))
    assert len(done.stdout.splitlines()) == 1
    done = in_process("logs", "judge", "--run-dir", str(tmp_path))
    assert done.returncode == 2
    assert "trainer, worker-0" in done.stderr


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


LINES = st.lists(
    st.tuples(
        st.sampled_from(["info", "warning", "error", ""]),
        st.sampled_from(["", "math-0000000001", "math-00000000011", "xmath-0000000001"]),
        st.integers(1, 12),
    ),
    max_size=60,
)


@given(LINES, st.integers(0, 30), st.booleans(), st.integers(1, 400))
def test_the_newest_lines_that_match_are_found_however_far_back(
    made: list[tuple[str, str, int]], most: int, is_rotated: bool, first_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.setattr(log_files, "FIRST_BYTES", first_bytes)
        for second, (level, gid, step) in enumerate(made):
            text = line(second, f"{second}", level=level, gid=gid, step=step)
            append(folder, "trainer", text if level else f"{gid} step {step}\n")
            if is_rotated and second == len(made) // 2:
                rotate(folder / "trainer.log")
        for wanted in (
            LogFilter(level="warning"),
            LogFilter(about="math-0000000001"),
            LogFilter(about="1", level="error"),
            LogFilter(since="2026-01-02T03:00:20", until="2026-01-02T03:00:30"),
        ):
            everything = LogFiles(folder, "").last(1000)
            found = LogFiles(folder, "").last(most, wanted)
            matching = [entry for entry in everything if wanted.passes(entry)]
            assert found == matching[max(0, len(matching) - most) :]
    about = LogFilter(about="math-0000000001")
    matches = [about.passes(Entry("", "", f'{{"gid":"{gid}"}}', {})) for _, gid, _ in made]
    assert matches == [gid == "math-0000000001" for _, gid, _ in made]


def test_a_train_step_has_the_lines_that_were_written_during_it(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    ended = time.mktime((2026, 1, 2, 3, 0, 10, 0, 0, -1))
    step = {"step": 7, "gids": [], "ended_s": ended, "metrics": {"time/step_s": 4.0}}
    (tmp_path / "steps.jsonl").write_bytes(orjson.dumps(step) + b"\n")
    append(logs, "trainer", "".join(line(at, f"at {at}") for at in range(15)))
    append(logs, "worker-0", line(2, "keeps groups for step 7"))
    done = in_process("logs", "--about", "7", "--run-dir", str(tmp_path))
    said = [row.split(maxsplit=2)[2] for row in done.stdout.splitlines()]
    assert said == ["keeps groups for step 7", *(f"at {at}" for at in range(7, 11))]
