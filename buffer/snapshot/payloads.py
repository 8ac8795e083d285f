"""The payloads that a copied index names: what must be in a snapshot for its groups and batches to be readable.

A group that lives is named by its record. One that is archived has none any more: while its batch is retained, only
the manifest names it. The bytes of a dead group are evidence: it may be dead because they are gone or damaged (I11).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from buffer.manifest import ManifestEntry
from buffer.payloads import PayloadRef
from buffer.snapshot.folder import Item


class Named(NamedTuple):
    """One payload; evidence is copied as it is, whole or not."""

    ref: PayloadRef
    is_evidence: bool = False


class _Archived(NamedTuple):
    """How far a ledger is archived: up to step `freed`, and the first `slice` groups of the step behind it."""

    freed: int = 0
    slice: int = 0

    def covers(self, step: int, place: int) -> bool:
        return step <= self.freed or (step == self.freed + 1 and place < self.slice)


def named_payloads(items: Iterable[Item]) -> Iterator[Named]:
    """Those of an index, in its order: each ledger stands before its batches. Keeps one item in memory."""
    ledgers: dict[str, _Archived] = {}
    batch, lines_before = "", 0
    for item in items:
        section, _, name = item.key.partition(":")
        if section == "group":
            yield from _of_record(name, item)
        elif section == "ledger":
            ledgers[name] = _archived(item)
        elif section == "batch":
            lines_before = lines_before if name == batch else 0
            batch = name
            yield from _of_manifest(name, item, lines_before, ledgers)
            lines_before += len(item.data)


def _of_record(gid: str, item: Item) -> Iterator[Named]:
    """The newest bytes, and the prompt, to which an expired or requeued group goes back."""
    fields = dict(zip(item.data[::2], item.data[1::2], strict=True))
    size, crc = int(fields.get("size") or 0), fields.get("crc", "")
    if fields["payload"] == "init":
        yield Named(PayloadRef(gid, "init", 1, size, crc))
        return
    yield Named(PayloadRef(gid, "init", 1, 0, ""))
    yield Named(PayloadRef(gid, fields["payload"], int(fields["chunks"]), size, crc), fields["stage"] == "dead")


def _of_manifest(name: str, item: Item, lines_before: int, ledgers: dict[str, _Archived]) -> Iterator[Named]:
    """Those of archived groups; the others of a batch have a record."""
    ledger, _, step = name.rpartition(":")
    archived = ledgers.get(ledger, _Archived())
    for line, text in enumerate(item.data, start=lines_before):
        # line 0 is the header
        if line and archived.covers(int(step), line - 1):
            yield Named(ManifestEntry.parse(text.decode()).payload)


def _archived(item: Item) -> _Archived:
    fields = dict(zip(item.data[::2], item.data[1::2], strict=True))
    return _Archived(int(fields.get(b"freed", 0)), int(fields.get(b"slice", 0)))
