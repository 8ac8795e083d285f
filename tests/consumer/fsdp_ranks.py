"""Run as a program: two ranks of `consumer.examples.fsdp_loop`; one dies after it took a step, then both start again.

argv: the config, a folder for rendezvous, and the step. Prints how each rank of each life ended. Forks, so that torch
is loaded once; the parent computes nothing.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist

from buffer.config.loader import load_config
from consumer.config import TrainingConfig
from consumer.examples.fsdp_loop import FsdpLoop

KILLED, RANKS = 9, 2


def live(config: Path, rendezvous: Path, rank: int, die_at: int | None) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    loop = FsdpLoop(load_config(TrainingConfig, config, []))
    take = loop.consumer.take_batch

    def doomed(step: int, *args: Any, **kwargs: Any) -> Any:
        batch = take(step, *args, **kwargs)
        if step == die_at and rank == 1:
            os._exit(KILLED)
        return batch

    loop.consumer.take_batch = doomed  # type: ignore[method-assign]
    loop.open()
    loop.train()


def fork(config: Path, rendezvous: Path, rank: int, die_at: int | None) -> int:
    if child := os.fork():
        return child
    try:
        torch.set_num_threads(1)
        live(config, rendezvous, rank, die_at)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def main(config: Path, folder: Path, step: int) -> None:
    ends = []
    for name, die_at in (("first", step), ("second", None)):
        ranks = [fork(config, folder / name, rank, die_at) for rank in range(RANKS)]
        ends.append([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks])
    sys.stdout.write(orjson.dumps(ends).decode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
