"""A trainer of twelve lines that dies at a line: `CheckpointedConsumer` and what it is used by.

What it trains is its model: the groups, in order, as the weights hold them. Groups that come again
must have the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import save_file

from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire import group_bytes
from consumer.handle import checkpointed_consumer
from consumer.handle.batch import Batch
from consumer.handle.checkpointed_consumer import CheckpointedConsumer

FILES = {__file__, checkpointed_consumer.__file__}
TRAINED = "trained.json"


class Model:
    """Weights that remember each group they were trained on."""

    def __init__(self, checkpoint: Path | None) -> None:
        text = (checkpoint / TRAINED).read_bytes() if checkpoint else b"[]"
        self.trained: list[list[Any]] = orjson.loads(text)

    def train(self, batch: Batch, deliveries: Path) -> None:
        for group in batch.groups:
            digest = hashlib.sha256(group_bytes.encode(group)).hexdigest()
            self.trained.append([batch.step, group.gid, digest])
        (deliveries / f"{batch.step}-{os.getpid()}").write_bytes(
            orjson.dumps(self.trained[-len(batch.groups) :])
        )

    def save(self, folder: Path) -> None:
        save_file({"w": np.array([len(self.trained)], np.float32)}, folder / "model.safetensors")

    def save_state(self, folder: Path) -> None:
        (folder / TRAINED).write_bytes(orjson.dumps(self.trained))


def train(run: Run, folder: Path) -> None:
    with CheckpointedConsumer(run, folder, take_over=True) as consumer:
        model = Model(consumer.checkpoint)
        for batch in consumer.steps(model.save, save_state=model.save_state, checkpoint_every=2):
            model.train(batch, folder)
            consumer.report(batch.step, {"loss/policy": 0.0})


def main(url: str, name: str, folder: Path, at: int) -> None:
    """Train a run, and die before the `at`-th line of FILES (0: never)."""
    run = Run.open(Store(url), name)
    seen = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        seen += event == "line"
        if seen == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return count

    if at:
        sys.settrace(lambda frame, *_: count if frame.f_code.co_filename in FILES else None)
    train(run, folder)
