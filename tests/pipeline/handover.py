"""The two ends of a weight transfer, as processes that stop in its middle to be killed.

What comes in and goes out:

    python -m tests.pipeline.handover worker     an Announcement (JSON) on stdin; prints "middle"
    python -m tests.pipeline.handover trainer    nothing; prints an Announcement, then "middle"
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from buffer.weights import process_group
from buffer.weights.process_group import ProcessGroup
from buffer.weights.transport import Announcement
from consumer.senders.tensor_server import MemorySnapshot, TensorServer
from producer_workers.engines.tensor_receiver import TensorReceiver

LABEL = "l1:7"
CHUNK_BYTES = 1000
NUMBERS = 5000
"""float32 in each of two files: 21 chunks of 1,000 bytes a file."""


def save(folder: Path) -> None:
    """Two shards and something that is no weights."""
    for number in (1, 2):
        weights = np.arange(NUMBERS, dtype=np.float32) * number
        file = folder / f"model-{number}.safetensors"
        save_file(
            {f"layer.{number}": weights.reshape(100, -1), f"bias.{number}": weights[:3]}, file
        )
    (folder / "config.json").write_text("{}")


def announce(
    server: TensorServer, snapshot: MemorySnapshot, folder: Path, backend: str = "gloo"
) -> Announcement:
    server.offer(snapshot)
    facts = snapshot.facts()
    shapes = snapshot.shapes()
    checksum = snapshot.checksum
    met = (snapshot.label, backend, "127.0.0.1", server.port, server.token)
    return Announcement(*met, str(folder), checksum, facts, shapes)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def stop_in_the_middle() -> None:
    """After 25 chunks, in the second file: say so, and do nothing more."""
    finish = ProcessGroup._finish
    chunks = 0

    def count(self: ProcessGroup, *moving: Any) -> Any:
        nonlocal chunks
        done = finish(self, *moving)
        chunks += 1
        if chunks == 25:
            say("middle")
            threading.Event().wait()
        return done

    ProcessGroup._finish = count  # type: ignore[method-assign, assignment]


def main(end: str) -> None:
    process_group.CHUNK_BYTES = CHUNK_BYTES
    stop_in_the_middle()
    if end == "worker":
        TensorReceiver(Announcement.parse(sys.stdin.readline()), limit_s=60)
    else:
        server = TensorServer("127.0.0.1", "gloo")
        announced = announce(
            server, MemorySnapshot.take(LABEL, save, "rolloutmq-test-"), Path("nowhere")
        )
        say(announced.to_json().decode())
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1])
