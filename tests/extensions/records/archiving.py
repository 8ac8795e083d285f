"""A trainer of a run with an archive, killed at its n-th operation on the archive's folder.

argv: the server's URL, the run's name, the last step, n (0: never). Commits each step once it is
taken, as a trainer whose checkpoints are instant.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from buffer.ids import new_nonce
from buffer.redis.store import Store
from buffer.run.run import Run
from rolloutmq.extensions.records.archive import Archiver

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def kill_at(folder: str, at: int) -> None:
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in EVENTS and folder in str(args[0]):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def main(url: str, name: str, last: int, at: int) -> None:
    store = Store(url)
    run = Run.open(store, name)
    kill_at(run.limits.archive, at)
    committed = run.ledger.steps().committed
    nonce = new_nonce()
    run.trainers.open(nonce, step=committed, lineage=f"l{committed + 1}", take_over=True)
    archiver = Archiver(run, {}, Path("none"))
    for step in range(committed + 1, last + 1):
        run.ledger.take(nonce, step, {"math": 2})
        run.ledger.commit(nonce, step, step)
        archiver.committed(step, 0)
    archiver.closed()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
