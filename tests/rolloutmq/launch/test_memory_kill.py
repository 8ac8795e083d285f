"""A process that the kernel kills for lack of memory, in a cgroup of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rolloutmq.launch.child import FRUITLESS, Child
from rolloutmq.process_ends import ProcessEnd, ProcessFailed, ProcessJournal, read_processes
from rolloutmq.run_owner import own
from rolloutmq.views.explain.processes import explain_folder
from tests.waits import DEADLINE_S

MEMORY = 64 << 20
PROGRAM = """
from pathlib import Path
import time
Path({group!r}, "cgroup.procs").write_text("0")
print("a last line", flush=True)
time.sleep(0.3)
held = b"x" * (8 * {memory})
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A cgroup of 64 MiB, of version 2 or 1."""
    name = f"rollouts-{os.getpid()}"
    for root, limit in (
        ("/sys/fs/cgroup", "memory.max"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
    ):
        group = Path(root, name)
        with suppress(OSError):
            group.mkdir()
        if not (group / limit).is_file():  # no controller of memory, or no right
            with suppress(OSError):
                group.rmdir()
            continue
        (group / limit).write_text(str(MEMORY))
        yield group
        group.rmdir()
        return
    pytest.skip("only root may make a cgroup, and not in every container")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_group: Path) -> None:
    """`python -m rolloutmq` is a program that needs more memory than its group has."""
    folder = tmp_path / "here" / "rolloutmq"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "__main__.py").write_text(PROGRAM.format(group=str(small_group), memory=MEMORY))
    monkeypatch.chdir(folder.parent)


@pytest.mark.usefixtures("program")
def test_lack_of_memory_is_named_with_what_the_process_had_and_ends_a_run_soon(
    tmp_path: Path,
) -> None:
    log = tmp_path / "logs" / "trainer.log"
    log.parent.mkdir()
    journal = ProcessJournal(tmp_path)
    child = Child("trainer", [], log, {}, journal, restarts=20, mark=lambda _: 7)
    names = set[str]()

    def watch() -> None:
        with own(tmp_path, "demo", ["demo.toml"], 8):
            journal.sample([])
            child.start()
            while child.exit_code in (None, -signal.SIGKILL):
                child.keep_alive()
                journal.sample(child.pids)
                names.update(found.name for found in explain_folder(tmp_path))
                time.sleep(0.1)

    try:
        with pytest.raises(ProcessFailed) as caught:
            watch()
    finally:
        child.kill()
        child.wait(DEADLINE_S)
    assert names == {"process/out_of_memory"}
    ends = [end for end in read_processes(tmp_path) if isinstance(end, ProcessEnd)]
    assert [end.kind for end in ends] == ["process/out_of_memory"] * FRUITLESS
    assert [end.code for end in ends] == [-signal.SIGKILL] * FRUITLESS
    assert all(0 < end.memory < 8 * MEMORY for end in ends)
    assert "a last line" not in caught.value.message
    (found,) = explain_folder(tmp_path)
    assert (found.level, found.name) == ("fault", "process/out_of_memory")
