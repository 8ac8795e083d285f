"""Finds and counts the groups of a run that fit a question (`buffer.query.language`). Reads only,
and never a payload.

Each group that still lives is in one index: a stream, a pool, the leases, a manifest or the dead
letters (I1). So the indexes are walked, page by page, and never the key space of the server:
indexes that cannot hold an answer are left out, pools are read from the oldest version that fits,
groups named by gid or draw are looked up. What is found is of different instants: on a live run a
group that moves meanwhile may be missed, or be met in both of its stages. For proof use `fsck`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from buffer.batches.ledger import BatchLedger
from buffer.errors import QueryError
from buffer.model.ids import GID, LANES, POOLS, group_id, split_group_id
from buffer.model.limits import RunLimits
from buffer.query.language import FALSE, TRUE, Node, Scalar, field_of, matches, parse
from buffer.query.plan import EVERY, VersionRange, is_exact, narrow, pinned, version_range
from buffer.query.record import RECORD_FIELDS, STAGES, GroupRecord, Moment
from buffer.store.bulk_io import Command
from buffer.store.keys import Keys
from buffer.store.store import Store

PAGE = 500
"""Groups in one round trip: the server answers others between two of them."""


@dataclass(frozen=True, slots=True)
class Index:
    """One index, what is left to ask of its groups, and which of their versions can fit."""

    stage: str
    key: str
    question: Node
    versions: VersionRange = EVERY


class GroupScan:
    """The groups of one run, by what is known of them."""

    def __init__(
        self, store: Store, keys: Keys, limits: RunLimits, ledgers: Sequence[BatchLedger]
    ) -> None:
        self._store = store
        self._keys = keys
        self._limits = limits
        self._ledgers = ledgers
        # where single tokens expire, the score of a pool may be lower than the version
        self._is_by_version = limits.token_threshold is None

    def find(
        self, query: object = TRUE, *, limit: int | None = None, order: str = ""
    ) -> Iterator[GroupRecord]:
        """The records that fit, one page in memory at a time.

        They come stage by stage, a pool by weights and arrival (whatever the run's order policy),
        or by a field: `order="tokens"`, or `"-tokens"` for the highest first, in both cases those
        without a value last; that looks at all that fit, keeps `limit` of them, and so needs a
        limit. Raises QueryError at once, whatever the data.
        """
        node = parse(query)
        if limit is not None and limit < 0:
            raise QueryError(f"limit {limit}", hint="0 or more")
        if not order:
            return islice(self._walk(node), limit)
        attribute = field_of(order.removeprefix("-")).attribute
        if limit is None:
            raise QueryError(
                f"order {order!r} needs a limit", hint="only so many are kept in memory"
            )
        return self._sorted(node, attribute, limit, descending=order.startswith("-"))

    def count(self, query: object = TRUE) -> int:
        """How many groups fit. O(log N) for what task, stage waiting or pool, status, version and
        staleness say.
        """
        node = parse(query)
        moment = moment_of(self._store, self._ledgers[0])
        if (named := self._named(node)) is not None:
            return sum(1 for _ in self._records(named, node, moment))
        return sum(self._count(index, node, moment) for index in self._indexes(node, moment.taken))

    # -- walking -----------------------------------------------------------------------------------------------

    def _walk(self, node: Node) -> Iterator[GroupRecord]:
        moment = moment_of(self._store, self._ledgers[0])
        if (named := self._named(node)) is not None:
            yield from self._records(named, node, moment)
            return
        for index in self._indexes(node, moment.taken):
            yield from self._of(index, node, moment)

    def _sorted(
        self, node: Node, attribute: str, limit: int, *, descending: bool
    ) -> Iterator[GroupRecord]:
        def rank(record: GroupRecord) -> tuple[Any, ...]:
            value = getattr(record, attribute)
            return (
                ((0,) if descending else (1,))
                if value is None
                else (1, value)
                if descending
                else (0, value)
            )

        choose = heapq.nlargest if descending else heapq.nsmallest
        yield from choose(limit, self._walk(node), key=rank)

    def _of(self, index: Index, node: Node, moment: Moment) -> Iterator[GroupRecord]:
        for record in self._records(self._gids(index), node, moment):
            # one that has left is found where it is now
            if record.stage == index.stage:
                yield record

    def _records(self, gids: Iterator[str], node: Node, moment: Moment) -> Iterator[GroupRecord]:
        likely = (gid for gid in gids if narrow(node, _known(gid)) != FALSE)
        while page := list(islice(likely, PAGE)):
            values = self._pipelined(
                "records", [("HMGET", self._keys.group(gid), *RECORD_FIELDS) for gid in page]
            )
            for gid, found in zip(page, values, strict=True):
                record = GroupRecord.parse(gid, found, moment)
                if record is not None and matches(node, record):
                    yield record

    def _named(self, node: Node) -> Iterator[str] | None:
        """The gids that the question names; None where it does not."""
        if (gids := pinned(node, "gid")) is not None:
            return (gid for gid in sorted(gids) if GID.fullmatch(gid))
        if (draws := pinned(node, "draw")) is None:
            return None
        whole = sorted(int(draw) for draw in draws if draw == int(draw) and 0 <= draw < 10**10)
        return (group_id(task, draw) for task in self._limits.tasks for draw in whole)

    # -- indexes -----------------------------------------------------------------------------------------------

    def _indexes(self, node: Node, taken: int) -> Iterator[Index]:
        """Those that can hold an answer, in the order of `STAGES`."""
        for stage in STAGES:
            for key, known in self._keys_of(stage):
                question = narrow(node, {"stage": stage} | known)
                versions = (
                    version_range(question, taken)
                    if stage == "pool" and self._is_by_version
                    else EVERY
                )
                if question != FALSE and not versions.is_empty:
                    yield Index(stage, key, question, versions)

    def _keys_of(self, stage: str) -> list[tuple[str, dict[str, Scalar]]]:
        """The indexes of a stage, each with the fields that all its groups share."""
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
                return [(keys.leases, {})]
            case "dead":
                return [(keys.dead, {})]
        return [(ledger.name, {}) for ledger in self._ledgers]

    def _count(self, index: Index, node: Node, moment: Moment) -> int:
        if index.stage == "pool" and self._is_by_version and is_exact(index.question):
            return int(self._ask("ZCOUNT", index.key, *_bounds(index.versions)))
        if index.question == TRUE and index.stage != "taken":
            return int(self._ask("XLEN" if index.stage == "waiting" else "ZCARD", index.key))
        return sum(1 for _ in self._of(index, node, moment))

    def _gids(self, index: Index) -> Iterator[str]:
        match index.stage:
            case "waiting":
                return self._waiting(index.key)
            case "pool":
                return (
                    member.partition(":")[2]
                    for member in self._sorted_set(index.key, index.versions)
                )
            case "taken":
                return self._taken(index.key)
        return self._sorted_set(index.key, EVERY)

    def _waiting(self, key: str) -> Iterator[str]:
        after = "-"
        while entries := self._ask("XRANGE", key, after, "+", "COUNT", PAGE):
            yield from (fields[b"gid"].decode() for _, fields in entries)
            after = "(" + entries[-1][0].decode()

    def _taken(self, name: str) -> Iterator[str]:
        ledger = next(ledger for ledger in self._ledgers if ledger.name == name)
        taken, _, freed = ledger.steps()
        for step in range(freed + 1, taken + 1):
            if manifest := ledger.manifest(step):
                yield from manifest.gids

    def _sorted_set(self, key: str, versions: VersionRange) -> Iterator[str]:
        """Members in order, none skipped although others are taken away before it meanwhile."""
        start = (
            0
            if versions == EVERY
            else int(self._ask("ZCOUNT", key, "-inf", f"({_bounds(versions)[0]}"))
        )
        last: tuple[float, bytes] | None = None
        while page := self._ask("ZRANGE", key, start, start + PAGE - 1, "WITHSCORES"):
            pairs = [(float(score), member) for member, score in _pairs(page)]
            for score, member in pairs:
                if score > versions.high:
                    return
                if last is None or (score, member) > last:
                    yield member.decode()
            last = pairs[-1] if last is None else max(last, pairs[-1])
            start = self._place_after(key, pairs[-1])

    def _place_after(self, key: str, last: tuple[float, bytes]) -> int:
        """The rank behind a member; where it has gone, that of the first with its score."""
        score, member = last
        rank, below = self._pipelined(
            "place", [("ZRANK", key, member), ("ZCOUNT", key, "-inf", f"({score:.17g}")]
        )
        return int(below) if rank is None else int(rank) + 1

    # -- asking ------------------------------------------------------------------------------------------------

    def _ask(self, *command: str | int | bytes) -> Any:
        return self._pipelined("list", [command])[0]

    def _pipelined(self, what: str, commands: Sequence[Command]) -> list[Any]:
        return self._store.each(what, commands, "control")


def moment_of(store: Store, ledger: BatchLedger) -> Moment:
    """Now, for ages of groups."""
    seconds, micros = store.retrying("time", lambda: store.control.time())
    return Moment(ledger.steps()[0], int(seconds) * 1000 + int(micros) // 1000)


def _known(gid: str) -> dict[str, Scalar]:
    """What a gid says of its group."""
    task, draw = split_group_id(gid)
    return {"gid": gid, "task": task, "draw": draw}


def _bounds(versions: VersionRange) -> tuple[str, str]:
    return f"{versions.low:.17g}", f"{versions.high:.17g}"


def _pairs(reply: Any) -> Iterator[tuple[bytes, Any]]:
    """Member and score: a list of pairs, or (RESP2, unparsed) one flat list."""
    return (
        iter(reply)
        if reply and isinstance(reply[0], list | tuple)
        else zip(reply[::2], reply[1::2], strict=True)
    )
