"""What `fsck` finds wrong with a run on a server, in a form that a repair can work from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DamageKind(StrEnum):
    """What is wrong; the fields of a `Damage` that each kind sets are named in its comment."""

    KEY_GONE = "key_gone"
    """a key that this run must have does not exist: key, and task where it belongs to one"""
    KEY_TYPE = "key_type"
    """a key has another Redis type than the table of keys says: key"""
    KEY_UNKNOWN = "key_unknown"
    """a key has the prefix of the run, but no name that this run can have: key"""
    FIELD = "field"
    """a value inside a key is missing, or cannot be read: key, field; task, gid if of one"""
    COUNT = "count"
    """a counter differs from the structure that it counts: key, field; task if of one"""
    STEPS = "steps"
    """the steps of a ledger contradict each other or the manifests: key"""
    MANIFEST = "manifest"
    """a manifest is gone, cannot be read, or names a group that is not in the batch: key, step"""
    LOST = "lost"
    """a group is in no stage: gid, task"""
    DOUBLED = "doubled"
    """a group is in two stages or two batches: gid, task"""
    HOLDS = "holds"
    """what a worker holds differs from its lease or from the records: key"""
    INDEX = "index"
    """an index lacks a group, has one too many, or has it at a wrong score: key; gid, task"""
    PAYLOAD = "payload"
    """the bytes of a group are gone, or are not as many as its record says: key, gid, task"""
    ORPHAN = "orphan"
    """payload bytes that no record, manifest or garbage names: key, gid, task"""
    BYTES = "bytes"
    """the count of payload bytes differs from the sizes in the records: key"""
    UNCHECKED = "unchecked"
    """a check could not be completed, because of other damage that is reported: nothing else"""


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong: `text` says it in a sentence; `key` is the whole Redis key."""

    kind: DamageKind
    text: str
    key: str = ""
    field: str = ""
    task: str = ""
    gid: str = ""
    step: int | None = None

    def __str__(self) -> str:
        return self.text
