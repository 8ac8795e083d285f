"""What clients saw, one JSON line per event, each process in a file of its own.

    t       seconds, of this machine's clock          who     "worker-0", "trainer", … and "nemesis", "harness"
    op      a script of the queue, or an act of the client: opened, delivered, trained, checkpoint, finished
    call    number of the call within this process    phase   "call" (asked), "ok" (the answer came); acts have none

A line is written with one `write` of the kernel's: what a process wrote before it was killed is
there, a line that is not whole is the last one. An answer that came but was not written down any
more counts as one that never came.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import orjson

from buffer.redis.connection.bulk_io import Command
from buffer.redis.scripts import Arg, KeysByName, TailArg, Upload
from buffer.redis.store import Store

Event = dict[str, Any]

RECORDED = {
    "enqueue", "reissue", "claim", "submit", "release", "take_batch", "commit", "quarantine", "refill",
    "trainer_open", "producer_open", "publish_weights", "restore_batch", "dissolve_batch",
}  # fmt: skip
"""Scripts whose answers the checker reads."""

CLAIMED = slice(7, None, 8)
"""Gids in the answer of a claim: behind OK and 6 of control, 8 words for each group."""

_DULL = {"claim": 8, "take_batch": 2, "reissue": 2}
"""Answers shorter than this say that nothing was given; there are very many of them."""


class History:
    """The file of one process."""

    def __init__(self, folder: Path, who: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.who = who
        path = folder / f"{who}-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._calls = count(1)

    def note(self, op: str, **more: Any) -> None:
        line = orjson.dumps({"t": round(time.time(), 4), "who": self.who, "op": op, **more})
        os.write(self._file, line + b"\n")

    def call(self, op: str, args: Mapping[str, Arg]) -> int:
        """A call begins; its number."""
        number = next(self._calls)
        self.note(op, phase="call", call=number, pid=os.getpid(), args=dict(args))
        return number

    def ok(self, op: str, number: int, args: Mapping[str, Arg], reply: Sequence[Any]) -> None:
        """The answer to a call, with its arguments again: each line can be read by itself."""
        self.note(op, phase="ok", call=number, pid=os.getpid(), args=dict(args), reply=list(reply))


class RecordingStore(Store):
    """A store that writes down what it asked and what it was answered."""

    history: History

    def call(
        self,
        script: str,
        keys: KeysByName,
        args: Mapping[str, Arg],
        tail_keys: Sequence[str | KeysByName] = (),
        tail_args: Sequence[TailArg] = (),
        *,
        durable: bool = False,
    ) -> list[Any]:
        """As `Store.call`."""
        if script not in RECORDED:
            return super().call(script, keys, args, tail_keys, tail_args, durable=durable)
        if script in _DULL:
            reply = super().call(script, keys, args, tail_keys, tail_args, durable=durable)
            if len(reply) >= _DULL[script] and reply[0] == "OK":
                self.history.ok(script, 0, args, reply)
            return reply
        number = self.history.call(script, args)
        reply = super().call(script, keys, args, tail_keys, tail_args, durable=durable)
        self.history.ok(script, number, args, reply)
        return reply

    def call_and_read(
        self,
        script: str,
        keys: KeysByName,
        args: Mapping[str, Arg],
        tail_args: Sequence[Arg],
        read: Command,
    ) -> tuple[list[Any], Any]:
        """As `Store.call_and_read`."""
        number = self.history.call(script, args)
        reply, answer = super().call_and_read(script, keys, args, tail_args, read)
        self.history.ok(script, number, args, reply)
        return reply, answer

    def upload_and_call(self, script: str, key: str, uploads: Iterable[Upload]) -> list[list[Any]]:
        """As `Store.upload_and_call`."""
        # each result of a submit is an event of its own
        units = [
            {**call.args, **(unit if isinstance(unit, Mapping) else {})}
            for _, call in uploads
            if call
            for unit in call.tail_args or [{}]
        ]
        calls = [(self.history.call(script, args), args) for args in units]
        replies = super().upload_and_call(script, key, uploads)
        each = replies
        if script == "submit":
            flat = [part for reply in replies for part in reply]
            each = [flat[n : n + 2] for n in range(0, len(flat), 2)]
        for (number, args), reply in zip(calls, each, strict=True):
            self.history.ok(script, number, args, reply)
        return replies


def read_history(folder: Path) -> list[Event]:
    """All events of all processes, in order of time. A torn last line is left out."""
    events = [
        event for file in folder.glob("*.jsonl") for event in parse(file.read_bytes().split(b"\n"))
    ]
    return sorted(events, key=lambda event: event["t"])


def parse(lines: Iterable[bytes]) -> Iterator[Event]:
    """The events of whole lines."""
    for line in lines:
        if line.endswith(b"}"):
            yield orjson.loads(line)
