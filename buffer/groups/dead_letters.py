"""Dead letters: groups whose tries are used up, or that a trainer could not use (I11).

Each is kept with its reason, and the responses with which it died if there is room, until an
operator requeues or drops it, and the run continues.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from buffer.errors import PayloadMissing, RunDamaged
from buffer.failure_text import cause_of
from buffer.groups.submit import to_store
from buffer.ids import split_group_id
from buffer.job import Job
from buffer.redis.bounds import KEYS_PER_TRIP
from buffer.redis.bulk_io import Command
from buffer.redis.key_fields import HINT, read_counts
from buffer.redis.payloads import PayloadStore
from buffer.redis.scripts import ScriptCall, unknown_reply
from buffer.redis.store import RunContext
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """`reason`: text of a failure (`buffer.failure_text`). `age_ms`: by the server's clock.

    `step`: of the batch it was quarantined from, else None. `has_responses`: more than its prompt.
    """

    gid: str
    reason: str
    worker: str
    tries: int
    age_ms: int
    step: int | None = None
    has_responses: bool = False

    @property
    def task(self) -> str:
        return split_group_id(self.gid)[0]

    @property
    def cause(self) -> str:
        """What letters of one cause share: "KeyError at judge.py:12"."""
        return cause_of(self.reason)


def by_cause(letters: Iterable[DeadLetter]) -> list[tuple[str, list[DeadLetter]]]:
    """Return the letters of each cause, the most frequent cause first."""
    causes: defaultdict[str, list[DeadLetter]] = defaultdict(list)
    for letter in letters:
        causes[letter.cause].append(letter)
    return sorted(causes.items(), key=lambda pair: -len(pair[1]))


class DeadLetters:
    def __init__(self, context: RunContext, payloads: PayloadStore) -> None:
        self._store, self._keys, self._limits, _ = context
        self._payloads = payloads

    def __len__(self) -> int:
        return int(self._store.ask("dead letters", "ZCARD", self._keys.dead))

    def reason(self, gid: str) -> Any:
        """Return the letter of a group (JSON with reason and worker); None if it is not dead."""
        letter = self._store.ask("dead letter", "GET", self._keys.dead_letter(gid))
        return _parse(gid, letter) if letter else None

    def keep_responses(self, job: Job, group: RolloutGroup) -> bool:
        """Keep the responses of a group whose last claim was released as failed.

        They only show why it failed: requeued, it starts from its prompt. Returns whether there was
        room, and the group was still dead. Raises WireError, GroupChanged, StoreUnavailable, or
        PayloadMissing.
        """
        keys, low_bytes = self._keys, self._limits.low_bytes
        ref, commands = to_store(self._payloads, job, group, group_bytes.pieces_checked(group))
        call = ScriptCall(
            "keep_responses",
            keys.slots(gid=job.gid),
            {
                "gid": job.gid,
                "token": job.token,
                "tokens": int(group.lengths.sum()),
                "size": ref.size,
                "crc": ref.crc,
                "chunks": ref.chunks,
                # their responses take at most half of the low mark
                "byte_limit": low_bytes // 2 if low_bytes else None,
            },
            keys.payload_chunks(ref.gid, ref.token, ref.chunks),
        )
        *_, reply = self._store.send("keep_responses", [*commands, call], durable=True)
        match reply:
            case ["OK"]:
                return True
            case ["GONE" | "FULL"]:
                return False
            case ["MISSING", size]:
                raise PayloadMissing(f"group {job.gid}: only {size} of {ref.size} bytes arrived")
        raise unknown_reply("keep_responses", reply)

    def newest(self) -> Iterator[DeadLetter]:
        """Yield all letters, newest first; may miss one if others are requeued meanwhile."""
        keys = self._keys
        start = 0
        while gids := self._store.ask(
            "dead letters", "ZREVRANGE", keys.dead, start, start + KEYS_PER_TRIP - 1
        ):
            names = [gid.decode() for gid in gids]
            reads: list[Command] = []
            for gid in names:
                reads.append(("GET", keys.dead_letter(gid)))
                reads.append(("HMGET", keys.group(gid), "tries", "payload"))
                reads.append(("ZSCORE", keys.dead, gid))
            *replies, (seconds, micros) = self._store.send("dead letters", [*reads, ("TIME",)])
            now_ms = int(seconds) * 1000 + int(micros) // 1000
            of_each = zip(names, replies[::3], replies[1::3], replies[2::3], strict=True)
            for gid, letter, (tries, payload), died_ms in of_each:
                if letter is None or died_ms is None:
                    continue  # requeued or dropped meanwhile
                fields = _parse(gid, letter)
                (count,) = read_counts(f"the record of {gid}", ["tries"], [tries])
                yield DeadLetter(
                    gid,
                    fields["reason"],
                    fields.get("worker", ""),
                    count,
                    now_ms - int(float(died_ms)),
                    fields.get("step"),
                    has_responses=payload not in (None, b"init"),
                )
            start += KEYS_PER_TRIP


def _parse(gid: str, letter: bytes) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = orjson.loads(letter)
        if "reason" not in fields:
            raise ValueError("it has no reason")
    except (ValueError, TypeError) as error:
        raise RunDamaged(f"the dead letter of {gid} cannot be read: {error}", hint=HINT) from error
    return fields
