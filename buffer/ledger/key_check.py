"""Checks the keys of a run by their names and types: what is of another type, and what is unknown.

A key that was renamed is gone under its name, and unknown under the new one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from buffer.model.damage import Damage, DamageKind
from buffer.model.limits import RunLimits
from buffer.redis.keys import CLUSTER_TABLE, TABLE, KeyRow, Keys
from buffer.redis.store import Store

_FORM_OF = {
    "lane": "eval|resume|fresh",
    "status": "completed|aborted|expired",
    "place": "archived|filtered|dropped",
    "who": r"\w+",
    "name": "train|eval",
    "step": r"\d+",
    "version": r"\d+(?::\d+)?",
    "token": r"[^:]+(?::\d+)?",
    "gid": r"(?P<of>[\w.-]+)-\d{10}",
    "task": r"(?P<of>[\w.-]+?)",
}
"""What stands for a placeholder of `TABLE`; `of` is the task that a key belongs to."""

_ANY = r"[\w.-]+"
_PAGE = 500


@dataclass(frozen=True, slots=True)
class FoundKey:
    """A key of the run: its name without prefix, its kind (the first word), and its type."""

    key: str
    name: str
    kind: str
    type: str


class KeyCheck:
    """Walks over all keys with the prefix of a run, known or not. O(keys of the server)."""

    def __init__(self, store: Store, keys: Keys, limits: RunLimits) -> None:
        self._store = store
        self._keys = keys
        self._tasks = limits.tasks
        rows = [*TABLE.items(), *(CLUSTER_TABLE.items() if keys.spread else ())]
        self._rows: list[tuple[re.Pattern[str], KeyRow]] = [
            (re.compile(_pattern(name)), row) for name, row in rows
        ]

    def walk(self) -> Iterator[FoundKey]:
        """Yield every key of the run that exists, in no order."""
        names = self._store.retrying("keys", self._scan)
        for start in range(0, len(names), _PAGE):
            page = names[start : start + _PAGE]
            types = self._store.each("types", [("TYPE", key) for key in page], "control")
            for key, kind in zip(page, types, strict=True):
                # a key may have ended since it was listed
                if kind != b"none":
                    name = self._name(key)
                    yield FoundKey(key, name, name.partition(":")[0], kind.decode())

    def damage(self, found: Iterable[FoundKey]) -> Iterator[Damage]:
        """Yield what is wrong with the names and types of these keys, and what keys are gone."""
        kinds = set()
        for each in found:
            kinds.add(each.name)
            row = self._row(each.name)
            if row is None:
                text = f"{each.key} is no key of this run"
                yield Damage(DamageKind.KEY_UNKNOWN, text, each.key)
            elif row.type.lower() != each.type:
                text = f"{each.key} is a {each.type}, and not a {row.type.lower()}"
                yield Damage(DamageKind.KEY_TYPE, text, each.key)
        for name in ("meta", "meta:copy", "control", "ledger:train"):
            if name not in kinds:
                key = self._keys.prefix + name
                yield Damage(DamageKind.KEY_GONE, f"{key} is gone", key)

    def _scan(self) -> list[str]:
        """Return all keys of the run once; SCAN may return one twice."""
        found = {
            key.decode(errors="replace"): None
            for _, client in self._store.servers.masters()
            for key in client.scan_iter(self._keys.pattern, count=1000)
        }
        return list(found)

    def _name(self, key: str) -> str:
        """Return the name of a key without the prefix of the run, or of a group in a cluster."""
        return key.partition("}:")[2]

    def _row(self, name: str) -> KeyRow | None:
        for pattern, row in self._rows:
            match = pattern.fullmatch(name)
            if match and match.groupdict().get("of") in (None, *self._tasks):
                return row
        return None


def _pattern(name: str) -> str:
    """Return the regular expression for a name of `TABLE`."""
    parts = re.split(r"<(\w+)>", name)
    forms = [_FORM_OF.get(part, _ANY) if i % 2 else re.escape(part) for i, part in enumerate(parts)]
    return "".join(f"(?:{form})" if i % 2 else form for i, form in enumerate(forms))
