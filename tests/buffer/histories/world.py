"""A model and the server it is compared with: what both say, side by side (I1 to I8)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import redis

from buffer.ids import LANES, POOLS
from buffer.limits import RunLimits, Straggler, TaskLimits
from buffer.redis.key_table import TOKEN_ROWS
from tests.buffer.faulty_store import MUTATING, FaultyStore
from tests.buffer.histories.model import (
    LEASE_MS,
    MAX_TRIES,
    STAGES,
    TAIL_TRIES,
    TASKS,
    THRESHOLD,
    WORKERS,
    Group,
    Model,
)
from tests.buffer.scene import Scene

MOST_CHUNKS = 100  # of a payload: each call that keeps turns adds one


class World(Model):
    """What all moves share. A move is a method that an actor's class adds: it is made on the server
    and in the model, and the outcomes are compared.
    """

    def __init__(
        self,
        store: FaultyStore,
        raw: redis.Redis,
        name: str,
        on_straggler: Straggler,
        order: str = "staleness",
        tokens: int | None = None,
    ) -> None:
        super().__init__(on_straggler, order, tokens)
        limits = RunLimits(
            stale_threshold=THRESHOLD,
            lease_ms=LEASE_MS,
            worker_timeout_ms=3 * LEASE_MS,
            role_timeout_ms=3 * LEASE_MS,
            token_threshold=tokens,
            max_tries=MAX_TRIES,
            max_skipped_share=1.0,
            on_straggler=on_straggler,
            tail_batch_max_tries=TAIL_TRIES,
            order=order,
            tasks={task: TaskLimits() for task in TASKS},
        )
        self.store = store
        store.run = name
        self.moved = Counter[str]()
        """moves that found something to do"""
        self.scene = Scene(store, raw, name, limits)
        self.scene.open_producer()

    def make(self, move: str, arguments: dict[str, Any], replies_are_lost: bool) -> None:
        """One move. Where replies get lost, all that it calls is called again, and must change
        nothing (I13).
        """
        self.store.repeats = MUTATING if replies_are_lost else ()
        calls = self.store.replies.total()
        getattr(self, move)(**arguments)
        self.moved[move] += self.store.replies.total() > calls
        self.store.repeats = ()
        self.check_totals()
        self.check_stages()

    def totals(self) -> dict[str, dict[str, int]]:
        audit = self.scene.run.account.totals()
        assert audit.clean, audit.faults
        return {task.task: task.stages for task in audit.tasks}

    def newest(self, group: Group) -> Any:
        return self.scene.payload(group.gid)

    def stored_bytes(self, gid: str, token: str) -> int:
        chunks = self.scene.keys.payload_chunks(gid, token, MOST_CHUNKS)
        return sum(self.scene.raw.strlen(chunk) for chunk in chunks)

    def check_totals(self) -> None:
        for task, stages in self.totals().items():
            assert {p: stages[p] for p in STAGES} == {p: len(self.at(p, task)) for p in STAGES}
        assert self.scene.run.memory.count().held == self.held()

    def check_stages(self) -> None:
        """Who is in which line, pool (in order, with its score) and set of leases."""
        raw = self.scene.raw.pipeline(transaction=False)
        keys = self.scene.keys
        raw.zrange(keys.dead, 0, -1).zrange(keys.leases, 0, -1)
        for worker in WORKERS:
            raw.hkeys(keys.leased(worker))
        for task in TASKS:
            for lane in LANES:
                raw.xrange(keys.jobs(task, lane))
            for status in POOLS:
                raw.zrange(keys.pool(task, status), 0, -1, withscores=True)
        replies = iter(raw.execute())
        running = self.at("running")
        assert gids(next(replies)) == sorted(group.gid for group in self.at("dead"))
        assert gids(next(replies)) == sorted({group.owner for group in running})
        for worker in WORKERS:
            assert gids(gid for gid in next(replies) if gid != b"digest") == sorted(
                group.gid for group in running if group.owner == worker
            )
        for task in TASKS:
            for lane in LANES:
                waiting = [group.gid for group in self.at("waiting", task) if group.lane == lane]
                assert gids(fields[b"gid"] for _, fields in next(replies)) == sorted(waiting)
            for status in POOLS:
                members = [
                    (member.decode().partition(":")[2], score) for member, score in next(replies)
                ]
                assert members == [
                    (group.gid, self.score(group)) for group in self.pooled(status, task)
                ]

    def check_everything(self) -> None:
        self.scene.check()
        stages = {"completed": "pool", "aborted": "pool", "expired": "pool"}
        for group in self.groups.values():
            task = group.task
            draw = int(group.gid[-10:])
            assert self.scene.run.account.stages(task, draw) == [
                stages.get(group.stage, group.stage)
            ]
            assert bool(self.scene.raw.exists(self.scene.keys.dead_letter(group.gid))) == (
                group.stage == "dead"
            )
            if self.readable(group):
                assert int(self.scene.record(group.gid)["tries"]) == group.tries, group
                read = self.scene.run.buffer.read(self.newest(group))
                tokens = len(read.states[0].response_ids)
                assert tokens + 2 * len(read.turns) == 2 * len(group.made_by), group
        self.check_tokens()
        for step, manifest in self.batches.items():
            assert self.scene.run.ledger.manifest(step) == manifest
        self.check_payloads()

    def check_tokens(self) -> None:
        """I1: the stages of the account have the tokens that the records have."""
        for task, account in self.scene.run.account.tokens().items():
            made = dict.fromkeys(("waiting", "running", "pool", "taken"), 0)
            made["running"] = account.reported
            for group in self.groups.values():
                record = self.scene.record(group.gid) if group.task == task else {}
                if record.get("stage") in made:
                    made[record["stage"]] += int(record.get("made", 0))
            stages = {stage: account.table[stage] for stage in made}
            assert stages == made
            assert account.table.keys() == {*TOKEN_ROWS, *made}
            assert all(number >= 0 for number in account.table.values()), account

    def check_payloads(self) -> None:
        """I12: once garbage is freed, the bytes that stay are those that records name, and all of
        them.
        """
        while self.scene.run.payloads.collect():
            pass
        keys = self.scene.keys
        raw = self.scene.raw
        names = [name.decode() for name in raw.scan_iter(keys.payload("*", "*"), count=1000)]
        stays = {name for name in names if raw.pttl(name) == -1}
        held = [group for group in self.groups.values() if self.held_bytes(group)]
        # of what is archived only the result is kept, until the batch is forgotten
        tokens = {(group.gid, token) for group in held for token in ("init", group.result)}
        tokens -= {(group.gid, "init") for group in held if group.kept_in}
        # groups of one claim have one token
        chunks = {
            (group.gid, group.result): self.newest(group).chunks
            for group in held
            if not group.kept_in
        }
        assert stays == {
            name for one in tokens for name in keys.payload_chunks(*one, chunks.get(one, 1))
        }


def gids(members: Iterable[bytes]) -> list[str]:
    return sorted(member.decode() for member in members)
