"""Copy the index of a run as of one instant, page by page, without a lock and without a stop.

Keys are WATCHed while they are read. Every script that changes a record, a manifest or a dead
letter also changes a watched key (a pool, a stream, counters); heartbeats and wake-ups change none.

The copy is of a run at rest: without trainer, producer, workers, events and garbage. Running groups
wait again, in the lane of groups that resume, with their try given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import redis

from buffer.groups.record_walk import PAGE, PAGE_DRAWS, Record, RecordWalk
from buffer.ids import ENDS, POOLS, TEACH
from buffer.limits import SCHEMA, RunLimits
from buffer.redis.keys import Keys
from buffer.redis.scripts import Advance
from buffer.redis.store import Store
from buffer.snapshot.folder import Item, Kind

LEDGERS = ("train", "eval")

_ROLES = {
    f"{role}{suffix}"
    for role in ("trainer", "producer")
    for suffix in (
        "", "_seen_ms", "_waited_ms", "_pause_ms", "_pause_buckets",
        "_turns", "_doing", "_doing_ms", "_closed",
    )
}  # fmt: skip
"""Fields of `control` that change with every heartbeat of a role's holder."""

_RESTING = {"stage": "waiting", "token": "", "owner": ""}


class IndexCut:
    """Copies the index once; `groups` and `was_running` then count what was copied."""

    def __init__(self, store: Store, keys: Keys, limits: RunLimits) -> None:
        self._store = store
        self._keys = keys
        self._tasks = {name: task.lanes for name, task in limits.tasks.items()}
        self._walk = RecordWalk(store, keys)
        self._last_entries: dict[str, tuple[int, int]] = {}  # by stream
        self.meta: dict[str, str] = {}
        self._teaching = 0  # groups of the task that wait for a teacher
        self.groups = 0
        self.was_running = 0

    def copy(self, write: Callable[[Item], object], advance: Advance) -> bool:
        """Write all items; return False, to discard them, if the index changed meanwhile."""
        with self._store.bulk.pipeline() as pipe:
            try:
                pipe.watch(*self.watched())
                control = self._control()
                for done, item in enumerate(self._items(control), start=1):
                    write(item)
                    advance("index", done)
                pipe.multi()
                pipe.exists(self._keys.meta)
                pipe.execute()
            except redis.WatchError:
                return False
        # heartbeats change this hash all the time, so it is not watched but compared without them
        return control == self._control()

    def watched(self) -> list[str]:
        """Return keys of which at least one changes whenever a group moves."""
        keys = self._keys
        fixed = [keys.meta, keys.lineages, keys.dead, keys.bytes, *map(keys.ledger, LEDGERS)]
        for task in self._tasks:
            fixed.append(keys.progress(task))
            fixed += [*self._jobs(task), *keys.all_pools([task])]
            fixed += [keys.ended(task, end) for end in ENDS]
        return fixed

    def _items(self, control: dict[bytes, bytes]) -> Iterator[Item]:
        keys = self._keys
        meta = self._ask("hgetall", keys.meta)
        self.meta = {k.decode(): v.decode() for k, v in meta.items()} | {"schema": SCHEMA}
        yield Item("hash", "control", _flat(control))
        yield from self._list(keys.lineages)
        yield from self._hash(keys.bytes)
        yield from self._hash(keys.cursors)
        for ledger in LEDGERS:
            yield from self._ledger(ledger)
        for task in self._tasks:
            yield from chain(*(self._bits(keys.ended(task, end)) for end in ENDS))
            yield from chain(*map(self._stream, self._jobs(task)))
            yield from chain(*(self._zset(keys.pool(task, status)) for status in POOLS))
        yield from self._zset(keys.dead)
        for task in self._tasks:
            self._teaching = 0
            yield from self._groups(task)
            teaching = str(self._teaching).encode()
            yield from self._hash(keys.progress(task), running=b"0", teaching=teaching)

    def _jobs(self, task: str) -> list[str]:
        return [self._keys.jobs(task, lane) for lane in self._tasks[task]]

    def _control(self) -> dict[bytes, bytes]:
        fields: dict[bytes, bytes] = self._ask("hgetall", self._keys.control)
        return {name: value for name, value in fields.items() if name.decode() not in _ROLES}

    def _ledger(self, name: str) -> Iterator[Item]:
        yield from self._hash(self._keys.ledger(name))
        names = ("forgotten", "taken")
        forgotten, taken = self._ask("hmget", self._keys.ledger(name), *names)
        # archived batches that are retained, then those that may be delivered again
        for step in range(int(forgotten or 0) + 1, int(taken or 0) + 1):
            yield from self._list(self._keys.batch(name, step))

    def _hash(self, key: str, **changed: bytes) -> Iterator[Item]:
        """Yield a hash, with other values of the `changed` fields that it has."""
        if fields := self._ask("hgetall", key):
            new = {name.encode(): value for name, value in changed.items()}
            fields |= {name: value for name, value in new.items() if name in fields}
            yield self._item("hash", key, _flat(fields))

    def _list(self, key: str) -> Iterator[Item]:
        if values := self._ask("lrange", key, 0, -1):
            yield self._item("list", key, values)

    def _zset(self, key: str) -> Iterator[Item]:
        start = 0
        while pairs := self._ask("zrange", key, start, start + PAGE - 1, withscores=True):
            yield self._item("zset", key, [part for pair in pairs for part in pair])
            start += PAGE

    def _stream(self, key: str) -> Iterator[Item]:
        last = "-"
        while entries := self._ask("xrange", key, last, "+", PAGE):
            yield self._item("stream", key, [[entry, _flat(fields)] for entry, fields in entries])
            milliseconds, _, number = entries[-1][0].decode().partition("-")
            self._last_entries[key] = (int(milliseconds), int(number))
            last = f"({milliseconds}-{number}"

    def _bits(self, key: str) -> Iterator[Item]:
        size = self._ask("strlen", key)
        for offset in range(0, size, PAGE_DRAWS // 8):
            page = self._walk.bits(key, offset)
            # imported groups are numbered far away from the others: most pages between are empty
            if page.strip(b"\0"):
                yield self._item("bits", key, [offset, page])

    def _groups(self, task: str) -> Iterator[Item]:
        for gid, record in self._walk.records(task):
            self.groups += 1
            if record["stage"] == "running":
                record, job = self._at_rest(task, gid, record)
                yield job
            elif record["stage"] == "dead":
                letter = self._ask("get", self._keys.dead_letter(gid))
                yield self._item("string", self._keys.dead_letter(gid), letter or b"{}")
            if record["stage"] == "waiting":
                self._teaching += record["lane"].startswith(TEACH)
            yield self._item("hash", self._keys.group(gid), _flat(record))
            # not a copy of the index: it also has tokens that a worker had not handed back
            if record["stage"] == "waiting" and record["payload"] != "init" and record["version"]:
                yield self._item("zset", self._keys.age(task), [gid, float(record["version"])])

    def _at_rest(self, task: str, gid: str, record: Record) -> tuple[Record, Item]:
        """Return the record of a running group as if it was handed back, and its new job."""
        lane = record["lane"]
        if lane != "eval" and not lane.startswith(TEACH):
            lane = "resume"
        stream = self._keys.jobs(task, lane)
        milliseconds, number = self._last_entries.get(stream, (0, 0))
        self._last_entries[stream] = (milliseconds, number + 1)
        entry = f"{milliseconds}-{number + 1}"
        self.was_running += 1
        tries = str(int(record["tries"]) - 1)
        job = self._item("stream", stream, [[entry, ["gid", gid, "payload", record["payload"]]]])
        return record | _RESTING | {"lane": lane, "tries": tries, "entry": entry}, job

    def _item(self, kind: Kind, key: str, data: Any) -> Item:
        return Item(kind, key.removeprefix(self._keys.prefix), data)

    def _ask(self, command: str, *arguments: str | int, **options: bool) -> Any:
        call = getattr(self._store.bulk, command)
        return self._store.retrying("snapshot", lambda: call(*arguments, **options))


def _flat(fields: dict[Any, Any]) -> list[Any]:
    return [part for pair in fields.items() for part in pair]
