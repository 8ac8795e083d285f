"""Import groups from a file into the pools of a run.

All lines are checked before the first group is put (`buffer.groups.put_groups`). A group without
spans never becomes stale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

from buffer.curation.line_file import FIX_HINT, read_lines
from buffer.curation.rollout_line import RolloutLine, group_of
from buffer.errors import DatasetError, RolloutMQError, StoreUnavailable, WireError
from buffer.groups.put_groups import GroupPut
from buffer.ids import IMPORTED_FROM, group_id
from buffer.redis.payloads import PayloadStore
from buffer.redis.scripts import Advance, no_advance
from buffer.redis.store import RunContext


@dataclass(slots=True)
class Imported:
    """What was imported so far, up to line `last_line` of the file.

    `too_old`: groups too stale for the next step, which start again from their prompt or were
    dropped.
    """

    groups: int = 0
    rollouts: int = 0
    too_old: int = 0
    last_line: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """The lines of one group and their numbers in the file."""

    task: str
    first: int
    last: int
    lines: Sequence[RolloutLine]


class GroupImport:
    def __init__(self, context: RunContext, payloads: PayloadStore) -> None:
        self._context = context
        self._store, self._keys, self._limits, _ = context
        self._payloads = payloads

    def read(
        self,
        path: Path,
        task: str | None = None,
        *,
        from_line: int = 1,
        advance: Advance = no_advance,
    ) -> Imported:
        """Import the groups of a file to `task`, or by default to the task that each line names.

        Raises DatasetError before anything is imported; a later error reports what was imported.
        """
        intake = GroupPut(self._context, self._payloads, "imported")
        for number, part in enumerate(self._parts(path, task, from_line), start=1):
            try:
                intake.check(group_of(part.lines, group_id(part.task, IMPORTED_FROM), part.task))
            except (ValueError, WireError) as error:
                raise DatasetError(
                    f"{path}, lines {part.first} to {part.last}: {error}", hint=FIX_HINT
                ) from error
            advance("checked", number)
        done = Imported()
        for part in self._parts(path, task, from_line):
            retryable = self._limits.retries_expired(part.task)
            try:
                _, status = intake.put(
                    part.task, partial(group_of, part.lines, task=part.task), retryable=retryable
                )
            except RolloutMQError as error:
                _add_progress(error, done, part)
                raise
            done.groups += 1
            done.too_old += status != "completed"
            done.rollouts += len(part.lines)
            done.last_line = part.last
            advance("imported", done.groups)
        intake.close()
        return done

    def _parts(self, path: Path, task: str | None, from_line: int) -> Iterator[_Part]:
        """Yield groups: consecutive lines with the same gid and task."""
        for (_, named), rows in groupby(
            _lines(path, from_line), lambda row: (row[1].gid, row[1].task)
        ):
            numbers, lines = zip(*rows, strict=True)
            name = task or named
            known = self._limits.training_tasks
            if name not in known:
                reason = f"there is no training task {name!r}" if name else "the line names no task"
                raise DatasetError(
                    f"{path}, line {numbers[0]}: {reason}",
                    hint=f"choose a `task`: {', '.join(known)}",
                    command_hint=f"choose one with --task: {', '.join(known)}",
                )
            yield _Part(name, numbers[0], numbers[-1], lines)


def _lines(path: Path, from_line: int) -> Iterator[tuple[int, RolloutLine]]:
    for number, fields in read_lines(path):
        if number < from_line:
            continue
        try:
            yield number, RolloutLine.parse(fields)
        except ValueError as error:
            raise DatasetError(f"{path}, line {number}: {error}", hint=FIX_HINT) from error


def _add_progress(error: RolloutMQError, done: Imported, part: _Part) -> None:
    """Add to an error what was imported and how to continue."""
    error.message += f"; {done.groups} groups (up to line {done.last_line}) were imported"
    unknown = ""
    if isinstance(error, StoreUnavailable):
        # the reply to its last call may have been lost
        unknown = (
            f"; whether the group of lines {part.first} to {part.last} was imported is in the "
            "events (rolloutmq tail)"
        )
    error.hint = f"continue with from_line={part.first}{unknown}"
    error.command_hint = f"continue with --from-line {part.first}{unknown}"
