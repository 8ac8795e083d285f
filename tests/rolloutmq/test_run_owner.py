from __future__ import annotations

import fcntl
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from buffer.errors import ConfigError, RoleHeld
from rolloutmq.run_owner import (
    LOCK_FILE,
    LaunchRecord,
    OwnedFolder,
    Stage,
    interrupt,
    is_owned,
    own,
    read_record,
)
from tests.rolloutmq.conftest import ROOT, in_process, json_of, rolloutmq

OWNER = """
import signal, sys, time
from pathlib import Path
from rolloutmq.run_owner import FIRST_STOP, SECOND_STOP, Stage, own
for number in (FIRST_STOP, SECOND_STOP):
    signal.signal(number, signal.default_int_handler)
with own(Path(sys.argv[1]), "demo", ["demo.toml"], 8) as owned:
    try:
        owned.note(Stage.RUNNING)
        print("ready", flush=True)
        time.sleep(300)
    except KeyboardInterrupt:
        owned.note(Stage.STOPPING, "waiting for trainer")
        if sys.argv[2] == "slow":
            time.sleep(300)
        raise
"""


@pytest.fixture(params=["quick"])
def owner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process that owns the folder and ends in order, or waits for ever while it does."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), request.param],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def stage(folder: Path) -> Stage | None:
    record = read_record(folder)
    return record.stage if record else None


def _stop(owned: OwnedFolder) -> None:
    owned.note(Stage.STOPPING, "a long line that the next note is shorter than")
    owned.note(Stage.STOPPING, "step 3")
    raise KeyboardInterrupt


def test_there_is_one_owner_and_its_end_is_recorded(tmp_path: Path) -> None:
    assert (is_owned(tmp_path), read_record(tmp_path)) == (False, None)
    with own(tmp_path, "demo", ["demo.toml"], 8):
        assert (is_owned(tmp_path), stage(tmp_path)) == (True, Stage.PREPARING)
        with pytest.raises(RoleHeld, match="another `rolloutmq run`"):
            own(tmp_path, "demo", [], 8).__enter__()
    assert (is_owned(tmp_path), stage(tmp_path)) == (False, Stage.FINISHED)
    with pytest.raises(KeyboardInterrupt), own(tmp_path, "demo", [], 8) as owned:
        _stop(owned)
    record = read_record(tmp_path)
    assert record
    assert (record.stage, record.detail) == (Stage.STOPPED, "")
    with pytest.raises(ConfigError), own(tmp_path, "demo", [], 8):
        raise ConfigError("no such model\nsecond line")
    record = read_record(tmp_path)
    assert record
    assert (record.stage, record.detail) == (Stage.FAILED, "no such model\nsecond line")


def test_a_killed_owner_has_died(tmp_path: Path, owner: subprocess.Popen[str]) -> None:
    owner.kill()
    owner.wait()
    assert stage(tmp_path) is Stage.DIED
    with pytest.raises(ConfigError, match="no `rolloutmq run` is running"):
        interrupt(tmp_path, at_once=True)


@pytest.mark.parametrize("wrong", [{"started": 1.0}, {"host": "elsewhere"}, {"pid": 2**22 + 1}])
def test_a_foreign_process_gets_no_signal(tmp_path: Path, wrong: dict[str, object]) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as foreign:
        facts = {
            "run": "demo",
            "pid": foreign.pid,
            "started": psutil.Process(foreign.pid).create_time(),
            "host": socket.gethostname(),
            "command": [],
            "steps": 8,
        }
        record = LaunchRecord.model_validate(facts | wrong)
        (tmp_path / LOCK_FILE).write_text(record.model_dump_json(), encoding="utf-8")
        with (tmp_path / LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(RoleHeld, match="is no process of this machine"):
                interrupt(tmp_path, at_once=True)
        time.sleep(0.05)
        assert foreign.poll() is None
        foreign.kill()


def test_stop_waits_for_the_end(tmp_path: Path, owner: subprocess.Popen[str]) -> None:
    done = rolloutmq("stop", "--run-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "run demo stopped before its first checkpoint" in done.stdout
    assert owner.wait(400) == -signal.SIGINT
    assert "no `rolloutmq run` is running" in in_process("stop", "--run-dir", str(tmp_path)).stderr


@pytest.mark.parametrize("owner", ["slow"], indirect=True)
def test_stop_now_ends_one_that_waits_and_stop_again_does_not(
    tmp_path: Path, owner: subprocess.Popen[str]
) -> None:
    waiting = subprocess.Popen(
        [sys.executable, "-m", "rolloutmq", "stop", "--run-dir", str(tmp_path)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert waiting.stdout
    for line in waiting.stdout:
        if "waiting for trainer" in line:
            break
    interrupt(tmp_path, at_once=False)
    assert stage(tmp_path) is Stage.STOPPING
    assert owner.poll() is None
    told = json_of(in_process("stop", "--now", "--run-dir", str(tmp_path), "--json"))
    assert (told["stage"], told["checkpoint"], told["steps"]) == ("stopped", 0, 8)
    assert owner.wait(400) == -signal.SIGINT
    assert "stopped before its first checkpoint" in waiting.communicate()[0]
    assert waiting.returncode == 0
