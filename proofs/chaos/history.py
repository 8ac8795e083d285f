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

from buffer.redis.bulk_io import Command
from buffer.redis.scripts import Arg, ScriptCall
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

    def send(
        self,
        what: str,
        commands: Sequence[Command | ScriptCall],
        *,
        durable: bool = False,
        starts_work: bool = False,
    ) -> list[Any]:
        """As `Store.send`."""
        begun = [self._begin(command) for command in commands]
        answers = super().send(what, commands, durable=durable, starts_work=starts_work)
        for command, events, reply in zip(commands, begun, answers, strict=True):
            if isinstance(command, ScriptCall):
                self._end(command, events, reply)
        return answers

    def _begin(self, call: Command | ScriptCall) -> list[tuple[int, Mapping[str, Arg]]]:
        """Note a call; each result of a submit is an event of its own."""
        if not isinstance(call, ScriptCall) or call.script not in RECORDED:
            return []
        if call.script in _DULL:
            return [(0, call.args)]
        units = call.tail_args if call.script == "submit" else [{}]
        events = [{**call.args, **unit} for unit in units if isinstance(unit, Mapping)]
        return [(self.history.call(call.script, args), args) for args in events]

    def _end(
        self, call: ScriptCall, events: list[tuple[int, Mapping[str, Arg]]], reply: list[Any]
    ) -> None:
        if call.script in _DULL and (len(reply) < _DULL[call.script] or reply[0] != "OK"):
            return
        width = 2 if call.script == "submit" else len(reply)
        for n, (number, args) in enumerate(events):
            part = reply[n * width : (n + 1) * width]
            self.history.ok(call.script, number, args, part)


def read_history(folder: Path) -> list[Event]:
    """All events of all processes, in order of time. A torn last line is left out."""
    events = [
        event for file in folder.glob("*.jsonl") for event in parse(file.read_bytes().split(b"\n"))
    ]
    return sorted(events, key=lambda event: event["t"])


def parse(lines: Iterable[bytes]) -> Iterator[Event]:
    for line in lines:
        if line.endswith(b"}"):
            yield orjson.loads(line)
