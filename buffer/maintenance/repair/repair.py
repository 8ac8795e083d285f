"""The repair of a run: plan, copy, change; and back.

A plan is made of one reading of the index, and carried out in one transaction (MULTI) of a server
that watched its keys since before the reading: if anything of the run has moved, nothing is
changed. A repair that dies anywhere has therefore changed all or nothing. Before the transaction, a
copy of every key that it changes is on disk. It fences what may still run: roles are vacant, and no
worker is registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import redis

from buffer.errors import RoleHeld, SnapshotError
from buffer.ledger.position import Position
from buffer.maintenance.repair.backup import SavedKey, read_backup, write_backup
from buffer.maintenance.repair.garbage import prompts_ahead
from buffer.maintenance.repair.image import PAGE, Image, Value, read_image
from buffer.maintenance.repair.rebuild import ROLE, rebuild
from buffer.maintenance.repair.records import count
from buffer.model.ids import LANES, new_nonce
from buffer.model.limits import RunLimits
from buffer.redis.keys import Keys
from buffer.redis.store import Store

_MARK = "repaired"
"""Field of `control`: the operation of the last repair, until a process opens the run."""

_WORKERS = ("workers", "worker:")
"""Names of keys that are deleted in every repair, of which one of another type is damaged."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a repair would change: `values` by name (None: the key is deleted).

    `payloads`: keys of payloads to delete: they hold something else, or prompts of draws that have
    not entered.
    """

    values: dict[str, Value | None]
    payloads: list[str]
    notes: list[str]
    lost: list[str]
    closed: list[str]
    damaged: list[str]
    """names of keys that are not as they should be; a repair also ends all roles"""


class Repair:
    """Repairs one run of which no process is alive.

    Usage:
        repair = Repair(store, keys, limits, nonce, position)
        plan = repair.plan()
        repair.carry_out(plan, path)    # the copy of what changes
        repair.undo(path)
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        limits: RunLimits,
        nonce: str,
        position: Position | None = None,
    ) -> None:
        """Prepare; `position` is that of the trainer's newest checkpoint, if there is one."""
        self._store = store
        self._keys = keys
        self._limits = limits
        self._nonce = nonce
        self._position = position

    def plan(self) -> Plan:
        """Return what a repair would change now; changes nothing."""
        return self._plan(read_image(self._store, self._keys))

    def _plan(self, image: Image) -> Plan:
        state, wanted = rebuild(image, self._limits, self._position, self._now_ms())
        # an empty queue is a key as well
        empty = {name for name, value in image.values.items() if value == Value("stream", [])}
        empty &= {f"jobs:{task}:{lane}" for task in self._limits.tasks for lane in LANES}
        found = {name: value for name, value in image.values.items() if name not in empty}
        values: dict[str, Value | None] = {
            name: value for name, value in wanted.items() if found.get(name) != value
        }
        values |= {name: None for name in found if name not in wanted}
        damaged = sorted(
            name
            for name in values
            if not name.startswith(_WORKERS) or found[name].kind not in ("hash", "zset")
        )
        fields = image.hash("control").items()
        control = {name: value for name, value in fields if not ROLE.fullmatch(name)}
        if "control" in damaged and Value("hash", control) == wanted["control"]:
            damaged.remove("control")
        ahead = [self._keys.payload(gid, "init") for gid in prompts_ahead(state)]
        payloads = [*image.foreign, *ahead]
        return Plan(values, payloads, state.notes, state.lost, state.closed, damaged)

    def carry_out(self, path: Path) -> Plan:
        """Change what the plan of this moment says, and keep a copy in a new file.

        Raises RoleHeld while a process of the run is alive, or where one changed it meanwhile.
        """
        operation = new_nonce()
        store = self._store
        with store.bulk.pipeline() as pipe:
            try:
                pipe.watch(*self._watched())
                image = read_image(store, self._keys)
                self._require_rest(image)
                plan = self._plan(image)
                names = [self._keys.prefix + name for name in plan.values]
                head = {"run": self._keys.run, "nonce": self._nonce, "operation": operation}
                freed = [*self._freed(image, plan), *plan.payloads]
                write_backup(
                    path, {**head, "created_ms": self._now_ms()}, self._save([*names, *freed])
                )
                pipe.multi()
                for name, value in plan.values.items():
                    _write(pipe, self._keys.prefix + name, value)
                # in a cluster they lie elsewhere, and nothing names them
                store.each("repair", [("UNLINK", key) for key in plan.payloads])
                pipe.hset(self._keys.control, _MARK, operation)
                pipe.execute()
            except redis.WatchError as error:
                raise self._moved() from error
        return plan

    def undo(self, path: Path) -> int:
        """Put back what a repair changed, if no process has opened the run since; return the keys.

        Raises RoleHeld, SnapshotError.
        """
        backup = read_backup(path)
        store = self._store
        with store.bulk.pipeline() as pipe:
            try:
                pipe.watch(*self._watched())
                state = store.control.hgetall(self._keys.control)
                self._require_same(path, backup.nonce, backup.operation, state)
                self._put_back_payloads(backup.keys)
                pipe.multi()
                for saved in self._of_index(backup.keys):
                    pipe.delete(saved.key)
                    if saved.dump is not None:
                        pipe.restore(saved.key, saved.ttl_ms, saved.dump)
                pipe.execute()
            except redis.WatchError as error:
                raise self._moved() from error
        return len(backup.keys)

    # -- who is alive ------------------------------------------------------------------------------

    def _require_rest(self, image: Image) -> None:
        now = self._now_ms()
        control = image.hash("control")
        for role in ("trainer", "producer"):
            silent = abs(now - count(control.get(f"{role}_seen_ms")))
            if control.get(role) and silent < self._limits.role_timeout_ms:
                raise self._alive(f"its {role} was alive {silent / 1000:.0f} s ago")
        for worker, seen in image.zset("workers").items():
            if abs(now - seen) < self._limits.lease_ms:
                raise self._alive(
                    f"its worker {worker} was alive {abs(now - seen) / 1000:.0f} s ago"
                )

    def _alive(self, who: str) -> RoleHeld:
        return RoleHeld(
            f"run {self._keys.run!r} cannot be repaired: {who}",
            hint="stop the processes of the run (`rolloutmq stop`), then try again; those of one "
            "that was killed count as alive until their time-out",
        )

    def _moved(self) -> RoleHeld:
        return RoleHeld(
            f"run {self._keys.run!r} was changed by another process: nothing was repaired",
            hint="stop all of its processes, then try again",
        )

    def _require_same(
        self, path: Path, nonce: str, operation: str, state: dict[bytes, bytes]
    ) -> None:
        opened = [role for role in (b"trainer", b"producer") if role + b"_seen_ms" in state]
        is_same = nonce == self._nonce and state.get(_MARK.encode()) == operation.encode()
        workers = self._store.control.exists(self._keys.workers)
        if not is_same or opened or workers:
            raise SnapshotError(
                f"{path} cannot be put back: it is of another run or repair, or the run was "
                "opened since",
                hint="a repair can be undone until a process of the run is started",
            )

    def _watched(self) -> list[str]:
        """Return keys of which one changes whenever a group moves, or a process is alive."""
        keys = self._keys
        fixed = [keys.meta, keys.meta_copy, keys.control, keys.lineages, keys.dead]
        fixed += [keys.bytes, keys.cursors, keys.workers, keys.leases, keys.garbage]
        fixed += [keys.ledger("train"), keys.ledger("eval")]
        for task in self._limits.tasks:
            fixed += [keys.progress(task), keys.order(task), keys.age(task)]
            fixed += [*keys.all_jobs(task), *keys.all_pools([task])]
            fixed += [keys.ended(task, end) for end in ("archived", "filtered", "dropped")]
        return fixed

    # -- keys --------------------------------------------------------------------------------------

    def _save(self, names: list[str]) -> Iterator[SavedKey]:
        rest = iter(names)
        while page := list(islice(rest, PAGE)):
            dumps = self._store.each("repair", [("DUMP", name) for name in page])
            expiries = self._store.each("repair", [("PTTL", name) for name in page])
            for name, dump, expiry in zip(page, dumps, expiries, strict=True):
                yield SavedKey(name, dump, max(0, int(expiry)))

    def _freed(self, image: Image, plan: Plan) -> list[str]:
        """Return the keys of payloads that become garbage, and are freed later."""
        value = plan.values.get("garbage")
        new = value.data - image.members("garbage") if value else set()
        entries = [line.split(" ") for line in sorted(new)]
        return [
            key
            for gid, token, chunks in entries
            for key in self._keys.payload_chunks(gid, token, int(chunks))
        ]

    def _of_index(self, keys: list[SavedKey]) -> list[SavedKey]:
        return [saved for saved in keys if "}:payload:" not in saved.key]

    def _put_back_payloads(self, keys: list[SavedKey]) -> None:
        payloads = [saved for saved in keys if "}:payload:" in saved.key and saved.dump is not None]
        self._store.each(
            "repair",
            [("RESTORE", s.key, s.ttl_ms, s.dump or b"", "REPLACE") for s in payloads],
            on_payloads=True,
        )

    def _now_ms(self) -> int:
        seconds, micros = self._store.retrying("time", lambda: self._store.control.time())
        return int(seconds) * 1000 + int(micros) // 1000


def _write(pipe: Any, key: str, value: Value | None) -> None:
    """Replace a key by a value, page by page."""
    pipe.delete(key)
    if value is None:
        return
    match value.kind:
        case "string":
            pipe.set(key, value.data)
        case "stream":
            for number, gid, payload in value.data:
                pipe.xadd(key, {"gid": gid, "payload": payload}, id=number)
        case "hash":
            _in_pages(list(value.data.items()), lambda page: pipe.hset(key, mapping=dict(page)))
        case "zset":
            _in_pages(list(value.data.items()), lambda page: pipe.zadd(key, dict(page)))
        case "set":
            _in_pages(sorted(value.data), lambda page: pipe.sadd(key, *page))
        case "list":
            _in_pages(value.data, lambda page: pipe.rpush(key, *page))


def _in_pages(items: list[Any], write: Any) -> None:
    for start in range(0, len(items), PAGE):
        write(items[start : start + PAGE])
