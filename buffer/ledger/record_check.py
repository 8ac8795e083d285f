"""Check every living group: its stages, its record, its bytes, and the indexes.

On a live run, a fault counts only if the record is unchanged when read again: every script that
moves a group changes its record at the same instant. A draw that has one end, and nothing else, is
not read: only its bits are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice

import numpy as np
import orjson

from buffer.groups.record_walk import Entered, Record, RecordWalk
from buffer.ids import ENDS, GID, LANES, group_id
from buffer.ledger.archive import ArchivedBatches
from buffer.ledger.key_check import KeyCheck, NameSet
from buffer.ledger.stages import GroupRow, StageReader, stage_faults
from buffer.redis.bounds import KEYS_PER_TRIP
from buffer.redis.key_fields import Damage, lasting, text_fields, wrong_fields
from buffer.redis.store import RunContext

Command = tuple[str | int, ...]

_PAYLOAD = re.compile(rf":payload:(?P<gid>{GID.pattern}):(?P<token>[^:]+)")


class RecordCheck:
    """Walks over the groups once; `weight`, `payloads` and `taken` are complete after that."""

    def __init__(self, context: RunContext, found: KeyCheck) -> None:
        self._context = context
        self._store, self._keys, self._limits, _ = context
        self._found = found
        self._stages = StageReader(context)
        self._walk = RecordWalk(self._store, self._keys)
        self.checked = 0  # draws
        self.made = Counter[str]()  # sampled tokens of groups that have not ended, by task
        self.weight = 0  # bytes that records and archived batches name
        self.payloads = NameSet()  # keys of these payloads
        self.taken = NameSet()  # groups that are taken, and in no other stage
        self._weighed = NameSet()  # groups with results
        self._last_arrival = 0

    def damage(self, advance: Callable[[int, int], object]) -> Iterator[Damage]:
        """Yield the faults of groups and indexes; `advance` gets the draws checked, and all.

        O(living groups), and a bit for each other one.
        """
        tasks = {task: self._walk.entered(task) for task in self._limits.tasks}
        number = sum(entered.drawn + entered.by_hand for entered in tasks.values())
        for task, entered in tasks.items():
            draws = self._unsure(task, entered)
            while page := list(islice(draws, KEYS_PER_TRIP)):
                yield from self._of_page(task, entered.cursor, page)
                self.checked += len(page)
                advance(self.checked, number)
            index = partial(self._of_index, self._keys.age(task), ["waiting", "running"])
            yield from lasting(index)
            # a number below one that a group has would be given again
            key = self._keys.progress(task)
            counted = self._store.send("arrivals", [("HGET", key, "arrivals")])[0] or b"0"
            if counted.isdigit() and int(counted) < self._last_arrival:
                text = f"{key} counts {int(counted)} arrivals, a group is number"
                yield Damage(f"{text} {self._last_arrival}", key)
            self._last_arrival = 0
        for name in ("train", "eval"):
            yield from self._of_archive(ArchivedBatches(self._context, name))

    def _unsure(self, task: str, entered: Entered) -> Iterator[int]:
        """Yield all draws but those with one end, no record, and no dead letter."""
        letters = (GID.fullmatch(member) for member in self._members(self._keys.dead))
        dead = [int(gid["draw"]) for gid in letters if gid and gid["task"] == task]
        parts = [np.array(each, "i8") for each in (self._found.draws[task], dead)]
        named = np.unique(np.concatenate(parts))
        for first, ends in self._walk.ends(task, entered):
            is_sure = ends == 1
            here = named[(named >= first) & (named < first + len(ends))]
            is_sure[here - first] = False
            self.checked += int(is_sure.sum())
            yield from (np.flatnonzero(~is_sure) + first).tolist()

    def _members(self, key: str) -> Iterator[str]:
        """Yield the members of a sorted set, a page at a time."""
        start = 0
        while page := self._store.ask("members", "ZRANGE", key, start, start + KEYS_PER_TRIP - 1):
            yield from (member.decode(errors="replace") for member in page)
            start += KEYS_PER_TRIP

    def _of_page(self, task: str, cursor: int, page: Sequence[int]) -> Iterator[Damage]:
        whole: list[GroupRow] = []
        for row in list(self._stages.rows([group_id(task, draw) for draw in page])):
            yield from stage_faults(row, cursor)
            if row.stages == ["taken"]:
                self.taken.add(row.gid)
            elif row.stages == ["dead"] and not row.record:
                yield Damage(f"{row.gid} is dead, and its record is gone", row.key, row.gid)
            if not row.record or not set(ENDS).isdisjoint(row.stages):
                continue
            if row.is_whole:
                self._weigh(row.gid, row.record)
                whole.append(row)
            else:
                (record,) = self._records([row.gid])
                fields = wrong_fields("group", row.key, record) if record else ()
                yield from self._still(row.gid, record, fields)
        chunks = [self._chunks(row.gid, row.record) for row in whole]
        prompts = [self._keys.payload(row.gid, "init") for row in whole]
        sizes = iter(self._sizes([*prompts, *chain.from_iterable(chunks)]))
        prompt_sizes = list(islice(sizes, len(prompts)))
        asked = [self._other_key(task, row) for row in whole]
        answers = iter(self._store.send("records", [command for command in asked if command]))
        for row, some, prompt, command in zip(whole, chunks, prompt_sizes, asked, strict=True):
            wrong = [*self._compare(task, row, next(answers) if command else None)]
            wrong += self._of_sizes(row, prompt, list(islice(sizes, len(some))))
            yield from self._still(row.gid, row.record, wrong)

    def _weigh(self, gid: str, record: Record) -> None:
        self.made[record["task"]] += int(record.get("made") or 0)
        self._last_arrival = max(self._last_arrival, int(record.get("arrival") or 0))
        self.weight += int(record["prompt"])
        self.payloads.add(self._keys.payload(gid, "init"))
        # before the first result, the payload is the prompt, which is counted already
        if record["payload"] != "init":
            self.weight += int(record["size"])
            self._weighed.add(gid)
            self.payloads.add(*self._chunks(gid, record))

    def _chunks(self, gid: str, record: Record) -> list[str]:
        return self._keys.payload_chunks(gid, record["payload"], int(record["chunks"]))

    def _other_key(self, task: str, row: GroupRow) -> Command | None:
        """Return the command whose answer `_compare` reads: few groups need any."""
        if row.record["stage"] == "dead":
            return ("GET", self._keys.dead_letter(row.gid))
        return ("ZSCORE", self._keys.age(task), row.gid) if _is_begun(row.record) else None

    def _index(self, task: str, record: Record) -> str:
        """Return the key of the index that has a group of this stage."""
        keys = self._keys
        match record["stage"]:
            case "pool":
                return keys.pool(task, record["status"])
            case "waiting":
                return keys.jobs(task, record["lane"])
            case "dead":
                return keys.dead
            case "running":
                return keys.leased(record["owner"])
        return keys.manifests + record["batch"]

    def _compare(self, task: str, row: GroupRow, other: bytes | None) -> Iterator[Damage]:
        keys, gid, record = self._keys, row.gid, row.record
        stage, version = record["stage"], record["version"]
        ages, reason = keys.age(task), keys.dead_letter(gid)
        if (record["task"], int(record["draw"])) != (task, int(gid[-10:])):
            text = f"the record of {gid} says task {record['task']}, draw {record['draw']}"
            yield Damage(text, row.key, gid)
        if version and "lineage" not in record:
            yield Damage(f"{row.key} has no field lineage", row.key, gid)
        index, score = self._index(task, record), row.scores.get(record["status"])
        if stage not in row.stages or (stage == "pool" and score is None):
            yield Damage(f"{gid} is {stage} by its record, and not by {index}", index, gid)
        elif stage == "pool" and not self._fits(task, record, score or 0.0):
            text = f"{index} has {gid} at {score:g}, and its version is {version or 'none'}"
            yield Damage(text, index, gid)
        if stage == "dead" and not _is_letter(other):
            what = "cannot be read" if other else "is gone"
            yield Damage(f"{reason}, the reason of a dead letter, {what}", reason, gid)
        elif _is_begun(record) and (other is None or float(other) != int(version)):
            yield Damage(f"{ages} does not have {gid} at its version {version}", ages, gid)

    def _of_sizes(self, row: GroupRow, prompt: int, sizes: Sequence[int]) -> Iterator[Damage]:
        gid, record = row.gid, row.record
        if record["prompt"] != "0" and prompt != int(record["prompt"]):
            yield self._of_bytes(gid, "init", prompt, record["prompt"])
        # the bytes of a dead letter may be why it died
        is_whole = sum(sizes) == int(record["size"]) and all(sizes)
        if record["stage"] != "dead" and not is_whole:
            yield self._of_bytes(gid, record["payload"], sum(sizes), record["size"])

    def _of_bytes(self, gid: str, token: str, there: int, wanted: str | int) -> Damage:
        key = self._keys.payload(gid, token)
        text = f"{key} has {there} bytes, and {wanted} are recorded" if there else f"{key} is gone"
        return Damage(text, key, gid)

    def _fits(self, task: str, record: Record, score: float) -> bool:
        """Return whether a group may have this score; see lua/shared/pools.lua."""
        if not record["version"]:
            return score == float("inf")
        # a rollout may be older than its group by the lag, and after a fork the group may count so
        version = int(record["version"])
        return version - (self._limits.token_lead(task) or 0) <= score <= version

    def strangers(self, task: str) -> Iterator[Damage]:
        """Yield the members of a task's pools and queues whose records are of another stage."""
        for pool in self._keys.all_pools([task]):
            yield from lasting(partial(self._of_index, pool, ["pool"], "status"))
        for jobs in (self._keys.jobs(task, lane) for lane in LANES):
            yield from lasting(partial(self._of_index, jobs, ["waiting"], "lane"))

    def _of_index(self, key: str, stages: Sequence[str], field: str = "") -> Iterator[Damage]:
        """Yield the groups in an index whose records name none of `stages`, or not its last word.

        `field`: of the record, which has the last word of the key.
        """
        members = (member.rpartition(":")[2] for member in self._members(key))
        gids = self._waiting(key) if field == "lane" else members
        word = key.rpartition(":")[2]
        while page := list(islice(gids, KEYS_PER_TRIP)):
            for gid, record in zip(page, self._records(page), strict=True):
                is_there = not field or record.get(field) == word
                if record.get("stage") not in stages or not is_there:
                    yield Damage(f"{key} has {gid[:80]!r}, and no record says so", key, gid)

    def _waiting(self, key: str) -> Iterator[str]:
        """Yield the gids of a queue, a page at a time."""
        last = "-"
        while page := self._store.ask("members", "XRANGE", key, last, "+", "COUNT", KEYS_PER_TRIP):
            yield from (text_fields(fields).get("gid", "?") for _, fields in page)
            last = f"({page[-1][0].decode()}"

    def orphans(self) -> Iterator[Damage]:
        """Yield the payloads, stored before `damage`, that nothing names."""
        for gid, token, _ in self._garbage():
            self.payloads.add(self._keys.payload(gid, token))
        unnamed = self._found.payloads - self.payloads
        found = self._found.payload_keys
        keys = self._store.retrying("orphans", lambda: sorted({*found(unnamed)})) if unnamed else []
        ages = self._store.send("orphans", [("PTTL", key) for key in keys])
        # bytes that no script has accepted expire
        kept = [key for key, age in zip(keys, ages, strict=True) if age == -1]
        for key in kept:
            match = _PAYLOAD.search(key)
            if match is None or self._is_named(match["gid"], match["token"]):
                continue
            if self._store.send("orphans", [("EXISTS", key)])[0]:
                yield Damage(f"{key} is kept, and nothing names it", key, match["gid"])

    def _garbage(self) -> list[list[str]]:
        """Return the (gid, token, chunks) of the payloads that are to be freed."""
        listed = self._store.send("orphans", [("SMEMBERS", self._keys.garbage)])[0]
        entries = [entry.decode(errors="replace").split(" ") for entry in listed]
        return [entry for entry in entries if len(entry) == 3]

    def _is_named(self, gid: str, token: str) -> bool:
        """Return whether a record, a manifest or the garbage names a payload, in this order."""
        record = self._records([gid])[0]
        if record and token in ("init", record.get("payload")):
            return True
        archives = (ArchivedBatches(self._context, n) for n in ("train", "eval"))
        if any(entry.gid == gid for archive in archives for entry in archive.entries()):
            return True
        return any(entry[:2] == [gid, token] for entry in self._garbage())

    def _of_archive(self, archive: ArchivedBatches) -> Iterator[Damage]:
        """Yield the payloads of archived batches whose bytes are missing."""
        first = archive.steps().start
        refs = (entry.payload for entry in archive.entries())
        wrong: list[Damage] = []
        while page := list(islice(refs, KEYS_PER_TRIP)):
            chunks = [self._keys.payload_chunks(ref.gid, ref.token, ref.chunks) for ref in page]
            keys = list(chain.from_iterable(chunks))
            self.payloads.add(*keys)
            sizes = iter(self._sizes(keys))
            unknown = set(self._weighed.lacks([ref.gid for ref in page]))
            for ref, some in zip(page, chunks, strict=True):
                there = sum(islice(sizes, len(some)))
                # a group that was archived since its record was read is counted already
                self.weight += ref.size if ref.gid in unknown else 0
                if there != ref.size:
                    wrong.append(self._of_bytes(ref.gid, ref.token, there, ref.size))
        # batches that were freed meanwhile have no bytes
        if archive.steps().start == first:
            yield from wrong

    def _still(self, gid: str, record: Record, wrong: Iterable[Damage]) -> Iterator[Damage]:
        """Yield the faults of a group if its record has not changed since it was read."""
        found = list(wrong)
        now = self._records([gid])[0] if found else {}
        if bool(now) == bool(record) and record.items() <= now.items():
            yield from found

    def _sizes(self, keys: Sequence[str]) -> list[int]:
        """Return the bytes of each value, 0 for a missing one."""
        return self._store.send("payloads", [("STRLEN", key) for key in keys])

    def _records(self, gids: Sequence[str]) -> list[Record]:
        commands = [("HGETALL", self._keys.group(gid)) for gid in gids]
        return [text_fields(raw) for raw in self._store.send("records", commands)]


def _is_letter(letter: bytes | None) -> bool:
    try:
        return "reason" in orjson.loads(letter or b"")
    except (orjson.JSONDecodeError, TypeError):
        return False


def _is_begun(record: Record) -> bool:
    """Return whether a group waits and has tokens."""
    return record["stage"] == "waiting" and record["payload"] != "init" and record["version"] != ""
