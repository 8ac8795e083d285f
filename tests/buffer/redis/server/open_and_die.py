"""Run as a program: a trainer that opens a run and is killed after its n-th script.

argv: URL of the server, file with the position, n.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from buffer.ledger.position import Position
from buffer.redis.store import Store
from buffer.run.run import Run
from consumer.handle.rollout_consumer import RolloutConsumer

call = Store.call
scripts = 0


def dying(store: Store, script: str, *args: Any, **options: Any) -> list[Any]:
    """Call a script, and end this process once its reply has arrived."""
    global scripts
    reply = call(store, script, *args, **options)
    scripts += 1
    if scripts == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return reply


if __name__ == "__main__":
    run = Run.open(Store(sys.argv[1]), "demo")
    position = Position.model_validate_json(Path(sys.argv[2]).read_text(encoding="utf-8"))
    Store.call = dying  # type: ignore[assignment,method-assign]
    RolloutConsumer(run).open(position=position, take_over=True)
