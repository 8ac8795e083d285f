"""Groups from a file into the pools of a run: all lines are checked first, then each group goes in
(`buffer.groups.intake`).

They are completed groups with the versions of the file; one without spans never ages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from buffer.curation.line_file import MEND, read_lines
from buffer.curation.rollout_line import RolloutLine, group_of
from buffer.errors import DatasetError, RolloutMQError, StoreUnavailable
from buffer.groups.intake import Intake
from buffer.model.group import RolloutGroup
from buffer.model.ids import IMPORTED_FROM, group_id
from buffer.model.limits import RunLimits
from buffer.model.order_policy import OrderFunction
from buffer.store.keys import Keys
from buffer.store.payloads import PayloadStore
from buffer.store.replies import Advance, no_advance
from buffer.store.store import Store


@dataclass(slots=True)
class Imported:
    """What is in the run by now: groups, rollouts, and the last line of the file that is.
    `too_old`: groups among them that the next train step may not use, so that they start again from
    their prompt, or were dropped.
    """

    groups: int = 0
    rollouts: int = 0
    too_old: int = 0
    last_line: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """The lines of one group, and where they stand in the file."""

    task: str
    first: int
    last: int
    lines: Sequence[RolloutLine]

    def group(self, gid: str) -> RolloutGroup:
        return group_of(self.lines, gid, self.task)


class GroupImport:
    """Reads groups into one run."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        limits: RunLimits,
        payloads: PayloadStore,
        function: OrderFunction | None = None,
    ) -> None:
        """`function`: the run's order policy where it is a user's
        (`buffer.model.order_policy.load_order`).
        """
        self._store = store
        self._keys = keys
        self._limits = limits
        self._payloads = payloads
        self._function = function

    def read(
        self,
        path: Path,
        task: str | None = None,
        *,
        from_line: int = 1,
        advance: Advance = no_advance,
    ) -> Imported:
        """Import the groups of a file from line `from_line` on, into `task` or the task that each
        line names.

        Raises DatasetError with file and line before anything is imported; any error later says
        what was.
        """
        intake = Intake(
            self._store, self._keys, self._limits, self._payloads, "imported", self._function
        )
        for number, part in enumerate(self._parts(path, task, from_line), start=1):
            self._check(path, part, intake)
            advance("checked", number)
        done = Imported()
        for part in self._parts(path, task, from_line):
            try:
                _, place = intake.put(
                    part.task, part.group, retryable=self._limits.retries_expired(part.task)
                )
            except RolloutMQError as error:
                _tell(error, done, part)
                raise
            done.groups += 1
            done.too_old += place != "completed"
            done.rollouts += len(part.lines)
            done.last_line = part.last
            advance("imported", done.groups)
        intake.close()
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
                raise DatasetError(f"{path}, line {number}: {error}", hint=MEND) from error
            if lines and (line.gid, line.task) != (lines[0].gid, lines[0].task):
                yield self._part(path, task, first, last, lines)
                lines = []
            if not lines:
                first = number
            lines.append(line)
            last = number
        if lines:
            yield self._part(path, task, first, last, lines)

    def _part(
        self, path: Path, task: str | None, first: int, last: int, lines: list[RolloutLine]
    ) -> _Part:
        name = task or lines[0].task
        known = self._limits.training_tasks
        if name not in known:
            raise DatasetError(
                f"{path}, line {first}: "
                + (f"there is no training task {name!r}" if name else "it names no task"),
                hint=f"choose one with --task: {', '.join(known)}",
            )
        return _Part(name, first, last, lines)

    def _check(self, path: Path, part: _Part, intake: Intake) -> None:
        try:
            group = part.group(group_id(part.task, IMPORTED_FROM))
        except ValueError as error:
            raise DatasetError(
                f"{path}, lines {part.first} to {part.last}: {error}", hint=MEND
            ) from error
        intake.check(group)


def _tell(error: RolloutMQError, done: Imported, part: _Part) -> None:
    """Add to an error what is in the run, and what is not."""
    error.message += f"; {done.groups} groups (up to line {done.last_line}) were imported"
    error.hint = f"go on with --from-line {part.first}"
    if isinstance(error, StoreUnavailable):
        # its last answer may have been lost
        error.hint += f"; whether the group of lines {part.first} to {part.last} is in, the events say (rolloutmq tail)"
