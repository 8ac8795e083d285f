"""The short facts about one group, from its record in Redis; never from its payload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from buffer.ids import split_group_id

STAGES = ("waiting", "running", "pool", "taken", "dead")  # stages of groups with a record, in order

# read of `group:<gid>`
RECORD_FIELDS = (
    *("stage", "status", "version", "tries", "aborts", "owner", "samples", "tokens", "size"),
    *("reward", "arrival", "batch", "entry", "claimed_ms", "submitted_ms"),
)


class Moment(NamedTuple):
    """What ages are relative to: the last step taken, and the server's clock in ms."""

    taken: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One group; None stands for a value that it does not have (yet).

    `staleness` is for the step that took it, or else the next. `owner` holds or held it last.
    `reward`: mean score of a completed group. `arrival`: number of its last submit. `time_ms`:
    since it was last queued, claimed or submitted. `size`: bytes of the result, or else of the
    prompt.
    """

    gid: str
    task: str
    draw: int
    stage: str
    status: str
    version: int | None
    staleness: int | None
    tries: int
    aborts: int
    owner: str | None
    samples: int
    tokens: int
    size: int
    reward: float | None
    arrival: int | None
    time_ms: int | None
    batch: str | None

    @classmethod
    def parse(cls, gid: str, values: Sequence[bytes | None], moment: Moment) -> GroupRecord | None:
        """Parse the values of `RECORD_FIELDS`; None if the group has ended."""
        named = zip(RECORD_FIELDS, values, strict=True)
        record = {name: value.decode() for name, value in named if value}
        return cls.of(gid, record, moment)

    @classmethod
    def of(cls, gid: str, record: Mapping[str, str], moment: Moment) -> GroupRecord | None:
        fields = {name: value for name, value in record.items() if value}
        if "stage" not in fields:
            return None
        task, draw = split_group_id(gid)
        version = int(fields["version"]) if "version" in fields else None
        ledger, _, batch_step = fields.get("batch", "").rpartition(":")
        # the train step that took the group, or may take it next
        is_taken = fields["stage"] == "taken" and ledger == "train"
        step = int(batch_step) if is_taken else moment.taken + 1
        samples = int(fields.get("samples", 0))
        # the scores of an interrupted group do not count
        is_scored = fields.get("status") == "completed" and "reward" in fields and samples
        # the id of a stream entry begins with the ms in which it was added
        queued_ms = fields.get("entry", "").partition("-")[0]
        noted = (queued_ms, fields.get("claimed_ms"), fields.get("submitted_ms"))
        times = [int(time) for time in noted if time]
        return cls(
            gid=gid,
            task=task,
            draw=draw,
            stage=fields["stage"],
            status=fields.get("status", ""),
            version=version,
            staleness=None if version is None else step - version - 1,
            tries=int(fields.get("tries", 0)),
            aborts=int(fields.get("aborts", 0)),
            owner=fields.get("owner"),
            samples=samples,
            tokens=int(fields.get("tokens", 0)),
            size=int(fields.get("size", 0)),
            reward=float(fields["reward"]) / samples if is_scored else None,
            arrival=int(fields["arrival"]) if "arrival" in fields else None,
            time_ms=max(0, moment.now_ms - max(times)) if times else None,
            batch=fields.get("batch"),
        )
