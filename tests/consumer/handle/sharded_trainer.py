"""A program: lives of a data-parallel trainer of two ranks that only records its batches.

Its order: url, run, folder, and lives: of each the first and last step, die_at: the step after
whose take rank 1 exits, and change_at: the one in which a group of rank 1 changes in memory. Writes `<folder>/<life>/<step>-<rank>.json`; rank 0 keeps its position.
Prints how each rank ended.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import orjson
import torch.distributed as dist

from buffer.errors import GroupChanged
from buffer.ledger.position import Position
from buffer.redis.payloads import checksum
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire import group_bytes
from consumer.handle.batch import Batch
from consumer.handle.ranks import join
from consumer.handle.sharded_consumer import ShardedConsumer
from consumer.handle.torch_dataset import BatchDataset
from tests.memory_fault import overwrite

KILLED = 9
RANKS = 2


def note(batch: Batch, folder: Path, rank: int) -> None:
    part = {
        "manifest": batch.manifest.gids,
        "gids": [group.gid for group in batch.groups],
        "content": [checksum(group_bytes.encode(group)) for group in batch.groups],
        "tokens": int(sum(group.lengths.sum() for group in batch.groups)),
    }
    (folder / f"{batch.step}-{rank}.json").write_bytes(orjson.dumps(part))


def train(order: dict[str, Any], life: int, rank: int) -> None:
    steps = order["lives"][life]
    base = Path(order["folder"])
    folder = base / str(life)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    consumer = ShardedConsumer(Run.open(Store(order["url"]), order["run"]), join())
    saved = base / "position.json"
    position = Position.model_validate_json(saved.read_bytes()) if saved.exists() else Position()
    consumer.open(position=position, take_over=True)
    for batch in BatchDataset(consumer, {"math": 4}, first=steps["first"], last=steps["last"]):
        note(batch, folder, rank)
        if rank == 1 and steps.get("die_at") == batch.step:
            os._exit(KILLED)
        if rank == 1 and steps.get("change_at") == batch.step:
            overwrite(batch.groups[0].response_ids)
        position.add(batch.manifest)
        consumer.confirm(batch.step)
        if rank == 0:
            saved.with_suffix(".new").write_text(position.model_dump_json(), encoding="utf-8")
            saved.with_suffix(".new").replace(saved)
        consumer.commit(batch.step, keep=batch.step)
    consumer.close()


def fork(order: dict[str, Any], life: int, rank: int) -> int:
    if child := os.fork():
        return child
    try:
        train(order, life, rank)
        os._exit(0)
    except GroupChanged as error:
        os._exit(error.exit_code)
    except Exception:
        traceback.print_exc()
    os._exit(1)


def main(order: dict[str, Any]) -> None:
    ends = []
    for life in range(len(order["lives"])):
        (Path(order["folder"]) / str(life)).mkdir()
        ranks = [fork(order, life, rank) for rank in range(RANKS)]
        ends.append([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks])
    sys.stdout.write(orjson.dumps(ends).decode())
