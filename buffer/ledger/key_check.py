"""Check the keys of a run that are no records of groups: their names, types and fields.

Keys are read at several instants: a difference counts only if it remains when both are read again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from buffer.redis.key_fields import LANE, Damage, text_fields, wrong_fields
from buffer.redis.keys import CLUSTER_TABLE, TABLE
from buffer.redis.store import RunContext

_FORM_OF = {
    "lane": LANE,
    "status": "completed|aborted|expired",
    "stage": "archived|filtered|dropped",
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
_WITH_FIELDS = ("meta", "control", "ledger", "progress", "bytes", "clock")
_LINEAGE = re.compile(r"[\w.-]+:\d+")
_STEPS = ("forgotten", "freed", "committed", "taken")
"""Fields of a ledger, each at most as high as the next."""

_PAGE = 500
_TRIES = 3
"""Readings of two keys that differ before that counts as damage."""


class FoundKey(NamedTuple):
    """A key of the run that exists; `kind` is the first word of its name, without the prefix."""

    key: str
    kind: str
    type: str


class KeyCheck:
    """List all keys with the prefix of a run, known or not, and check them. O(keys)."""

    def __init__(self, context: RunContext) -> None:
        self._store, self._keys, limits = context
        self._tasks = limits.tasks
        self.found = self._list()  # by name without prefix

    def of_kind(self, kind: str) -> dict[str, FoundKey]:
        """Return the keys of a kind by the rest of their names, such as the worker of `holds:`."""
        return {
            name.partition(":")[2]: each for name, each in self.found.items() if each.kind == kind
        }

    def _list(self) -> dict[str, FoundKey]:
        def scan() -> list[str]:
            # SCAN may return a key twice
            found = {
                key.decode(errors="replace"): None
                for _, client in self._store.servers.masters()
                for key in client.scan_iter(self._keys.pattern, count=1000)
            }
            return list(found)

        names = self._store.retrying("keys", scan)
        found = {}
        for start in range(0, len(names), _PAGE):
            page = names[start : start + _PAGE]
            types = self._store.each("types", [("TYPE", key) for key in page], "control")
            for key, kind in zip(page, types, strict=True):
                # a key may have ended since it was listed
                if kind != b"none":
                    name = key.partition("}:")[2]
                    found[name] = FoundKey(key, name.partition(":")[0], kind.decode())
        return found

    def damage(self) -> Iterator[Damage]:
        """Yield missing keys, and keys with a wrong name or type."""
        table = {**TABLE, **(CLUSTER_TABLE if self._keys.spread else {})}
        rows = [(re.compile(_pattern(name)), row.type.lower()) for name, row in table.items()]
        for name, each in self.found.items():
            matches = ((pattern.fullmatch(name), kind) for pattern, kind in rows)
            kinds = [
                kind
                for match, kind in matches
                if match and match.groupdict().get("of") in (None, *self._tasks)
            ]
            if not kinds:
                yield Damage(f"{each.key} is no key of this run", each.key)
            elif kinds[0] != each.type:
                yield Damage(f"{each.key} is a {each.type}, and not a {kinds[0]}", each.key)
        for name in ("meta", "control", "ledger:train"):
            if name not in self.found:
                key = self._keys.prefix + name
                yield Damage(f"{key} is gone", key)

    def fields(self) -> Iterator[Damage]:
        """Yield which fields are missing, cannot be read, or contradict another key."""
        hashes = {
            name: each
            for name, each in self.found.items()
            if each.kind in _WITH_FIELDS and each.type == "hash"
        }
        commands = [("HGETALL", each.key) for each in hashes.values()]
        answers = self._store.each("fields", commands)
        for (name, each), raw in zip(hashes.items(), answers, strict=True):
            fields = text_fields(raw)
            if name == "ledger:eval" and fields:
                # an evaluation takes before it commits
                fields = {"committed": "0", "freed": "0", **fields}
            yield from wrong_fields(each.kind, each.key, fields)
        yield from self._lineages()
        yield from self._cursors()
        yield from self._workers()
        for ledger in ("train", "eval"):
            yield from self._steps(ledger)

    def _lineages(self) -> Iterator[Damage]:
        key = self._keys.lineages
        was_opened = self._read(("HGET", self._keys.control, "trainer_seen_ms"), "control", "hash")
        if was_opened and "lineages" not in self.found:
            yield Damage(f"{key} is gone, and a trainer has opened the run", key)
        for entry in self._read(("LRANGE", key, 0, -1), "lineages", "list") or []:
            if not _LINEAGE.fullmatch(entry.decode(errors="replace")):
                yield Damage(f"{key} contains {entry!r}, which is no lineage:step", key)

    def _cursors(self) -> Iterator[Damage]:
        keys = self._keys
        for task in self._tasks:
            for _ in range(_TRIES):
                mine = self._read(("HGET", keys.cursors, task), "cursors", "hash")
                copy = self._read(
                    ("HGET", keys.progress(task), "cursor"), f"progress:{task}", "hash"
                )
                if (mine or b"0") == (copy or b"0"):
                    break
            else:
                text = f"{keys.cursors} has {_shown(mine)} for {task}, the account {_shown(copy)}"
                yield Damage(text, keys.cursors)

    def _workers(self) -> Iterator[Damage]:
        """Yield the workers with a record but no heartbeat: no pause would wait for them."""
        keys = self._keys
        for worker, each in self.of_kind("worker").items():
            # one that has left meanwhile has no record any more
            if (
                not self._read(("ZSCORE", keys.workers, worker), "workers", "zset")
                and self._store.each("workers", [("EXISTS", each.key)], "control")[0]
            ):
                yield Damage(f"{keys.workers} lacks {worker}, which has a record", keys.workers)

    def _steps(self, ledger: str) -> Iterator[Damage]:
        """Yield the steps of a ledger that contradict each other or the manifests."""
        before = self._counts(ledger)
        names = [re.fullmatch(rf"{ledger}:(\d+)", name) for name in self.of_kind("batch")]
        steps = {int(match[1]) for match in names if match}
        wrong = list(self._contradictions(before, steps)) if before else []
        # a step that was taken or freed since the keys were listed explains a difference
        if wrong and self._counts(ledger) == before:
            key = self._keys.ledger(ledger)
            yield from (Damage(f"{key}: {text}", key) for text in wrong)

    def _contradictions(self, counts: dict[str, int], steps: set[int]) -> Iterator[str]:
        found = {name: counts[name] for name in _STEPS}
        if self._read(("HGET", self._keys.control, "recovering"), "control", "hash"):
            # a trainer commits again what a server has lost before it resets the ledger
            del found["committed"]
        if list(found.values()) != sorted(found.values()):
            shown = ", ".join(f"{name} {step}" for name, step in found.items())
            yield f"{shown} are not in this order"
        forgotten, taken = found["forgotten"], found["taken"]
        if counts["awaits"] > taken:
            yield f"awaits {counts['awaits']}, and the last step that was taken is {taken}"
        beyond = sorted(step for step in steps if not forgotten < step <= taken)
        if beyond:
            shown = ", ".join(map(str, beyond[:5]))
            kept = f"{forgotten + 1} to {taken} are kept"
            yield f"there are manifests of the steps {shown}, and {kept}"

    def _counts(self, ledger: str) -> dict[str, int]:
        names = (*_STEPS, "awaits")
        command = ("HMGET", self._keys.ledger(ledger), *names)
        values = self._read(command, f"ledger:{ledger}", "hash") or []
        try:
            return dict(zip(names, (int(value or 0) for value in values), strict=False))
        except ValueError:  # a field that cannot be read is reported as such
            return {}

    def _read(self, command: tuple[str | int, ...], name: str, kind: str) -> Any:
        """Return the answer to a command; None if its key has another type."""
        found = self.found.get(name)
        if found is not None and found.type != kind:
            return None
        return self._store.each("fields", [command], "control")[0]


def _pattern(name: str) -> str:
    parts = re.split(r"<(\w+)>", name)
    forms = [_FORM_OF.get(part, _ANY) if i % 2 else re.escape(part) for i, part in enumerate(parts)]
    return "".join(f"(?:{form})" if i % 2 else form for i, form in enumerate(forms))


def _shown(value: bytes | None) -> str:
    return value.decode(errors="replace") if value is not None else "none"
