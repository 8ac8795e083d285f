"""Checks the fields of a run's hashes, for readers and for `fsck`, by the forms of the key table.

The scripts write every field. Something else changed one that is missing or malformed: a process
that needs it raises RunDamaged with the name of the key, and `fsck` lists it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, Literal, NamedTuple

from buffer.errors import RunDamaged
from buffer.ids import GID
from buffer.redis.key_table import OF_A_STAGE, ROLES, TABLE

HINT = (
    "something else wrote to the keys of this run, or the server evicts keys (see `rolloutmq "
    "doctor`); `rolloutmq fsck` lists all that is wrong, and `rolloutmq run CONFIG --regenerate` "
    "makes the run again from its newest checkpoint"
)

_HASHES = {key.partition(":")[0]: row for key, row in TABLE.items() if row.type == "HASH"}
_GROUP = _HASHES["group"]

RECORD_FIELDS = tuple(
    dict.fromkeys([*_GROUP.required, *chain(*OF_A_STAGE.values()), *_GROUP.optional, "lineage"])
)
"""All fields of records that `fsck` reads."""

MISSING = "\1"
"""Stands for a missing field where the values of a record are one text; see `is_whole`."""


class Damage(NamedTuple):
    """One fault that `fsck` found, with the whole Redis key and the group if known.

    `kind`: "lost" is a group in no stage, "doubled" one in two stages or batches.
    """

    text: str
    key: str = ""
    gid: str = ""
    kind: Literal["fault", "lost", "doubled"] = "fault"

    def __str__(self) -> str:
        return self.text


def lasting(check: Callable[[], Iterable[Damage]]) -> list[Damage]:
    """Return the faults that a check finds at a key each time it is repeated.

    On a live run, its keys are read at different instants: a move may look like a fault once.
    """
    found = list(check())
    for _ in range(2):
        if found:
            places = {(fault.key, fault.gid) for fault in found}
            found = [fault for fault in check() if (fault.key, fault.gid) in places]
    return found


def wrong_fields(kind: str, key: str, fields: Mapping[str, str]) -> Iterator[Damage]:
    """Yield what is wrong with the fields of a hash; `kind` is the first word of its name."""
    row = _HASHES[kind]
    required = dict(row.required)
    if kind == "group":
        required.update(OF_A_STAGE.get(fields.get("stage", ""), {}))
    if kind == "control":
        # opened once, a role has both fields for ever
        pairs = [(role, f"{role}_seen_ms") for role in ROLES]
        opened = [name for pair in pairs if not fields.keys().isdisjoint(pair) for name in pair]
        required.update((name, row.optional[name]) for name in opened)
    lacking = [name for name in required if name not in fields]
    yield from (_damage(key, f"{key} has no field {name}") for name in lacking)
    others = {name: row.others for name in fields if row.others and name not in row.optional}
    for name, form in chain(required.items(), row.optional.items(), others.items()):
        if name in fields and not re.fullmatch(form, fields[name], re.ASCII):
            yield _damage(key, f"{key}: the field {name} is {fields[name][:60]!r}")


def is_whole(values: str, stage: str) -> bool:
    """Return whether `wrong_fields` finds nothing in a record, a hundred times faster.

    `values`: of RECORD_FIELDS in this order, with NUL between them.
    """
    pattern = _record_pattern(stage if stage in OF_A_STAGE else "dead")
    return pattern.fullmatch(values) is not None


@cache
def _record_pattern(stage: str) -> re.Pattern[str]:
    required = {**_GROUP.required, **OF_A_STAGE.get(stage, {})}
    parts = []
    for name in RECORD_FIELDS:
        form, other = required.get(name), _GROUP.optional.get(name)
        part = f"(?:{form})" if form else f"(?:{other}|{MISSING})" if other else "[^\0]*+"
        # of a name in both, both forms hold
        parts.append(f"(?=(?:{other})(?:\0|$)){part}" if form and other else part)
    return re.compile("\0".join(parts), re.ASCII)


def _damage(key: str, text: str) -> Damage:
    gid = key.rpartition(":")[2]
    return Damage(text, key, gid if ":group:" in key and GID.fullmatch(gid) else "")


def key_gone(key: str) -> RunDamaged:
    return RunDamaged(f"{key} is gone, and other keys of the run are there", hint=HINT)


def text_fields(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the fields of a hash as text; invalid UTF-8 becomes �."""
    return {k.decode(errors="replace"): v.decode(errors="replace") for k, v in raw.items()}


def require_fields(kind: str, key: str, fields: Mapping[str, str]) -> None:
    """Raise RunDamaged for the first field of a hash that is missing or cannot be read."""
    for found in wrong_fields(kind, key, fields):
        raise RunDamaged(found.text, hint=HINT)


def read_counts(key: str, names: Sequence[str], values: Sequence[Any]) -> list[int]:
    """Return whole numbers of a hash, 0 for a missing field. Raises RunDamaged."""
    counts = []
    for name, value in zip(names, values, strict=True):
        try:
            counts.append(int(value or 0))
        except ValueError:
            shown = value.decode(errors="replace") if isinstance(value, bytes) else value
            text = f"{key}: the field {name} is {shown[:60]!r}"
            raise RunDamaged(text, hint=HINT) from None
    return counts
