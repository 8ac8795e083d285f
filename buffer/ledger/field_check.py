"""Checks the hashes and lists of a run that are no records of groups, each against its second copy.

What is compared was read at several instants: a difference counts only if it is still there when it
is read again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from buffer.ledger.key_check import FoundKey
from buffer.model.damage import Damage, DamageKind
from buffer.model.limits import RunLimits
from buffer.redis.key_fields import text_fields, wrong_fields
from buffer.redis.keys import Keys
from buffer.redis.store import Store

_WITH_FIELDS = ("meta", "control", "ledger", "progress", "bytes", "clock")
_LINEAGE = re.compile(r"[\w.-]+:\d+")
_STEPS = ("forgotten", "freed", "committed", "taken")
"""Fields of a ledger, each at most as high as the next."""

_TRIES = 3
"""Readings of two keys that differ before that counts as damage."""


class FieldCheck:
    """Checks the fields of the keys that were found; those of a wrong type are left out."""

    def __init__(
        self, store: Store, keys: Keys, limits: RunLimits, found: Sequence[FoundKey]
    ) -> None:
        self._store = store
        self._keys = keys
        self._limits = limits
        self._found: Mapping[str, FoundKey] = {each.name: each for each in found}
        self._hashes = [each for each in found if each.kind in _WITH_FIELDS and each.type == "hash"]

    def damage(self) -> Iterator[Damage]:
        """Yield what is missing, cannot be read, or contradicts another key."""
        commands = [("HGETALL", each.key) for each in self._hashes]
        for each, raw in zip(self._hashes, self._store.each("fields", commands), strict=True):
            fields = text_fields(raw)
            if each.name == "ledger:eval" and fields:
                # an evaluation takes before it commits
                fields = {"committed": "0", "freed": "0", **fields}
            yield from wrong_fields(each.kind, each.key, fields)
        yield from self._settings()
        yield from self._lineages()
        yield from self._cursors()
        yield from self._workers()
        for ledger in ("train", "eval"):
            yield from self._steps(ledger)

    def _settings(self) -> Iterator[Damage]:
        """Yield the fields of `meta` that differ from their copy."""
        keys = self._keys
        for _ in range(_TRIES):
            mine = text_fields(self._read(("HGETALL", keys.meta), "meta", "hash") or {})
            copy = text_fields(self._read(("HGETALL", keys.meta_copy), "meta:copy", "hash") or {})
            if mine == copy or not (mine and copy):
                return  # one that is gone is reported as such
        for name in sorted(mine.keys() | copy.keys()):
            if mine.get(name) != copy.get(name):
                text = f"{keys.meta} and {keys.meta_copy} differ in {name}"
                yield Damage(DamageKind.FIELD, text, keys.meta, field=name)

    def _lineages(self) -> Iterator[Damage]:
        keys = self._keys
        entries = self._read(("LRANGE", keys.lineages, 0, -1), "lineages", "list") or []
        was_opened = self._read(("HGET", keys.control, "trainer_seen_ms"), "control", "hash")
        if was_opened and "lineages" not in self._found:
            text = f"{keys.lineages} is gone, and a trainer has opened the run"
            yield Damage(DamageKind.KEY_GONE, text, keys.lineages)
        for entry in entries:
            if not _LINEAGE.fullmatch(entry.decode(errors="replace")):
                text = f"{keys.lineages} contains {entry!r}, which is no lineage:step"
                yield Damage(DamageKind.FIELD, text, keys.lineages)

    def _cursors(self) -> Iterator[Damage]:
        """Yield the tasks whose cursor differs from its copy in the account."""
        keys = self._keys
        for task in self._limits.tasks:
            for _ in range(_TRIES):
                mine = self._read(("HGET", keys.cursors, task), "cursors", "hash")
                copy = self._read(
                    ("HGET", keys.progress(task), "cursor"), f"progress:{task}", "hash"
                )
                if (mine or b"0") == (copy or b"0"):
                    break
            else:
                text = f"{keys.cursors} has {_shown(mine)} for {task}, the account {_shown(copy)}"
                yield Damage(DamageKind.COUNT, text, keys.cursors, field=task, task=task)

    def _workers(self) -> Iterator[Damage]:
        """Yield the workers that have a record, and no heartbeat: no pause would wait for them."""
        keys = self._keys
        for name in self._found:
            worker = name.removeprefix("worker:")
            if worker == name or self._read(("ZSCORE", keys.workers, worker), "workers", "zset"):
                continue
            # one that has left meanwhile has no record any more
            if self._store.each("workers", [("EXISTS", keys.worker(worker))], "control")[0]:
                text = f"{keys.workers} lacks {worker}, which has a record"
                yield Damage(DamageKind.INDEX, text, keys.workers, field=worker)

    def _steps(self, ledger: str) -> Iterator[Damage]:
        """Yield how the steps of a ledger contradict each other and the manifests that exist."""
        before = self._counts(ledger)
        names = [re.fullmatch(rf"batch:{ledger}:(\d+)", name) for name in self._found]
        steps = {int(match[1]) for match in names if match}
        wrong = list(self._contradictions(before, steps)) if before is not None else []
        # a step that was taken or freed since the keys were listed explains a difference
        if wrong and self._counts(ledger) == before:
            key = self._keys.ledger(ledger)
            for text in wrong:
                yield Damage(DamageKind.STEPS, f"{key}: {text}", key)

    def _contradictions(self, counts: Sequence[int], steps: set[int]) -> Iterator[str]:
        *counts, awaits = counts
        found = dict(zip(_STEPS, counts, strict=True))
        if self._read(("HGET", self._keys.control, "recovering"), "control", "hash"):
            # a trainer commits again what a server has lost before it resets the ledger
            del found["committed"]
        if list(found.values()) != sorted(found.values()):
            shown = ", ".join(f"{name} {step}" for name, step in found.items())
            yield f"{shown} are not in this order"
        forgotten, taken = found["forgotten"], found["taken"]
        if awaits > taken:
            yield f"awaits {awaits}, and the last step that was taken is {taken}"
        beyond = sorted(step for step in steps if not forgotten < step <= taken)
        if beyond:
            shown = ", ".join(map(str, beyond[:5]))
            kept = f"{forgotten + 1} to {taken} are kept"
            yield f"there are manifests of the steps {shown}, and {kept}"

    def _counts(self, ledger: str) -> list[int] | None:
        command = ("HMGET", self._keys.ledger(ledger), *_STEPS, "awaits")
        values = self._read(command, f"ledger:{ledger}", "hash")
        try:
            return [int(value or 0) for value in values] if values else None
        except ValueError:  # a field that cannot be read is reported as such
            return None

    def _read(self, command: tuple[str | int, ...], name: str, kind: str) -> Any:
        """Return the answer to a command; None if its key has another type."""
        found = self._found.get(name)
        if found is not None and found.type != kind:
            return None
        return self._store.each("fields", [command], "control")[0]


def _shown(value: bytes | None) -> str:
    return value.decode(errors="replace") if value is not None else "none"
