"""Run as a program: two ranks of the trainer, of which one dies in a step.

Then both start again, as under torchrun with `--max-restarts`, with one store for all attempts; but
they are forked, so that torch is loaded once. argv: the config and the step. Prints how each rank
of each life ended. The parent computes nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import orjson
import torch
from torch._C._distributed_c10d import TCPStore

from buffer.config.config import TrainingConfig
from buffer.config.load import load_config
from consumer.shares import BatchShares
from rolloutmq.launch.training import open_run, train

KILLED = 9
RANKS = 2


def live(config: Path, port: int, attempt: int, rank: int, die_at: int | None) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": attempt}
    os.environ.update({name: str(value) for name, value in (variables | elastic).items()})
    original = BatchShares.read

    def doomed(shares: BatchShares, step: int, *args: Any) -> Any:
        problems = original(shares, step, *args)
        if step == die_at and rank == 1:
            os._exit(KILLED)
        return problems

    BatchShares.read = doomed  # type: ignore[method-assign,assignment]
    settings = load_config(TrainingConfig, config, [])
    section = settings.trainer.model_copy(update={"loop": None})
    settings = settings.model_copy(update={"trainer": section})
    run, model_dir = open_run(settings, None, None, regenerate=False)
    train(run, settings, model_dir, take_over=True, regenerate=False)


def fork(config: Path, port: int, attempt: int, rank: int, die_at: int | None) -> int:
    if child := os.fork():
        return child
    try:
        torch.set_num_threads(1)
        live(config, port, attempt, rank, die_at)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def host_store() -> tuple[int, int]:
    """Start torchrun's store, which has threads, in a process; yield its id and port."""
    reading, writing = os.pipe()
    if child := os.fork():
        return child, int(os.read(reading, 16))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writing, str(store.port).encode())
    signal.pause()
    os._exit(0)


def main(config: Path, step: int) -> None:
    host, port = host_store()
    ends = []
    for attempt, die_at in enumerate((step, None)):
        ranks = [fork(config, port, attempt, rank, die_at) for rank in range(RANKS)]
        ends.append([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks])
    os.kill(host, signal.SIGKILL)
    os.waitpid(host, 0)
    sys.stdout.write(orjson.dumps(ends).decode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
