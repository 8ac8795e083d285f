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
from buffer.redis.scripts import ScriptCall
from buffer.redis.store import Store
from buffer.run.run import Run
from consumer.handle.rollout_consumer import RolloutConsumer

send = Store.send
scripts = 0


def dying(store: Store, what: str, commands: Any, **options: Any) -> list[Any]:
    """Call scripts, and end this process once their replies have arrived."""
    global scripts
    answers = send(store, what, commands, **options)
    scripts += any(isinstance(each, ScriptCall) for each in commands)
    if scripts == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return answers


if __name__ == "__main__":
    run = Run.open(Store(sys.argv[1]), "demo")
    position = Position.model_validate_json(Path(sys.argv[2]).read_text(encoding="utf-8"))
    Store.send = dying  # type: ignore[assignment,method-assign]
    RolloutConsumer(run).open(position=position, take_over=True)
