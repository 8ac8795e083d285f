"""Find and count the groups of a run that match a query, without their payloads.

Each living group is in one index (I1): a stream, a pool, what a worker holds, a manifest or the
dead letters. These are walked page by page; those without a match are skipped. On a live run, a
group that moves meanwhile may be missed, or found in both of its stages. For proof use `fsck`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from buffer.errors import QueryError
from buffer.ids import GID, LANES, POOLS, group_id, split_group_id
from buffer.ledger.ledger import BatchLedger
from buffer.query.language import (
    FALSE,
    TRUE,
    Node,
    Scalar,
    allowed_values,
    field_of,
    matches,
    narrow,
    parse,
)
from buffer.query.record import RECORD_FIELDS, STAGES, GroupRecord, Moment
from buffer.redis.bounds import KEYS_PER_TRIP
from buffer.redis.store import RunContext, Store


@dataclass(frozen=True, slots=True)
class Index:
    """An index, and the rest of the query for its groups."""

    stage: str
    key: str
    rest: Node


class GroupScan:
    """Finds and counts groups of one run by the fields of their records."""

    def __init__(self, context: RunContext, ledgers: Sequence[BatchLedger]) -> None:
        self._store, self._keys, self._limits, _ = context
        self._ledgers = ledgers

    def find(
        self, query: object = TRUE, *, limit: int | None = None, order: str = ""
    ) -> Iterator[GroupRecord]:
        """Yield the records that match, with one page in memory at a time.

        They come by stage, and in a pool by version and arrival. `order="tokens"`, or `"-tokens"`
        for the highest first, sorts them by a field, those without a value last; it reads all
        matches, and needs a `limit`. Raises QueryError when called.
        """
        node = parse(query)
        if limit is not None and limit < 0:
            raise QueryError(f"limit {limit} is negative", hint="use 0 or more")
        if not order:
            return islice(self._walk(node), limit)
        attribute = field_of(order.removeprefix("-")).attribute
        if limit is None:
            raise QueryError(
                f"order {order!r} needs a limit", hint="it bounds how many are kept in memory"
            )
        return self._sorted(node, attribute, limit, descending=order.startswith("-"))

    def count(self, query: object = TRUE) -> int:
        """Count matches: O(1) by task, status and the stages waiting, pool and dead; else O(N)."""
        node = parse(query)
        moment = moment_of(self._store, self._ledgers[0])
        if (named := self._named(node)) is not None:
            return sum(1 for _ in self._records(named, node, moment))
        found = 0
        for index in self._indexes(node):
            if index.rest == TRUE and index.stage in ("waiting", "pool", "dead"):
                length = "XLEN" if index.stage == "waiting" else "ZCARD"
                found += int(self._store.ask("list", length, index.key))
            else:
                found += sum(1 for _ in self._of(index, node, moment))
        return found

    # -- walking -------------------------------------------------------------

    def _walk(self, node: Node) -> Iterator[GroupRecord]:
        moment = moment_of(self._store, self._ledgers[0])
        if (named := self._named(node)) is not None:
            yield from self._records(named, node, moment)
            return
        for index in self._indexes(node):
            yield from self._of(index, node, moment)

    def _sorted(
        self, node: Node, attribute: str, limit: int, *, descending: bool
    ) -> Iterator[GroupRecord]:
        def rank(record: GroupRecord) -> tuple[Any, ...]:
            value = getattr(record, attribute)
            is_missing = value is None
            # the first element puts records without a value last, in both directions
            return (is_missing != descending, *([] if is_missing else [value]))

        choose = heapq.nlargest if descending else heapq.nsmallest
        yield from choose(limit, self._walk(node), key=rank)

    def _of(self, index: Index, node: Node, moment: Moment) -> Iterator[GroupRecord]:
        for record in self._records(self._gids(index), node, moment):
            # a group that has moved is found in its new stage
            if record.stage == index.stage:
                yield record

    def _records(self, gids: Iterator[str], node: Node, moment: Moment) -> Iterator[GroupRecord]:
        likely = (gid for gid in gids if narrow(node, _facts_of(gid)) != FALSE)
        while page := list(islice(likely, KEYS_PER_TRIP)):
            values = self._store.send(
                "records", [("HMGET", self._keys.group(gid), *RECORD_FIELDS) for gid in page]
            )
            for gid, found in zip(page, values, strict=True):
                record = GroupRecord.parse(gid, found, moment)
                if record is not None and matches(node, record):
                    yield record

    def _named(self, node: Node) -> Iterator[str] | None:
        """Return the gids that the query names; None if it names none."""
        if (gids := allowed_values(node, "gid")) is not None:
            return (gid for gid in sorted(gids) if GID.fullmatch(gid))
        if (draws := allowed_values(node, "draw")) is None:
            return None
        whole = sorted(int(draw) for draw in draws if draw == int(draw) and 0 <= draw < 10**10)
        return (group_id(task, draw) for task in self._limits.tasks for draw in whole)

    # -- indexes -------------------------------------------------------------

    def _indexes(self, node: Node) -> Iterator[Index]:
        """Yield the indexes that can hold a match, in the order of `STAGES`."""
        for stage in STAGES:
            for key, known in self._keys_of(stage):
                rest = narrow(node, {"stage": stage, **known})
                if rest != FALSE:
                    yield Index(stage, key, rest)

    def _keys_of(self, stage: str) -> list[tuple[str, dict[str, Scalar]]]:
        """Return the indexes of a stage, each with the fields that all its groups share."""
        tasks = self._limits.tasks
        keys = self._keys
        match stage:
            case "waiting":
                return [(keys.jobs(task, lane), {"task": task}) for task in tasks for lane in LANES]
            case "pool":
                return [
                    (keys.pool(task, pool), {"task": task, "status": pool})
                    for task in tasks
                    for pool in POOLS
                ]
            case "running":
                workers = self._sorted_set(keys.leases)
                return [(keys.leased(worker), {"owner": worker}) for worker in workers]
            case "dead":
                return [(keys.dead, {})]
        return [(ledger.name, {}) for ledger in self._ledgers]

    def _gids(self, index: Index) -> Iterator[str]:
        match index.stage:
            case "waiting":
                return self._waiting(index.key)
            case "pool":
                members = self._sorted_set(index.key)
                return (member.partition(":")[2] for member in members)
            case "running":
                held = self._store.ask("list", "HKEYS", index.key)
                return (gid.decode() for gid in held if gid != b"digest")
            case "taken":
                return self._taken(index.key)
        return self._sorted_set(index.key)

    def _waiting(self, key: str) -> Iterator[str]:
        after = "-"
        while entries := self._store.ask("list", "XRANGE", key, after, "+", "COUNT", KEYS_PER_TRIP):
            yield from (fields[b"gid"].decode() for _, fields in entries)
            after = "(" + entries[-1][0].decode()

    def _taken(self, name: str) -> Iterator[str]:
        ledger = next(ledger for ledger in self._ledgers if ledger.name == name)
        taken, _, freed = ledger.steps()
        for step in range(freed + 1, taken + 1):
            if manifest := ledger.manifest(step):
                yield from manifest.gids

    def _sorted_set(self, key: str) -> Iterator[str]:
        """Yield members in order, none of them skipped when others are removed meanwhile."""
        start = 0
        last: tuple[float, bytes] | None = None
        while page := self._store.ask(
            "list", "ZRANGE", key, start, start + KEYS_PER_TRIP - 1, "WITHSCORES"
        ):
            pairs = [(float(score), member) for member, score in _pairs(page)]
            for score, member in pairs:
                if last is None or (score, member) > last:
                    yield member.decode()
            last = pairs[-1] if last is None else max(last, pairs[-1])
            score, member = pairs[-1]
            rank, below = self._store.send(
                "rank", [("ZRANK", key, member), ("ZCOUNT", key, "-inf", f"({score:.17g}")]
            )
            # behind the last member; where it was removed, at the first with its score
            start = int(below) if rank is None else int(rank) + 1


def moment_of(store: Store, ledger: BatchLedger) -> Moment:
    seconds, micros = store.ask("time", "TIME")
    return Moment(ledger.steps().taken, int(seconds) * 1000 + int(micros) // 1000)


def _facts_of(gid: str) -> dict[str, Scalar]:
    task, draw = split_group_id(gid)
    return {"gid": gid, "task": task, "draw": draw}


def _pairs(reply: Any) -> Iterator[tuple[bytes, Any]]:
    """Return (member, score) of a reply: a list of pairs, or (RESP2, unparsed) one flat list."""
    if reply and isinstance(reply[0], list | tuple):
        return iter(reply)
    return zip(reply[::2], reply[1::2], strict=True)
