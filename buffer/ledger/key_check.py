"""Check the keys of a run that are no records of groups: their names, types and fields.

Keys are read at several instants: a contradiction counts only if it lasts.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from buffer.ids import GID
from buffer.redis.bounds import KEYS_PER_TRIP
from buffer.redis.bulk_io import send
from buffer.redis.key_fields import Damage, lasting, text_fields, wrong_fields
from buffer.redis.key_table import LANE, TABLE
from buffer.redis.store import RunContext

_FORM_OF = {
    "lane": LANE,
    "status": "completed|aborted|expired",
    "who": r"\w+",
    "name": "train|eval",
    "step": r"\d+",
    "version": r"\d+(?::\d+)?",
    "token": r"[^:]+(?::\d+)?",
    "gid": r"(?P<of>[\w.-]+)-\d{10}",
    "task": r"(?P<of>[\w.-]+?)",
}
"""Patterns for the placeholders of `TABLE`; `of` is the task of a key."""

_ANY = r"[\w.-]+"
_WITH_FIELDS = {
    name.partition(":")[0] for name, row in TABLE.items() if row.required or row.optional
}
"""Kinds of hashes whose fields are checked, by the first word of their names."""

_LINEAGE = re.compile(r"[\w.-]+:\d+")
_STEPS = ("forgotten", "freed", "committed", "taken")
"""Fields of a ledger, each at most as high as the next."""


class FoundKey(NamedTuple):
    """A key of the run that exists; `kind` is the first word of its name, without the prefix."""

    key: str
    kind: str
    type: str


class NameSet:
    """A set of names at 8 bytes for each: it keeps their 64-bit hashes."""

    def __init__(self) -> None:
        self._hashes = array("q")
        self._sorted = np.array([], "i8")

    def add(self, *names: str) -> None:
        self._hashes.extend(map(hash, names))

    def lacks(self, names: Sequence[str]) -> list[str]:
        """Return the names that are not in this set."""
        if len(self._sorted) != len(self._hashes):
            self._sorted = np.sort(np.array(self._hashes, "i8"))
        hashes = np.array([hash(name) for name in names], "i8")
        first, last = (np.searchsorted(self._sorted, hashes, side) for side in ("left", "right"))
        return [names[index] for index in np.flatnonzero(first == last)]

    def __sub__(self, other: NameSet) -> set[int]:
        """Return the hashes of the names that `other` lacks."""
        mine, others = (np.array(each._hashes, "i8") for each in (self, other))
        return set(np.setdiff1d(mine, others).tolist())


class KeyCheck:
    """List all keys with the prefix of a run, known or not, and check them. O(keys).

    Of the keys of groups, it keeps only `payloads`, and `draws`: by task, those of groups that have
    a record or a dead letter.
    """

    def __init__(self, context: RunContext) -> None:
        self._store, self._keys, limits, _ = context
        self._tasks = limits.tasks
        self._known = {None, *limits.tasks}
        self._forms: dict[str, list[tuple[re.Pattern[str], str]]] = defaultdict(list)
        for name, row in TABLE.items():
            form = (re.compile(_pattern(name)), row.type.lower())
            self._forms[name.partition(":")[0]].append(form)
        self._store.retrying("keys", self._list)

    def _list(self) -> None:
        self.found: dict[str, FoundKey] = {}  # by name without prefix
        self.payloads = NameSet()
        self.draws = {task: array("q") for task in self._tasks}
        self._wrong: dict[str, Damage] = {}
        for key, kind in self._typed(f"{self._keys.prefix}*"):
            name = key.partition("}:")[2]
            row, _, rest = name.partition(":")
            if fault := self._fault(row, name, key, kind):
                self._wrong[key] = fault
            if row == "payload":
                self.payloads.add(key)
            elif row not in ("group", "dead") or not rest:
                self.found[name] = FoundKey(key, row, kind)
            elif rest[:-11] in self.draws and GID.fullmatch(rest):
                self.draws[rest[:-11]].append(int(rest[-10:]))

    def _typed(self, pattern: str) -> Iterator[tuple[str, str]]:
        """Yield the keys that match, with their types; a key may come twice."""
        for _, client in self._store.servers.masters():
            cursor = -1
            while cursor:
                cursor, page = client.scan(max(0, cursor), match=pattern, count=KEYS_PER_TRIP)
                keys = [key.decode(errors="surrogateescape") for key in page]
                # text is sent faster than bytes
                names = [key if key.isascii() else raw for key, raw in zip(keys, page, strict=True)]
                types = send(client, [("TYPE", name) for name in names])
                # a key may have ended since it was listed
                yield from (
                    (k, t.decode()) for k, t in zip(keys, types, strict=True) if t != b"none"
                )

    def _fault(self, row: str, name: str, key: str, kind: str) -> Damage | None:
        for pattern, wanted in self._forms.get(row, ()):
            match = pattern.fullmatch(name)
            if match and match.groupdict().get("of") in self._known:
                if kind == wanted:
                    return None
                return Damage(f"{key} is a {kind}, and not a {wanted}", key)
        return Damage(f"{key} is no key of this run", key)

    def payload_keys(self, hashes: set[int]) -> Iterator[str]:
        """Yield the payloads with these hashes of their names."""
        keys = (key for key, _ in self._typed(f"{self._keys.prefix}payload:*"))
        yield from (key for key in keys if hash(key) in hashes)

    def damage(self) -> Iterator[Damage]:
        """Yield missing keys, and keys with a wrong name or type."""
        yield from self._wrong.values()
        for name in ("meta", "control", "ledger:train"):
            if name not in self.found:
                key = self._keys.prefix + name
                yield Damage(f"{key} is gone", key)

    def of_kind(self, kind: str) -> dict[str, FoundKey]:
        """Return the keys of a kind by the rest of their names, such as the worker of `leased:`."""
        return {
            name.partition(":")[2]: each for name, each in self.found.items() if each.kind == kind
        }

    def fields(self) -> Iterator[Damage]:
        """Yield which fields are missing, cannot be read, or contradict another key."""
        hashes = {
            name: each
            for name, each in self.found.items()
            if each.kind in _WITH_FIELDS and each.type == "hash"
        }
        commands = [("HGETALL", each.key) for each in hashes.values()]
        answers = self._store.send("fields", commands)
        for (name, each), raw in zip(hashes.items(), answers, strict=True):
            fields = text_fields(raw)
            if name == "ledger:eval" and fields:
                # an evaluation takes before it commits
                fields = {"committed": "0", "freed": "0", **fields}
            yield from wrong_fields(each.kind, each.key, fields)
        yield from lasting(self._contradictions)

    def _contradictions(self) -> Iterator[Damage]:
        keys = self._keys
        opened = self._read(("HGET", keys.control, "trainer_seen_ms"), "control", "hash")
        if opened and "lineages" not in self.found:
            yield Damage(
                f"{keys.lineages} is gone, and a trainer has opened the run", keys.lineages
            )
        for entry in self._read(("LRANGE", keys.lineages, 0, -1), "lineages", "list") or []:
            if not _LINEAGE.fullmatch(entry.decode(errors="replace")):
                text = f"{keys.lineages} contains {entry!r}, which is no lineage:step"
                yield Damage(text, keys.lineages)
        for task in self._tasks:
            mine = self._read(("HGET", keys.cursors, task), "cursors", "hash")
            copy = self._read(("HGET", keys.progress(task), "cursor"), f"progress:{task}", "hash")
            if (mine or b"0") != (copy or b"0"):
                one, other = ((value or b"none").decode(errors="replace") for value in (mine, copy))
                text = f"{keys.cursors} has {one} for {task}, the account {other}"
                yield Damage(text, keys.cursors)
        for worker, each in self.of_kind("worker").items():
            beats = self._read(("ZSCORE", keys.workers, worker), "workers", "zset")
            # no pause would wait for it; one that has left since has no record any more
            if not beats and self._exists(each.key):
                yield Damage(f"{keys.workers} lacks {worker}, which has a record", keys.workers)
        for ledger in ("train", "eval"):
            yield from self._of_steps(ledger)

    def _of_steps(self, ledger: str) -> Iterator[Damage]:
        """Yield the steps of a ledger that contradict each other or the manifests."""
        key, counts = self._keys.ledger(ledger), self._counts(ledger)
        if not counts:
            return
        found = {name: counts[name] for name in _STEPS}
        if self._read(("HGET", self._keys.control, "recovering"), "control", "hash"):
            # a trainer commits again what a server has lost before it resets the ledger
            del found["committed"]
        if list(found.values()) != sorted(found.values()):
            shown = ", ".join(f"{name} {step}" for name, step in found.items())
            yield Damage(f"{key}: {shown} are not in this order", key)
        forgotten, taken = found["forgotten"], found["taken"]
        if counts["awaits"] > taken or 0 < counts["awaits"] <= counts["committed"]:
            between = f"step {counts['committed']} is committed, and {taken} was taken last"
            text = f"awaits {counts['awaits']}, while {between}"
            yield Damage(f"{key}: {text}", key)
        named = [re.fullmatch(rf"{ledger}:(\d+)", name) for name in self.of_kind("batch")]
        beyond = sorted(int(n[1]) for n in named if n and not forgotten < int(n[1]) <= taken)
        # one that was listed may have been freed since
        there = [step for step in beyond if self._exists(self._keys.batch(ledger, step))]
        if there:
            shown = ", ".join(map(str, there[:5]))
            kept = f"{forgotten + 1} to {taken} are kept"
            yield Damage(f"{key}: there are manifests of the steps {shown}, and {kept}", key)

    def _counts(self, ledger: str) -> dict[str, int]:
        names = (*_STEPS, "awaits")
        command = ("HMGET", self._keys.ledger(ledger), *names)
        values = self._read(command, f"ledger:{ledger}", "hash") or []
        try:
            return dict(zip(names, (int(value or 0) for value in values), strict=False))
        except ValueError:  # a field that cannot be read is reported as such
            return {}

    def _exists(self, key: str) -> bool:
        return bool(self._store.send("fields", [("EXISTS", key)])[0])

    def _read(self, command: tuple[str | int, ...], name: str, kind: str) -> Any:
        """Return the answer to a command; None if its key has another type."""
        found = self.found.get(name)
        if found is not None and found.type != kind:
            return None
        return self._store.send("fields", [command])[0]


def _pattern(name: str) -> str:
    parts = re.split(r"<(\w+)>", name)
    forms = [_FORM_OF.get(part, _ANY) if i % 2 else re.escape(part) for i, part in enumerate(parts)]
    return "".join(f"(?:{form})" if i % 2 else form for i, form in enumerate(forms))
