"""The queues of other projects, by their own packages; each is started as its documents say.

A producer's objects are made before the clock runs, and each queue gets the form that is fastest in
it: arrays, where it takes them.
"""

from __future__ import annotations

import asyncio
import typing
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import typing_extensions

from benchmarks.peers.peer import ARRAYS, COLUMNS, Row, rows
from buffer.wire.group import RolloutGroup

PARTITION = "train"


def _ray() -> Any:
    ray: Any = import_module("ray")
    if not ray.is_initialized():
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    return ray


def _children(*beginnings: str) -> list[int]:
    """Return processes under this one whose program or title begins so."""
    return [
        child.pid
        for child in psutil.Process().children(recursive=True)
        if Path((child.cmdline() or [""])[0]).name.startswith(beginnings)
    ]


class RayQueue:
    """`ray.util.queue.Queue`: an actor that holds arrays in Ray's shared memory."""

    name, durable = "Ray queue", False
    slow = False

    def __init__(self) -> None:
        _ray()
        self._queue: Any = import_module("ray.util.queue").Queue()
        self._queue.qsize()  # the actor has its title once it answers
        self.servers = _children("ray::_QueueActor", "raylet", "gcs_server")

    def prepare(self, groups: list[RolloutGroup]) -> list[dict[str, Any]]:
        return [{name: getattr(group, name) for name in COLUMNS} for group in groups]

    def put(self, chunk: list[dict[str, Any]]) -> None:
        if len(chunk) == 1:
            self._queue.put(chunk[0])
        else:
            self._queue.put_nowait_batch(chunk)

    def take(self, chunk: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if len(chunk) == 1:
            return [self._queue.get()]
        found: list[dict[str, Any]] = self._queue.get_nowait_batch(len(chunk))
        return found

    def rows(self, taken: list[dict[str, Any]]) -> Iterator[Row]:
        for columns in taken:
            yield from rows(SimpleNamespace(**columns))

    def forget(self, _: list[dict[str, Any]]) -> None:
        """Do nothing: what was taken is gone."""


class TransferQueue:
    """`kv_batch_put` and `kv_batch_get` with SimpleStorage; a row is a group of equal lengths."""

    name, durable = "TransferQueue", False
    slow = False

    def __init__(self) -> None:
        _ray()
        self._tq: Any = import_module("transfer_queue")
        self._torch: Any = import_module("torch")
        self._table: Any = import_module("tensordict").TensorDict
        self._tq.init()
        self.servers = _children("ray::TransferQueueController", "ray::SimpleStorageUnit")

    def prepare(self, groups: list[RolloutGroup]) -> tuple[list[str], Any]:
        made = [list(rows(group)) for group in groups]
        columns = {
            name: self._torch.from_numpy(
                np.array([[getattr(row, name) for row in group] for group in made])
            )
            for name in Row._fields
        }
        return [group.gid for group in groups], self._table(columns, batch_size=len(groups))

    def put(self, chunk: tuple[list[str], Any]) -> None:
        self._tq.kv_batch_put(keys=chunk[0], partition_id=PARTITION, fields=chunk[1])

    def take(self, chunk: tuple[list[str], Any]) -> Any:
        return self._tq.kv_batch_get(keys=chunk[0], partition_id=PARTITION)

    def rows(self, taken: Any) -> Iterator[Row]:
        for group in zip(*(taken[name].unbind() for name in Row._fields), strict=True):
            for columns in zip(*group, strict=True):
                yield Row(*(column.numpy() for column in columns))

    def forget(self, chunk: tuple[list[str], Any]) -> None:
        self._tq.kv_clear(keys=chunk[0], partition_id=PARTITION)


class RaggedTransferQueue(TransferQueue):
    """The same for lengths that differ, as verl does it: a row is a rollout, columns are nested."""

    name = "TransferQueue, nested"

    def prepare(self, groups: list[RolloutGroup]) -> tuple[list[str], Any]:
        keys = [f"{group.gid}:{place}" for group in groups for place in range(len(group))]
        made = [row for group in groups for row in rows(group)]
        columns = {
            name: self._torch.nested.as_nested_tensor(
                [self._torch.from_numpy(np.array(getattr(row, name))) for row in made],
                layout=self._torch.jagged,
            )
            for name in ARRAYS
        }
        columns["score"] = self._torch.tensor([row.score for row in made])
        return keys, self._table(columns, batch_size=len(keys))

    def rows(self, taken: Any) -> Iterator[Row]:
        for columns in zip(*(taken[name].unbind() for name in Row._fields), strict=True):
            yield Row(*(column.numpy() for column in columns))


class SkyRL:
    """The queue of SkyRL's Tinker server: `create_future`, and the engine's search for passes."""

    name, durable = "SkyRL's SQLite queue", True
    slow = True
    servers: Sequence[int] = ()

    def __init__(self, folder: str) -> None:
        # skyrl 0.3.0 says that it runs on Python 3.11, where pydantic refuses its TypedDict
        typing.TypedDict = typing_extensions.TypedDict
        self._api: Any = import_module("skyrl.tinker.api")
        self._types: Any = import_module("skyrl.tinker.types")
        engine: Any = import_module("skyrl.tinker.engine")
        url = f"sqlite:///{folder}/tinker.db"
        self._database = self._api.create_async_engine(self._api.get_async_database_url(url))
        self._engine = engine.TinkerEngine.__new__(engine.TinkerEngine)  # without a model
        self._engine.db_engine = engine.create_engine(url)
        for database in (self._database.sync_engine, self._engine.db_engine):
            engine.enable_sqlite_wal(database)
        self._api.SQLModel.metadata.create_all(self._engine.db_engine)
        self._session: Any = engine.Session
        self._pass = self._types.RequestType.FORWARD_BACKWARD
        self._loop = asyncio.new_event_loop()

    def prepare(self, groups: list[RolloutGroup]) -> list[Any]:
        return [self._request(group) for group in groups]

    def _request(self, group: RolloutGroup) -> Any:
        data = [
            {
                "model_input": {
                    "chunks": [{"type": "encoded_text", "tokens": row.input_ids[:-1].tolist()}]
                },
                "loss_fn_inputs": {
                    "target_tokens": {"data": row.input_ids.tolist()},
                    "weights": {"data": row.mask.tolist()},
                    "logprobs": {"data": row.logprobs.tolist()},
                    "advantages": {"data": [row.score]},
                },
            }
            for row in rows(group)
        ]
        return self._types.ForwardBackwardInput(data=data, loss_fn="ppo")

    def put(self, chunk: list[Any]) -> None:
        self._loop.run_until_complete(self._put(chunk))

    async def _put(self, chunk: list[Any]) -> None:
        async with self._api.AsyncSession(self._database) as session:
            for request in chunk:
                await self._api.create_future(session, self._pass, "model", request)
            await session.commit()

    def take(self, _: list[Any]) -> Any:
        with self._session(self._engine.db_engine) as session:
            self._taken = self._engine.find_batchable_model_passes(session, self._pass)
        return self._taken

    def rows(self, taken: Any) -> Iterator[Row]:
        for _, request in taken.values():
            for datum in request.data:
                inputs = datum.loss_fn_inputs
                columns = (inputs.target_tokens, inputs.logprobs, inputs.weights)
                ids, logprobs, mask = (np.array(column.data) for column in columns)
                yield Row(ids, logprobs, mask, inputs.advantages.data[0])

    def forget(self, _: list[Any]) -> None:
        output = self._types.ForwardBackwardOutput
        done = output(loss_fn_output_type="none", loss_fn_outputs=[], metrics={})
        self._engine._complete_futures(dict.fromkeys(self._taken, done))
