"""Check the record of every living group against its bytes and against the indexes.

On a live run, a fault counts only if the record is unchanged when read again: every script that
moves a group changes its record at the same instant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import orjson

from buffer.groups.record_walk import PAGE, Record, RecordWalk
from buffer.ids import GID
from buffer.job import PayloadRef
from buffer.ledger.archive import Archive
from buffer.redis.key_fields import Damage, text_fields, wrong_fields
from buffer.redis.store import RunContext

Command = tuple[str | int, ...]

_PAYLOAD = re.compile(rf":payload:(?P<gid>{GID.pattern}):(?P<token>[^:]+)")


class RecordCheck:
    """Walks over the records once; `weight` and `payloads` are complete after that."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._store, self._keys, self._limits = context
        self.weight = 0  # bytes that records and archived batches name
        self.payloads: set[str] = set()  # keys of these payloads
        self._weighed: set[str] = set()
        self._last_arrival = 0

    def damage(self) -> Iterator[Damage]:
        """Yield the faults of records, their bytes, and the indexes. O(living groups)."""
        walk = RecordWalk(self._store, self._keys)
        for task in self._limits.tasks:
            records = walk.unchecked(task)
            while page := dict(islice(records, PAGE)):
                yield from self._of_page(task, page)
            yield from self._of_ages(task)
            yield from self._of_arrivals(task)
        for name in ("train", "eval"):
            yield from self._of_archive(Archive(self._context, name))

    def _of_page(self, task: str, page: dict[str, Record]) -> Iterator[Damage]:
        whole: dict[str, Record] = {}
        for gid, record in page.items():
            wrong = list(wrong_fields("group", self._keys.group(gid), record))
            yield from self._still(gid, record, wrong)
            if not wrong:
                whole[gid] = record
                self._weigh(gid, record)
        wanted = {gid: self._commands(task, gid, record) for gid, record in whole.items()}
        answers = iter(
            self._store.each("records", [command for some in wanted.values() for command in some])
        )
        for gid, record in whole.items():
            got = list(islice(answers, len(wanted[gid])))
            wrong = list(self._compare(task, gid, record, got))
            yield from self._still(gid, record, wrong)

    def _weigh(self, gid: str, record: Record) -> None:
        self._last_arrival = max(self._last_arrival, int(record.get("arrival") or 0))
        self.weight += int(record["prompt"])
        self.payloads.update(self._keys.payload_chunks(gid, "init", 1))
        # before the first result, the payload is the prompt, which is counted already
        if record["payload"] != "init":
            self.weight += int(record["size"])
            self._weighed.add(gid)
            self.payloads.update(self._chunks(gid, record))

    def _chunks(self, gid: str, record: Record) -> list[str]:
        return self._keys.payload_chunks(gid, record["payload"], int(record["chunks"]))

    def _commands(self, task: str, gid: str, record: Record) -> list[Command]:
        """Return the commands whose answers `_compare` reads."""
        keys = self._keys
        return [
            self._where(task, gid, record),
            ("ZSCORE", keys.age(task), gid),
            ("GET", keys.dead_letter(gid)),
            ("STRLEN", keys.payload(gid, "init")),
            *(("STRLEN", key) for key in self._chunks(gid, record)),
        ]

    def _where(self, task: str, gid: str, record: Record) -> Command:
        """Return the command that finds a group in the index of its stage."""
        keys = self._keys
        match record["stage"]:
            case "pool":
                member = f"{record['arrival']}:{gid}"
                return ("ZSCORE", keys.pool(task, record["status"]), member)
            case "waiting":
                return ("XRANGE", keys.jobs(task, record["lane"]), record["entry"], record["entry"])
            case "dead":
                return ("ZSCORE", keys.dead, gid)
            case "running":
                return ("HGET", keys.leased(record["owner"]), gid)
        ledger, _, step = record["batch"].partition(":")
        return ("LLEN", keys.batch(ledger, int(step)))

    def _compare(self, task: str, gid: str, record: Record, got: Sequence[Any]) -> Iterator[Damage]:
        keys = self._keys
        there, age, letter, prompt, *sizes = got
        stage, version = record["stage"], record["version"]
        own, ages, reason = keys.group(gid), keys.age(task), keys.dead_letter(gid)
        if (record["task"], int(record["draw"])) != (task, int(gid[-10:])):
            text = f"the record of {gid} says task {record['task']}, draw {record['draw']}"
            yield Damage(text, own, gid)
        if version and "lineage" not in record:
            yield Damage(f"{own} has no field lineage", own, gid)
        index = str(self._where(task, gid, record)[1])
        if not there and there != 0:
            yield Damage(f"{index} lacks {gid}, which is {stage}", index, gid)
        elif stage == "pool" and not self._fits(task, record, float(there)):
            text = f"{index} has {gid} at {float(there):g}, and its version is {version or 'none'}"
            yield Damage(text, index, gid)
        is_begun = stage == "waiting" and record["payload"] != "init" and version != ""
        if is_begun and (age is None or float(age) != int(version)):
            yield Damage(f"{ages} does not have {gid} at its version {version}", ages, gid)
        if stage == "dead" and not _is_letter(letter):
            what = "cannot be read" if letter else "is gone"
            yield Damage(f"{reason}, the reason of a dead letter, {what}", reason, gid)
        if record["prompt"] != "0" and prompt != int(record["prompt"]):
            yield self._of_bytes(gid, "init", prompt, record["prompt"])
        # the bytes of a dead letter may be why it died
        is_whole = sum(sizes) == int(record["size"]) and all(sizes)
        if stage != "dead" and not is_whole:
            yield self._of_bytes(gid, record["payload"], sum(sizes), record["size"])

    def _of_bytes(self, gid: str, token: str, there: int, wanted: str | int) -> Damage:
        key = self._keys.payload(gid, token)
        text = f"{key} has {there} bytes, and {wanted} are recorded" if there else f"{key} is gone"
        return Damage(text, key, gid)

    def _fits(self, task: str, record: Record, score: float) -> bool:
        """Return whether a group may have this score; see lua/include/staleness.lua."""
        if not record["version"]:
            return score == float("inf")
        # a rollout may be older than its group by the lag, and after a fork the group may count so
        version = int(record["version"])
        return version - int(self._limits.token_lead(task) or 0) <= score <= version

    def _of_arrivals(self, task: str) -> Iterator[Damage]:
        """Yield a count of arrivals below a number that a group has, which would be given again."""
        key = self._keys.progress(task)
        counted = self._store.each("arrivals", [("HGET", key, "arrivals")])[0]
        if (counted or b"0").isdigit() and int(counted or 0) < self._last_arrival:
            text = f"{key} counts {int(counted or 0)} arrivals, a group is number"
            yield Damage(f"{text} {self._last_arrival}", key)
        self._last_arrival = 0

    def strangers(self, task: str) -> Iterator[Damage]:
        """Yield the members of a task's pools and queues whose records are of another stage."""
        keys = self._keys
        indexes: list[tuple[str, str, Command]] = [
            ("pool", "status", ("ZRANGE", key, 0, -1)) for key in keys.all_pools([task])
        ]
        indexes += [("waiting", "lane", ("XRANGE", key, "-", "+")) for key in self._jobs(task)]
        for stage, field, command in indexes:
            members = self._store.each("strangers", [command])[0]
            gids = [_gid_of(member) for member in members]
            index = str(command[1])
            for gid, record in zip(gids, self._records(gids), strict=True):
                if (record.get("stage"), record.get(field)) != (stage, index.rpartition(":")[2]):
                    text = f"{index} has {gid[:80]!r}, and no record says so"
                    yield from self._still(gid, record, [Damage(text, index, gid)])

    def _jobs(self, task: str) -> list[str]:
        return [self._keys.jobs(task, lane) for lane in self._limits.tasks[task].lanes]

    def _of_ages(self, task: str) -> Iterator[Damage]:
        """Yield the groups of the age index that neither wait nor run."""
        key = self._keys.age(task)
        members = self._store.each("ages", [("ZRANGE", key, 0, -1)])[0]
        gids = [member.decode(errors="replace") for member in members]
        records = self._records(gids)
        for gid, record in zip(gids, records, strict=True):
            is_right = record.get("stage") in ("waiting", "running")
            if not is_right and self._store.each("ages", [("ZSCORE", key, gid)])[0] is not None:
                text = f"{key} has {gid}, which neither waits nor runs"
                yield from self._still(gid, record, [Damage(text, key, gid)])

    def orphans(self, stored: Iterable[str]) -> Iterator[Damage]:
        """Yield the payloads, `stored` before `damage`, that nothing names."""
        garbage = {self._keys.payload(gid, token) for gid, token, _ in self._garbage()}
        unnamed = sorted(set(stored) - self.payloads - garbage)
        ages = self._store.each("orphans", [("PTTL", key) for key in unnamed])
        # bytes that no script has accepted expire
        kept = [key for key, age in zip(unnamed, ages, strict=True) if age == -1]
        for key in kept:
            match = _PAYLOAD.search(key)
            if match is None or self._is_named(match["gid"], match["token"]):
                continue
            if self._store.each("orphans", [("EXISTS", key)])[0]:
                yield Damage(f"{key} is kept, and nothing names it", key, match["gid"])

    def _garbage(self) -> list[list[str]]:
        """Return the (gid, token, chunks) of the payloads that are to be freed."""
        listed = self._store.each("orphans", [("SMEMBERS", self._keys.garbage)])[0]
        entries = [entry.decode(errors="replace").split(" ") for entry in listed]
        return [entry for entry in entries if len(entry) == 3]

    def _is_named(self, gid: str, token: str) -> bool:
        """Return whether a record, a manifest or the garbage names a payload, in this order."""
        record = self._records([gid])[0]
        if record and token in ("init", record.get("payload")):
            return True
        archives = (Archive(self._context, n) for n in ("train", "eval"))
        if any(entry.gid == gid for archive in archives for entry in archive.entries()):
            return True
        return any(entry[:2] == [gid, token] for entry in self._garbage())

    def _of_archive(self, archive: Archive) -> Iterator[Damage]:
        """Yield the payloads of archived batches whose bytes are missing."""
        entries = [entry.payload for entry in archive.entries()]
        commands = [("STRLEN", key) for ref in entries for key in self._of_ref(ref)]
        answers = iter(self._store.each("archive", commands))
        first = archive.steps().start
        wrong = []
        for ref in entries:
            there = sum(islice(answers, ref.chunks))
            self.payloads.update(self._of_ref(ref))
            self.weight += ref.size if ref.gid not in self._weighed else 0
            if there != ref.size:
                wrong.append(self._of_bytes(ref.gid, ref.token, there, ref.size))
        # batches that were freed meanwhile have no bytes
        if archive.steps().start == first:
            yield from wrong

    def _of_ref(self, ref: PayloadRef) -> list[str]:
        return self._keys.payload_chunks(ref.gid, ref.token, ref.chunks)

    def _still(self, gid: str, record: Record, wrong: Iterable[Damage]) -> Iterator[Damage]:
        """Yield the faults of a group if its record has not changed since it was read."""
        found = list(wrong)
        if found and self._records([gid])[0] == record:
            yield from found

    def _records(self, gids: Sequence[str]) -> list[Record]:
        commands = [("HGETALL", self._keys.group(gid)) for gid in gids]
        return [text_fields(raw) for raw in self._store.each("records", commands)]


def _is_letter(letter: bytes | None) -> bool:
    try:
        return "reason" in orjson.loads(letter or b"")
    except (orjson.JSONDecodeError, TypeError):
        return False


def _gid_of(member: Any) -> str:
    """Return the gid in a member of a pool, or in an entry of a queue."""
    if isinstance(member, bytes):
        return member.decode(errors="replace").partition(":")[2] or repr(member)
    fields = member[1]
    return text_fields(fields if isinstance(fields, dict) else dict([fields])).get("gid", "?")
