"""The account of audits: which batches were audited, and what was found in them.

An auditor (`consumer/grpo/audit`) chooses groups after they were taken, so no worker can know them.
One script records all findings of a batch and its position; an auditor that dies before that call
chooses anew.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast, get_args

from buffer.manifest import Manifest
from buffer.redis.keys import Keys
from buffer.redis.scripts import Arg
from buffer.redis.store import Store

LONGEST_DETAIL = 500  # bytes

Verdict = Literal["agrees", "differs", "impossible"]


class AuditFinding(NamedTuple):
    """What an audit found in one group; `worker` is "" if unknown by now."""

    verdict: Verdict
    worker: str
    gid: str
    detail: str


class AuditPosition(NamedTuple):
    """The newest audited batch: its step, and the server's time in ms when it was taken."""

    step: int = 0
    taken_ms: int = 0

    @classmethod
    def of(cls, manifest: Manifest) -> AuditPosition:
        found = re.search(r" taken_ms=(\d+)", manifest.header)
        return cls(manifest.step, int(found[1]) if found else 0)

    @classmethod
    def parse(cls, text: str) -> AuditPosition:
        """Parse the `str` of a position; other text gives the position before the first batch."""
        found = re.fullmatch(r"(\d+)\.(\d+)", text)
        return cls(int(found[1]), int(found[2])) if found else cls()

    def __str__(self) -> str:
        return f"{self.step}.{self.taken_ms}" if self.step else ""

    def precedes(self, other: AuditPosition) -> bool:
        """Return whether the batch at `other` was taken later; steps repeat after a rollback."""
        return other.step > self.step or other.taken_ms > self.taken_ms


class AuditAccount(NamedTuple):
    """The audits of a run so far: groups by worker, and batches that were freed before theirs."""

    position: AuditPosition
    missed: int
    groups: dict[str, dict[Verdict, int]]
    failed: dict[str, str]  # newest failed audit of each worker, until an operator admits it


class Audits:
    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys

    def record(
        self,
        before: AuditPosition,
        after: AuditPosition,
        findings: Sequence[AuditFinding],
        *,
        missed: int = 0,
    ) -> bool:
        """Record the findings of the batch at `after`, and bar the workers that they name.

        Returns False, and changes nothing, if another auditor has moved the position `before`.
        """
        units = [
            part
            for verdict, worker, gid, detail in findings
            for part in (verdict, worker, gid, _shortened(detail))
        ]
        arguments: dict[str, Arg] = {"before": str(before), "after": str(after), "missed": missed}
        reply = self._store.call("audit", self._keys.slots(), arguments, tail_args=units)
        return bool(reply[0] != "MOVED")

    def read(self) -> AuditAccount:
        raw = self._store.ask("audits", "HGETALL", self._keys.audits)
        fields = {
            name.decode(errors="replace"): value.decode(errors="replace")
            for name, value in raw.items()
        }
        missed = fields.get("missed", "")
        position = AuditPosition.parse(fields.get("position", ""))
        account = AuditAccount(position, int(missed) if missed.isdecimal() else 0, {}, {})
        for name, value in fields.items():
            kind, _, worker = name.partition(":")
            if kind == "failed":
                account.failed[worker] = value
            elif kind in get_args(Verdict) and value.isdecimal():
                account.groups.setdefault(worker, {})[cast(Verdict, kind)] = int(value)
        return account


def _shortened(detail: str) -> str:
    # what a worker submitted is part of it
    return detail.encode(errors="replace")[:LONGEST_DETAIL].decode(errors="ignore")
