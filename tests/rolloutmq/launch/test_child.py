from __future__ import annotations

import array
import contextlib
import fcntl
import re
import signal
import subprocess
import sys
import termios
import time
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from buffer.redis.retry import Backoff
from rolloutmq.launch import log_writer
from rolloutmq.launch.child import Child
from rolloutmq.process_ends import ProcessEnd, ProcessFailed, ProcessJournal, read_processes
from tests.rolloutmq.conftest import ROOT
from tests.waits import DEADLINE_S, until


def ended(child: Child) -> str:
    return until(lambda: child.keep_alive() or "", "the end of a process")


def test_a_report_has_the_error_and_the_log(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    log.write_text("error: of an earlier start\n", encoding="utf-8")
    child = Child(
        "trainer",
        ["status", "--redis-url", "unix:///no.sock"],
        log,
        {},
        ProcessJournal(tmp_path),
        restarts=5,
    )
    child.start()
    assert ended(child) == (
        f"trainer ended with exit code 3: unix:///no.sock: there is no such socket; its log: {log}"
    )


def test_a_wrong_config_is_not_tried_again(tmp_path: Path) -> None:
    child = Child(
        "worker-0",
        ["worker", "no.toml"],
        tmp_path / "w.log",
        {},
        ProcessJournal(tmp_path),
        restarts=5,
    )
    child.start()
    with pytest.raises(ProcessFailed, match=r"no\.toml: there is no such file") as caught:
        ended(child)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("achieves", [False, True])
def test_lives_without_progress_end_with_the_cause_first_however_long_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, achieves: bool
) -> None:
    monkeypatch.setattr("rolloutmq.launch.child.EARLY_DEATH_S", 0.0, raising=False)
    monkeypatch.setattr("rolloutmq.launch.child.BACKOFF", Backoff(0.0, 0.0))
    steps = count(7)
    child = Child(
        "trainer", ["status", "--redis-url", "unix:///no.sock"], tmp_path / "trainer.log", {},
        ProcessJournal(tmp_path), restarts=5, mark=lambda _: next(steps) if achieves else 7,
    )  # fmt: skip
    child.start()
    reports: list[str | None] = []
    with pytest.raises(ProcessFailed) as caught:
        reports.extend(iter(partial(ended, child), None))
    assert reports.count("trainer restarted") == (5 if achieves else 2)
    cause, how, *_ = caught.value.message.splitlines()
    assert cause == "unix:///no.sock: there is no such socket"
    assert (
        how == f"  trainer ended with exit code 3{'' if achieves else ', 3 times without progress'}"
    )


def test_an_end_is_recorded_with_its_signal_and_the_memory_before_it(tmp_path: Path) -> None:
    """The last line of its log is not the reason why something killed it."""
    log = tmp_path / "p.log"
    log.write_text("a line\n")
    journal = ProcessJournal(tmp_path)
    child = Child("producer", [], log, {}, journal, restarts=5)
    child.start()
    journal.sample(child.pids)
    pid = child.pid
    child.kill()
    assert "a line" not in ended(child)
    start, end = read_processes(tmp_path)
    assert (start.name, start.pid, end.pid) == ("producer", pid, pid)
    assert isinstance(end, ProcessEnd)
    assert (end.kind, end.code, end.is_final) == ("process/killed", -signal.SIGKILL, False)
    assert 0 < end.memory < end.total
    assert 0 < end.free <= end.total


def test_a_process_that_saw_the_end_of_the_run_is_not_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.launch.child.RESTART_DELAY_S", 0.0)
    child = Child(
        "producer", ["--version"], tmp_path / "p.log", {}, ProcessJournal(tmp_path), restarts=5
    )
    child.start()
    assert child.wait(DEADLINE_S)
    assert child.succeeded
    assert [child.keep_alive(is_over=True) for _ in range(3)] == [None] * 3
    assert child.keep_alive() is None  # continued since: it is started again after a pause
    assert child.keep_alive() == "producer restarted"
    child.kill()
    assert child.wait(DEADLINE_S)


PRINTS = """
import os, subprocess, sys

size, lines = int(sys.argv[1]), int(sys.argv[2])
for n in range(lines):
    print(f"line {n} " + "x" * size, flush=True)
    if n == lines // 2:
        os.write(2, b"in between\\n" * 1000)
        subprocess.run([sys.executable, "-c", "print('y' * 3_000_000)"])
print("error: the end")
sys.exit(7)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `python -m rolloutmq` is a program that prints."""
    folder = tmp_path / "here" / "rolloutmq"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "__main__.py").write_text(PRINTS)
    monkeypatch.chdir(folder.parent)
    return folder


@pytest.mark.parametrize(("size", "lines"), [(10, 40_000), (10_000_000, 5)])
def test_a_log_is_bounded_however_fast_a_process_and_its_children_print(
    programs: Path, tmp_path: Path, size: int, lines: int
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    most = 1 << 18
    args = [str(size), str(lines)]
    child = Child(
        "worker-0", args, logs / "w.log", {}, ProcessJournal(tmp_path), restarts=0, log_bytes=most
    )
    child.start()
    largest = 0
    while child.exit_code is None:
        with contextlib.suppress(FileNotFoundError):  # one is being renamed
            largest = max(largest, sum(path.stat().st_size for path in logs.iterdir()))
    assert child.last_error() == "the end"
    assert child.exit_code == 7
    assert largest <= 2 * most
    kept = (logs / "w.log.1").read_bytes() + (logs / "w.log").read_bytes()
    assert kept.endswith(f"line {lines - 1} {'x' * size}\nerror: the end\n".encode()[-most:])
    if size < 1000:  # nothing is missing between the two files
        numbers = [int(line.split()[1]) for line in kept.split(b"\n") if line.startswith(b"line ")]
        assert numbers == [*range(numbers[0], lines)]


def test_the_log_goes_on_when_the_one_that_started_it_is_killed(
    programs: Path, tmp_path: Path
) -> None:
    (programs / "__main__.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "while not Path('go').exists():\n    time.sleep(0.01)\nprint('it went on')\n"
    )
    log = tmp_path / "w.log"
    starter = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\n"
        f"from rolloutmq.launch.child import Child\n"
        f"from rolloutmq.process_ends import ProcessJournal\n"
        f"journal = ProcessJournal(Path({str(tmp_path)!r}))\n"
        f"Child('w', [], Path({str(log)!r}), {{}}, journal, restarts=0).start()\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    )
    started = subprocess.run([sys.executable, "-c", starter], cwd=tmp_path / "here", check=False)
    assert started.returncode == -signal.SIGKILL
    (tmp_path / "here" / "go").touch()
    for _ in range(6000):
        if log.exists() and log.read_text() == "it went on\n":
            return
        time.sleep(0.01)
    raise AssertionError("nothing was logged")


def test_what_the_disk_did_not_take_is_counted(tmp_path: Path) -> None:
    log = tmp_path / "gone" / "w.log"
    command = [sys.executable, "-IS", log_writer.__file__, str(log), str(1 << 20)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as writer:
        assert writer.stdin
        for line in (b"first\n", b"second\n"):  # once the second is read, the first is lost
            writer.stdin.write(line)
            writer.stdin.flush()
            while _pending(writer.stdin.fileno()):
                time.sleep(0.01)
        log.parent.mkdir()
        writer.stdin.write(b"third\n")
    said = re.fullmatch(
        r"\n(\d+) bytes were not logged: .*\n((?:second\n)?third\n)", log.read_text()
    )
    assert said
    assert int(said[1]) + len(said[2]) == len("first\nsecond\nthird\n")


def _pending(pipe: int) -> int:
    """The bytes in a pipe that nobody has read."""
    size = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, size)
    return size[0]
