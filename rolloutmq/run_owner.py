"""Record which `rolloutmq run` owns a run's folder, what it does, and how it ended.

    launcher.lock    held (flock) as long as the owner lives: the kernel frees it however it ends
                     content: a LaunchRecord, rewritten in place by the owner

Only the holder of the lock writes the record. A signal is sent only while the lock is held, and
only to the process of the record: same host, pid and start time, since pids are reused.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import IO

import psutil
from pydantic import BaseModel, ValidationError

from buffer.errors import ConfigError, RoleHeld, RolloutMQError, RunError, describe
from buffer.redis.url import mask_url
from rolloutmq.process_ends import ProcessEnd, ProcessFailed
from rolloutmq.versions import all_versions

LOCK_FILE = "launcher.lock"


class Stage(StrEnum):
    """What an owner does, or how it ended."""

    PREPARING = "preparing"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    DIED = "died"


FIRST_STOP, SECOND_STOP = signal.SIGTERM, signal.SIGQUIT  # what the first and the second Ctrl-C do
_ENDED = frozenset({Stage.STOPPED, Stage.FINISHED, Stage.FAILED})


class LaunchRecord(BaseModel):
    """What the owner of a folder wrote about itself.

    `detail`: what it waits for, or why it failed. `account`: that of an ended run. `ended_by`: the
    process whose end ended the run.
    """

    run: str
    pid: int
    started: float
    host: str
    command: list[str]
    steps: int
    stage: Stage = Stage.PREPARING
    detail: str = ""
    account: str = ""
    versions: dict[str, str] = {}
    ended_by: ProcessEnd | None = None

    @property
    def has_ended(self) -> bool:
        return self.stage in (*_ENDED, Stage.DIED)


class OwnedFolder:
    """A run's folder whose lock this process holds."""

    def __init__(self, lock: IO[bytes], record: LaunchRecord) -> None:
        self._lock = lock
        self.record = record

    def check(self) -> None:
        """Raise RunError if the folder was deleted."""
        path = Path(self._lock.name)
        with suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(self._lock.fileno())):
                return
        raise RunError(
            f"{path.parent} was deleted while the run used it, with its checkpoints and its server",
            hint="start the run again: it begins at step 1",
        )

    def note(
        self,
        stage: Stage,
        detail: str = "",
        *,
        account: str = "",
        steps: int | None = None,
        ended_by: ProcessEnd | None = None,
    ) -> None:
        """Write what the owner does now, and the steps of the run if they have changed."""
        changed: dict[str, object] = {"stage": stage, "detail": detail, "account": account}
        changed["ended_by"] = ended_by
        changed |= {} if steps is None else {"steps": steps}
        self.record = self.record.model_copy(update=changed)
        line = self.record.model_dump_json().encode() + b"\n"
        # always as long as the first one, so that it can be written on a full disk, too
        os.pwrite(self._lock.fileno(), line.ljust(8192), 0)  # a reader takes the first line


@contextmanager
def own(
    folder: Path, run: str, command: list[str], steps: int, check: Callable[[], None] = lambda: None
) -> Iterator[OwnedFolder]:
    """Hold the lock of a run's folder, and record how the block ends. Raises RoleHeld.

    `check` is called under the lock, while the folder still has the record of its last owner.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started = psutil.Process().create_time()
    record = LaunchRecord(
        run=run, pid=os.getpid(), started=started, host=socket.gethostname(), command=command,
        steps=steps, versions=all_versions(),
    )  # fmt: skip
    (folder / LOCK_FILE).touch()
    with (folder / LOCK_FILE).open("r+b") as lock:
        _take(lock, folder)
        check()
        owned = OwnedFolder(lock, record)
        owned.note(Stage.PREPARING)
        try:
            yield owned
        except KeyboardInterrupt:
            owned.note(Stage.STOPPED, account=owned.record.account)
            raise
        except BaseException as error:
            reason = str(error) if isinstance(error, RolloutMQError) else describe(error)
            end = error.end if isinstance(error, ProcessFailed) else None
            owned.note(Stage.FAILED, mask_url(reason), ended_by=end)
            raise
        owned.note(Stage.FINISHED, account=owned.record.account)


def _take(lock: IO[bytes], folder: Path) -> None:
    # a reader holds the lock for microseconds; an owner holds it longer than this
    end = time.monotonic() + 1.0
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise RoleHeld(
                    f"another `rolloutmq run` is running in {folder}",
                    hint=f"`rolloutmq stop --run-dir {folder}` stops it; or set another [run] "
                    "name or dir",
                ) from None
        time.sleep(0.02)


def is_owned(folder: Path) -> bool:
    path = folder / LOCK_FILE
    if not path.is_file():
        return False
    with path.open(encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def read_record(folder: Path) -> LaunchRecord | None:
    """Return what the newest owner wrote, or None; its stage is DIED if it was killed."""
    is_alive = is_owned(folder)
    try:
        record = LaunchRecord.model_validate_json((folder / LOCK_FILE).read_bytes().split(b"\n")[0])
    except (OSError, ValidationError):
        return None  # no owner yet
    if is_alive or record.stage in _ENDED:
        return record
    return record.model_copy(update={"stage": Stage.DIED})


def interrupt(folder: Path, *, at_once: bool) -> LaunchRecord:
    """Make the owner of a folder stop in order, or `at_once`; return its record from before.

    An owner that already stops only reacts to `at_once`. Raises ConfigError without an owner, and
    RoleHeld if it is a process of another machine.
    """
    if not is_owned(folder):
        raise ConfigError(
            f"no `rolloutmq run` is running in {folder}",
            hint="`rolloutmq runs` lists the runs; processes that were started one by one are "
            "stopped where they run",
        )
    record = read_record(folder)
    owner = _identify(record)
    if record is None or owner is None:
        where = f"on {record.host}" if record else "elsewhere"
        raise RoleHeld(
            f"the `rolloutmq run` in {folder} is no process of this machine: it runs {where}",
            hint="run `rolloutmq stop` there",
        )
    is_stopping = record.stage is Stage.STOPPING
    # two numbers: the kernel could merge two signals of one number
    numbers = ([] if is_stopping else [FIRST_STOP]) + ([SECOND_STOP] if at_once else [])
    try:
        for number in numbers:
            owner.send_signal(number)
    except psutil.NoSuchProcess:
        pass  # it ended just now
    except psutil.AccessDenied as error:
        raise RolloutMQError(
            f"process {record.pid} belongs to another user",
            hint=f"`rolloutmq stop` as {owner.username()}",
        ) from error
    return record


def _identify(record: LaunchRecord | None) -> psutil.Process | None:
    """Return the process that wrote a record, if it is one of this machine."""
    if record is None or record.host != socket.gethostname():
        return None
    try:
        process = psutil.Process(record.pid)
    except psutil.NoSuchProcess:
        return None
    # start times of one process differ by less: they are derived from the boot time
    return process if abs(process.create_time() - record.started) < 1.0 else None


def folders_below(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def known_folders(root: Path) -> list[Path]:
    """Return the run folders below `root`: running ones first, then by last use."""
    found = folders_below(root)
    runs = [path for path in found if (path / LOCK_FILE).is_file() or (path / "run.json").is_file()]
    return sorted(runs, key=lambda path: (is_owned(path), last_change(path)), reverse=True)


def last_change(folder: Path) -> float:
    """Return when a run's log, record or steps changed last, in seconds since 1970."""
    names = (LOCK_FILE, "run.json", "steps.jsonl", "evaluations.jsonl")
    return max(
        (file.stat().st_mtime for name in names if (file := folder / name).exists()), default=0.0
    )


def choose_folder(run_dir: Path | None, root: Path) -> Path:
    """Return `run_dir`, else the first of `known_folders`. Raises ConfigError without one."""
    if run_dir is not None:
        if not run_dir.is_dir():
            raise ConfigError(f"there is no folder {run_dir}", hint="`rolloutmq runs` lists them")
        return run_dir
    folders = known_folders(root)
    if not folders:
        raise ConfigError(
            f"there is no run below {root.resolve()}",
            hint="pass --run-dir FOLDER, or change to the folder in which the run was started",
        )
    return folders[0]
