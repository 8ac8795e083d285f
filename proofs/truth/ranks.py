"""A program: a data-parallel trainer of two ranks, which writes down what each of them uses."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from buffer.redis.store import Store
from buffer.run.run import Run
from consumer.handle.ranks import join
from consumer.handle.sharded_consumer import ShardedConsumer
from proofs.chaos.history import History
from proofs.truth.case import Case
from proofs.truth.loss_witness import LossWitness
from proofs.truth.world import DEADLINE_S, TASK, World, publish
from tests.warm_process import run_in_warm_process


def train_on_ranks(world: World, model_dir: Path) -> None:
    order = {"url": world.url, "run": world.run.name, "folder": str(world.folder)}
    run_in_warm_process(world.folder / "ranks", main, order, world.case, model_dir)


def main(order: dict[str, str], case: Case, model_dir: Path) -> None:
    ranks = [_fork(order, case, model_dir, rank) for rank in range(case.ranks)]
    if any([os.waitpid(rank, 0)[1] for rank in ranks]):
        sys.exit("a rank has failed")


def _fork(*work: Any) -> int:
    if child := os.fork():
        return child
    try:
        torch.set_num_threads(1)
        _train(*work)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _train(order: dict[str, str], case: Case, model_dir: Path, rank: int) -> None:
    folder = Path(order["folder"])
    place = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=case.ranks)
    run = Run.open(Store(order["url"], deadline_s=DEADLINE_S), order["run"])
    sharded = ShardedConsumer(run, join())
    sharded.open(take_over=True)
    note = History(folder / "history", f"rank-{rank}").note
    loss = LossWitness(model_dir, note, sharded.ranks, case.updates)
    for step in range(1, case.steps + 1):
        batch = sharded.take_batch(step, {TASK: case.batch}, deadline_s=DEADLINE_S)
        loss.fit(step, batch.groups)
        sharded.confirm(step)
        sharded.commit(step, keep=step)
        if sharded.leader and step < case.steps:
            publish(sharded.leader, folder, step)
    sharded.close()
