"""Groups from a file into the pools of a run: all lines are checked first, then each group goes in by one script.

Imported groups are numbered apart from those of the data set (`keys.IMPORTED_FROM`) and counted apart
(`enqueued + imported = sum of all places`). They are completed groups like any other: the trainer takes them in the
order of the run's policy, the producer starts that many fewer, and one that expires starts again from its prompt. Their
versions are those of the file; a lineage of weights that this run never had counts as old as its oldest fork (I8), and
a group without spans never ages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from buffer import wire
from buffer.control import new_nonce
from buffer.errors import ConfigError, DatasetError, PayloadMissing, RolloutMQError, ScriptError, StoreUnavailable
from buffer.group import RolloutGroup
from buffer.keys import IMPORTED_FROM, Keys, group_id
from buffer.limits import RunLimits
from buffer.line_file import read_lines
from buffer.order import OrderFunction, submit_argument
from buffer.payloads import PayloadStore
from buffer.rollout_line import RolloutLine, group_of, prompt_of
from buffer.snapshot_cut import Advance, no_advance
from buffer.store import Store

_RACES = 100
"""How often a draw may be taken by another import before this one gives up."""


@dataclass(slots=True)
class Imported:
    """What is in the run by now: groups, rollouts, and the last line of the file that is."""

    groups: int = 0
    rollouts: int = 0
    last_line: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """The lines of one group, and where they stand in the file."""

    task: str
    first: int
    last: int
    lines: Sequence[RolloutLine]

    def group(self, draw: int) -> RolloutGroup:
        return group_of(self.lines, group_id(self.task, draw), self.task)


class GroupImport:
    """Reads groups into one run."""

    def __init__(
        self, store: Store, keys: Keys, limits: RunLimits, payloads: PayloadStore, function: OrderFunction | None = None
    ) -> None:
        """`function`: the run's order policy where it is a user's (`buffer.order.load_order`)."""
        self._store, self._keys, self._limits, self._payloads = store, keys, limits, payloads
        self._function = function

    def read(
        self, path: Path, task: str | None = None, *, from_line: int = 1, advance: Advance = no_advance
    ) -> Imported:
        """Import the groups of a file from line `from_line` on, into `task` or the task that each line names.

        Raises DatasetError with file and line before anything is imported; any error later says what was.
        """
        for number, part in enumerate(self._parts(path, task, from_line), start=1):
            self._check(path, part)
            advance("checked", number)
        done = Imported()
        for part in self._parts(path, task, from_line):
            try:
                self._put(part)
            except RolloutMQError as error:
                _tell(error, done, part)
                raise
            done.groups += 1
            done.rollouts += len(part.lines)
            done.last_line = part.last
            advance("imported", done.groups)
        return done

    def _parts(self, path: Path, task: str | None, from_line: int) -> Iterator[_Part]:
        """Lines that follow each other and have the same gid and task are a group."""
        lines: list[RolloutLine] = []
        first = last = 0
        for number, fields in read_lines(path):
            if number < from_line:
                continue
            try:
                line = RolloutLine.parse(fields)
            except ValueError as error:
                raise DatasetError(f"{path}, line {number}: {error}") from error
            if lines and (line.gid, line.task) != (lines[0].gid, lines[0].task):
                yield self._part(path, task, first, last, lines)
                lines = []
            if not lines:
                first = number
            lines.append(line)
            last = number
        if lines:
            yield self._part(path, task, first, last, lines)

    def _part(self, path: Path, task: str | None, first: int, last: int, lines: list[RolloutLine]) -> _Part:
        name = task or lines[0].task
        known = self._limits.training_tasks
        if name not in known:
            raise DatasetError(
                f"{path}, line {first}: " + (f"there is no training task {name!r}" if name else "it names no task"),
                hint=f"choose one with --task: {', '.join(known)}",
            )
        return _Part(name, first, last, lines)

    def _check(self, path: Path, part: _Part) -> None:
        try:
            group = part.group(IMPORTED_FROM)
        except ValueError as error:
            raise DatasetError(f"{path}, lines {part.first} to {part.last}: {error}") from error
        self._place(group)

    def _place(self, group: RolloutGroup) -> str:
        return submit_argument(self._limits.order, group, self._function)

    def _put(self, part: _Part) -> None:
        token, draw = new_nonce(), self._next_draw(part.task)
        for _ in range(_RACES):
            reply = self._call(part.group(draw), draw, token)
            match reply[0]:
                case "OK":
                    return
                case "DRAW":
                    draw = int(reply[1])
                case "FULL":
                    raise ConfigError(f"{part.task} has drawn {reply[1]} groups: no numbers are left for imported ones")
                case "MISSING":
                    raise PayloadMissing(f"lines {part.first} to {part.last}: {reply[1]} bytes arrived")
                case _:
                    raise ScriptError(f"import: {reply}")
        raise ConfigError(f"{part.task}: another import takes every draw", hint="let one finish first")

    def _next_draw(self, task: str) -> int:
        progress = self._keys.progress(task)
        count = self._store.retrying("imported", lambda: self._store.control.hget(progress, "imported"))
        return IMPORTED_FROM + int(count or 0)

    def _call(self, group: RolloutGroup, draw: int, token: str) -> list[str]:
        keys, gid, task = self._keys, group.gid, group.task
        prompt = self._payloads.write(gid, f"{token}-prompt", wire.encode(prompt_of(group)))
        if prompt.chunks > 1:
            raise ConfigError(f"the prompt of {gid} has {prompt.size} bytes and does not fit into one chunk")
        ref = self._payloads.write(gid, token, wire.encode(group))
        oldest = group.oldest_by_lineage()
        return self._store.call(
            "import",
            {
                "progress": keys.progress(task),
                "completed": keys.pool(task, "completed"),
                "groups": keys.groups,
                "lineages": keys.lineages,
                "bell": keys.bell("trainer"),
                "events": keys.events,
                "payload_prompt": keys.payload(gid, prompt.token),
                "payload_init": keys.payload(gid, "init"),
                "order": keys.order(task),
            },
            {
                "task": task,
                "gid": gid,
                "token": token,
                "draw": draw,
                "first": IMPORTED_FROM,
                "samples": len(group),
                "tokens": int(group.lengths.sum(dtype=np.int64)),
                "size": ref.size,
                "crc": ref.crc,
                "reward": f"{float(group.scores.sum()):.6g}",
                "order": self._place(group),
            },
            keys.payload_chunks(gid, token, ref.chunks),
            [part for pair in oldest.items() for part in pair],
            durable=True,
        )


def _tell(error: RolloutMQError, done: Imported, part: _Part) -> None:
    """Add to an error what is in the run, and what is not."""
    error.message += f"; {done.groups} groups (up to line {done.last_line}) were imported"
    error.hint = f"go on with --from-line {part.first}"
    if isinstance(error, StoreUnavailable):
        # its last answer may have been lost
        error.hint += f"; whether the group of lines {part.first} to {part.last} is in, the events say (rolloutmq tail)"
