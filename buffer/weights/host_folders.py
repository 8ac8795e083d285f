"""Folders that the processes of a user share on one host: the first fetches, its neighbours wait.

Each has a lock file beside it, on which flock decides; the kernel frees it however a process ends.

    a process          holds the lock      if it dies there
    fills the folder   alone               the next one deletes what is unfinished, and fills it
    uses the folder    with others         nothing: the last one that leaves deletes it
    leaves             alone, if it can    the next process that starts deletes it (`_sweep`)

A folder appears by a rename, filled and checked, where only this user can enter. Neighbours check
it only when they ask for it again, after an error.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from buffer.errors import WireError
from buffer.weights.new_folder import new_folder

log = logging.getLogger("rolloutmq.worker")

POLL_S = 0.05

STALL_S = 60.0
"""A process that fills a folder is given up if it adds no byte for this time."""

Step = Callable[[Path], None]


class HostFolders:
    """The folders that this process uses, in TMPDIR."""

    def __init__(self) -> None:
        self._is_swept = False
        self._locks: dict[Path, int] = {}

    def get(self, key: str, fill: Step, check: Step) -> Path:
        """Return the folder of `key`, which `fill` has filled here or in another process.

        `fill` and `check` raise WireError or OSError unless the folder is what it must be.
        """
        if Path(key).name != key:
            raise WireError(f"not a name of weights: {key!r}")
        folder = _private_folder() / key
        if not self._is_swept:
            _sweep(folder.parent)
            self._is_swept = True
        if folder in self._locks:
            try:
                check(folder)
            except (WireError, OSError) as error:
                log.warning("%s is damaged, and filled again: %s", folder, error)
                shutil.rmtree(folder, ignore_errors=True)
                self.release(folder)
            else:
                return folder
        progress = _Progress(folder)
        while True:
            lock = os.open(_lock_of(folder), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if _is_ours(lock, folder, fill):
                    self._locks[folder] = lock
                    return folder
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
            if progress.has_stalled():
                log.warning("the process that fetches %s for this host makes no progress", folder)
                folder = folder.with_name(f"{folder.name}-{uuid.uuid4().hex[:8]}")
            time.sleep(POLL_S)

    def keep_only(self, folder: Path) -> None:
        for other in [other for other in self._locks if other != folder]:
            self.release(other)

    def release(self, folder: Path) -> None:
        """Leave a folder, if it is one of these. The last process that leaves deletes it."""
        lock = self._locks.pop(folder, None)
        if lock is not None:
            _delete_unused(folder, lock)

    def close(self) -> None:
        for folder in list(self._locks):
            self.release(folder)


class _Progress:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bytes = -1
        self._since_s = time.monotonic()

    def has_stalled(self) -> bool:
        files = self._folder.parent.glob(f".{self._folder.name}.*.tmp/*")
        now = time.monotonic()
        try:
            size = sum(file.stat().st_size for file in files)
        except OSError:  # it was deleted or renamed: that is progress
            size = -1
        if size != self._bytes:
            self._bytes = size
            self._since_s = now
        return now - self._since_s > STALL_S


def _is_ours(lock: int, folder: Path, fill: Step) -> bool:
    """Return whether `lock` is held for the use of `folder`, which exists; fill it if need be."""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not folder.exists():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_current(lock, folder):
                return False
            if not folder.exists():
                _delete_unfinished(folder)
                with new_folder(folder) as unfinished:
                    fill(unfinished)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # between two locks, and before the first, a process that leaves may have deleted both
    return _is_current(lock, folder) and folder.exists()


def _private_folder() -> Path:
    """Return a folder that no other user can enter. Raises WireError."""
    folder = Path(tempfile.gettempdir()) / f"rolloutmq-weights-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        hint = "delete it, or set TMPDIR to a folder of your own"
        raise WireError(f"other users can change weights in {folder}", hint=hint)
    return folder


def _sweep(parent: Path) -> None:
    """Delete what killed processes left."""
    for file in parent.glob("*.lock"):
        try:
            lock = os.open(file, os.O_RDWR)
        except FileNotFoundError:
            continue
        _delete_unused(file.with_suffix(""), lock)


def _delete_unused(folder: Path, lock: int) -> None:
    """Delete a folder unless a process uses or fills it; close its lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_current(lock, folder):
            shutil.rmtree(folder, ignore_errors=True)
            _delete_unfinished(folder)
            _lock_of(folder).unlink(missing_ok=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


def _delete_unfinished(folder: Path) -> None:
    for unfinished in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _is_current(lock: int, folder: Path) -> bool:
    """Return whether the open file is still the lock of `folder`, and was not deleted."""
    try:
        return os.path.samestat(os.fstat(lock), _lock_of(folder).stat())
    except FileNotFoundError:
        return False
