"""Keep the turns of a running group's agents on the server, as they happen (`keep_turns.lua`).

    claim ──▶ payload: the group as it was claimed | turn | turn | …     one document each
                └ the worker dies ──▶ the next claim reads the same payload, and adds to it

The payload grows by what is new, and is counted, aged, found by readers and freed as any other.
"""

from __future__ import annotations

from buffer.errors import StoreError
from buffer.groups.claim import fenced
from buffer.job import Job, PayloadRef
from buffer.redis.bulk_io import Pieces
from buffer.redis.payloads import PayloadStore
from buffer.redis.scripts import ScriptCall, unknown_reply
from buffer.redis.store import RunContext
from buffer.wire import group_bytes
from buffer.wire.framing import TURNS_MAGIC, framed
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState
from buffer.wire.staleness import ages

MOST_CHUNKS = 1000  # then all turns are stored again, in few


class KeptTurns:
    """The turns of one claim. `group`: as it was claimed. Call it from one thread at a time."""

    def __init__(
        self, context: RunContext, payloads: PayloadStore, job: Job, group: RolloutGroup
    ) -> None:
        self._store, self._keys, _, _ = context
        self._payloads = payloads
        self._job = job
        self._documents = [group_bytes.encode_checked(group)]
        group.check_unchanged()
        self._stored = 0  # of the documents
        self._names = 0
        self._replaces = job.payload.token
        self._ref = self._new_name()
        self._oldest = group.oldest_by_lineage()
        self._length = int(group.lengths.sum())
        self._sampled = 0

    def add(self, turn: RolloutState) -> None:
        """Add a turn, which `store` stores. Raises WireError."""
        document = RolloutGroup(self._job.gid, self._job.task, [turn])
        self._documents.append(group_bytes.encode_checked(document))
        for lineage, version in document.oldest_by_lineage().items():
            self._oldest[lineage] = min(version, self._oldest.get(lineage, version))
        self._length += len(turn.response_ids)
        self._sampled += document.sampled_tokens

    def store(self) -> None:
        """Store all turns. After StoreUnavailable, call it again before `add` (I13).

        Raises Fenced: the lease was lost.
        """
        for _ in range(3):  # under new names, where the server lost what it had
            match self._attempt():
                case ["OK"]:
                    return
                case ["FENCED"]:
                    raise fenced(self._job)
                case ["BEHIND", payload]:
                    self._replaces = payload
                case ["MISSING", _]:
                    pass
                case reply:
                    raise unknown_reply("keep_turns", reply)
            self._ref = self._new_name()
        raise StoreError(f"group {self._job.gid}: the server loses its turns", hint="see its log")

    def _new_name(self) -> PayloadRef:
        self._names += 1
        return PayloadRef(self._job.gid, f"{self._job.token}-turns{self._names}", 0, 0, "")

    def _attempt(self) -> list[str]:
        ref, commands = self._payloads.append(self._ref, self._unsent())
        if ref.chunks > MOST_CHUNKS and self._ref.chunks:
            self._ref = self._new_name()
            ref, commands = self._payloads.append(self._ref, self._unsent())
        keys, before = self._keys, self._ref
        chunks = keys.payload_chunks(ref.gid, ref.token, ref.chunks)[before.chunks :]
        arguments: dict[str, str | int] = {
            "gid": ref.gid,
            "token": self._job.token,
            "name": self._names,
            "replaces": self._replaces,
            "before": before.chunks,
            "chunks": ref.chunks,
            "added": ref.size - before.size,
            "size": ref.size,
            "crc": ref.crc,
            "length": self._length,
            "task": self._job.task,
            "sampled": self._sampled,
            "made_by": ages({"oldest": self._oldest}),
        }
        slots = keys.slots(gid=ref.gid, task=self._job.task)
        call = ScriptCall("keep_turns", slots, arguments, chunks)
        reply: list[str]
        *_, reply = self._store.send("keep_turns", [*commands, call], durable=True)
        if reply == ["OK"]:
            self._ref, self._replaces = ref, ref.token
            self._stored = len(self._documents)
        return reply

    def _unsent(self) -> Pieces:
        """Return the bytes to add to the payload: all if it begins."""
        first = self._stored if self._ref.chunks else 0
        unsent: Pieces = [] if first else [TURNS_MAGIC]
        for document in self._documents[first:]:
            unsent.append(framed(b"".join(self._payloads.compressed([document]))))
        return unsent
