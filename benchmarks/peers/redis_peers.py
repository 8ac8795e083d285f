"""Measure three users of Redis: this project, plain SET and MGET, and PipelineRL's stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from benchmarks import pickled_stream
from benchmarks.bench_run import TASK, BenchRun
from benchmarks.peers.peer import ARRAYS, Row, rows
from benchmarks.sample import Shape
from benchmarks.server import BenchServer
from buffer.job import Job
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from consumer.handle.rollout_consumer import RolloutConsumer


class _OnRedis:
    """A way to use one server; `label` says what it is, the server whether it is durable."""

    label = ""
    slow = False

    def __init__(self, server: BenchServer) -> None:
        self.durable = server.name == "durable"
        self.name = f"{self.label}, durable" if self.durable else self.label
        self.servers = [server.process]
        self.raw = server.raw


class _Results(NamedTuple):
    jobs: list[Job]
    groups: list[RolloutGroup]


class Ours(_OnRedis):
    """`submit_many` of a worker, `take_batch` of a trainer, all checks."""

    label = "ours"

    def __init__(self, server: BenchServer) -> None:
        super().__init__(server)
        self._run = BenchRun(server)
        # a prefetcher would read what is measured before the clock runs
        self._consumer = RolloutConsumer(self._run.run, prefetch_bytes=0, nonce=self._run.trainer)
        self._step = 0

    def prepare(self, groups: list[RolloutGroup]) -> _Results:
        first = groups[0]
        shape = Shape(len(first), first.prompt_ids.size, int(first.lengths[0]))
        return _Results(self._run.claim(len(groups), shape), groups)

    def put(self, chunk: _Results) -> None:
        self._run.submit(*chunk)

    def take(self, chunk: _Results) -> list[RolloutGroup]:
        self._step += 1
        return self._consumer.take_batch(self._step, {TASK: len(chunk.groups)}).groups

    def rows(self, taken: list[RolloutGroup]) -> Iterator[Row]:
        for group in taken:
            yield from rows(group)

    def forget(self, _: _Results) -> None:
        self._consumer.commit(self._step, keep=self._step)


class Plain(_OnRedis):
    """The encoded bytes, 8 `SET` in a pipeline and 16 values in an `MGET`: no queue at all."""

    label = "SET x8, MGET x16"

    def prepare(self, groups: list[RolloutGroup]) -> dict[str, bytes]:
        return {f"raw:{group.gid}": group_bytes.encode(group) for group in groups}

    def put(self, chunk: Mapping[str, bytes]) -> None:
        pairs = list(chunk.items())
        for start in range(0, len(pairs), 8):
            pipe = self.raw.pipeline(transaction=False)
            for name, value in pairs[start : start + 8]:
                pipe.set(name, value)
            pipe.execute()

    def take(self, chunk: Mapping[str, bytes]) -> list[bytes]:
        names = list(chunk)
        starts = range(0, len(names), 16)
        return [value for start in starts for value in self.raw.mget(names[start : start + 16])]

    def rows(self, taken: list[bytes]) -> Iterator[Row]:
        for value in taken:
            yield from rows(group_bytes.decode(value))

    def forget(self, chunk: Mapping[str, bytes]) -> None:
        self.raw.delete(*chunk)


class Stream(_OnRedis):
    """PipelineRL's way."""

    label = pickled_stream.NAME

    def __init__(self, server: BenchServer) -> None:
        super().__init__(server)
        self._last = b"0"

    def prepare(self, groups: list[RolloutGroup]) -> list[pickled_stream.Rollouts]:
        return [pickled_stream.as_lists(group) for group in groups]

    def put(self, chunk: list[pickled_stream.Rollouts]) -> None:
        pickled_stream.add(self.raw, chunk)

    def take(self, chunk: list[pickled_stream.Rollouts]) -> list[pickled_stream.Rollouts]:
        self._last, taken = pickled_stream.read(self.raw, len(chunk), self._last)
        return taken

    def rows(self, taken: list[pickled_stream.Rollouts]) -> Iterator[Row]:
        for rollout in (rollout for group in taken for rollout in group):
            ids, logprobs, mask = (rollout[name] for name in ARRAYS)
            yield Row(ids, logprobs, mask, rollout["reward"]["score"])

    def forget(self, _: object) -> None:
        pickled_stream.forget(self.raw)
