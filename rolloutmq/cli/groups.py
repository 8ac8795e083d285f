"""`rolloutmq ls`, `dead`, `requeue` and `drop`: list groups, and move them by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated

from rich.console import RenderableType
from rich.text import Text
from typer import Argument, Option

from buffer.errors import ConfigError, StoreUnavailable
from buffer.failure_text import message_of, trace_of
from buffer.groups.dead_letters import DeadLetter, by_cause
from buffer.groups.record_walk import RecordWalk
from buffer.ids import POOLS
from buffer.query.language import FIELDS, OPERATORS, parse
from buffer.query.record import STAGES, GroupRecord
from buffer.run.run import Run
from consumer.handle.dead_letter_file import read_dead_letters
from rolloutmq.command_list import command
from rolloutmq.options import (
    GroupId,
    Limit,
    OneTask,
    Output,
    Target,
    Yes,
    on_run,
    or_folder,
    read_where,
    require_known,
    require_yes,
)
from rolloutmq.output import age, count, known, plural, state, table, version_style
from rolloutmq.views.found_group import locate

SKIPPED = "skipped"
_STATUSES = ("init", *POOLS, "failed")
WHERE_HELP = (
    f"Only groups that match this JSON query and the other options. Fields: {', '.join(FIELDS)} "
    "(time: ms since it was queued, claimed or submitted). Operators: $and, $or, "
    f"{', '.join(OPERATORS)}."
)


@command(
    "ls", epilog="""Example: rolloutmq ls --where '{"staleness": {"$gte": 2}}' --order=-tokens"""
)
@on_run
def list_groups(
    target: Target,
    task: OneTask = None,
    status: Annotated[str | None, Option(help=f"Only this status: {', '.join(_STATUSES)}.")] = None,
    stage: Annotated[
        str | None, Option(help=f"Only this stage: {', '.join((*STAGES, SKIPPED))}.")
    ] = None,
    where: Annotated[str | None, Option(metavar="JSON", help=WHERE_HELP)] = None,
    order: Annotated[
        str, Option(metavar="FIELD", help="Sort by this field; -FIELD: descending.")
    ] = "",
    limit: Limit = 50,
) -> Output:
    """List the groups of a run that match a query.

    They are listed by stage: waiting groups in their order, pools by weights and arrival. Archived,
    filtered and dropped groups have ended, and are only counted. Skipped groups have ended, too;
    `--stage skipped` lists them with the reason and the row of the data set.
    """
    require_known("status", status, _STATUSES)
    require_known("stage", stage, (*STAGES, SKIPPED))
    require_known("task", task, tuple(target.run.limits.tasks))
    if stage == SKIPPED:
        if status or where or order:
            raise ConfigError("--stage skipped takes only --task and --limit beside it")
        return _skipped(target.run, task, limit)
    flags = {"task": task, "status": status, "stage": stage}
    chosen = {name: value for name, value in flags.items() if value is not None}
    query = parse({"$and": [read_where(where), chosen]})
    rows = list(target.run.groups.find(query, limit=limit, order=order))
    ended = "(Archived, filtered and dropped ones have ended: see rolloutmq status.)"
    shown = _listed(rows, limit) if rows else [f"No group matches. {ended}"]
    return Output([asdict(row) for row in rows], shown)


def _skipped(run: Run, task: str | None, limit: int) -> Output:
    groups = list(islice(run.skips.newest(task), limit))
    grid = table("gid", "row", "id", "worker", "reason", right=["row"])
    for each in groups:
        grid.add_row(each.gid, known(each.row), each.id or "", each.worker, each.reason)
    shown = [grid, *_cut(f"only the newest {limit}", len(groups) == limit)]
    return Output([asdict(each) for each in groups], shown if groups else "No group was skipped.")


def _listed(rows: list[GroupRecord], limit: int) -> list[RenderableType]:
    grid = table("gid", "stage", "status", "ver", "stale", "tries", "tokens", "reward", "owner",
                 right=["ver", "stale", "tries", "tokens", "reward"])  # fmt: skip
    for row in rows:
        style = "dim" if row.version is None else version_style(row.version)
        grid.add_row(
            row.gid,
            state(row.stage, width=7),
            row.status,
            Text(known(row.version), style=style),
            known(row.staleness),
            str(row.tries),
            count(row.tokens),
            known(row.reward, ".2f"),
            row.owner or row.batch or "",
        )
    return [grid, *_cut(f"only the first {limit}", len(rows) == limit)]


def _cut(what: str, is_cut: bool) -> list[Text]:
    return [Text(f"{what} are shown; --limit shows more", style="dim")] if is_cut else []


def _kept_letters(folder: Path, error: StoreUnavailable, task: str | None, limit: int) -> Output:
    answer = _letters(read_dead_letters(folder), task, limit)
    note = Text(f"as kept in {folder}, without the server: {error.message}", style="yellow")
    return answer._replace(shown=[note, *answer.shown])


@command("dead", epilog="Example: rolloutmq dead --task math --limit 20")
@or_folder(_kept_letters)
def dead(target: Target, task: OneTask = None, limit: Limit = 50) -> Output:
    """List dead letters, newest first.

    A group becomes a dead letter when its tries are used up, or when the trainer cannot read it.
    It is kept, with the reason, until it is requeued or dropped. Of a run whose server is lost, the
    letters in the run's folder are shown.
    """
    require_known("task", task, target.run.limits.tasks)
    return _letters(target.run.dead_letters.newest(), task, limit)


def _letters(every: Iterable[DeadLetter], task: str | None, limit: int) -> Output:
    letters = list(islice((each for each in every if task in (None, each.task)), limit))
    grid = table("gid", "tries", "worker", "age", "reason", right=["tries", "age"])
    for letter in letters:
        said = message_of(letter.reason)
        reason = said if letter.step is None else f"in batch {letter.step}: {said}"
        cells = (str(letter.tries), letter.worker, age(letter.age_ms), reason)
        grid.add_row(letter.gid, *cells)
    shown = [grid, *_cut(f"only the newest {limit}", len(letters) == limit)]
    for cause, found in by_cause(letters):
        if trace := trace_of(found[0].reason):
            title = f"\n{cause}: {plural(len(found), 'dead letter')}\n"
            shown.append(Text.assemble((title, "bold"), trace))
            if gid := next((letter.gid for letter in found if letter.has_responses), None):
                what = f"rolloutmq rejudge {gid} --pdb runs its judge on these responses again"
                shown.append(Text(what, style="dim"))
    documents = [asdict(each) | {"cause": each.cause} for each in letters]
    none = "There are no dead letters. Failed tries are in `rolloutmq logs --level warning`."
    return Output(documents, shown if letters else none)


@command("requeue", epilog="Example: rolloutmq requeue math-0000000042 --yes")
@on_run
def requeue(
    target: Target,
    gid: Annotated[
        str | None, Argument(metavar="GID", help="Id of a group: see rolloutmq dead.")
    ] = None,
    all_dead: Annotated[bool, Option("--all-dead", help="Requeue all dead letters.")] = False,
    yes: Yes = False,
) -> Output:
    """Put a dead group, or one of a pool, back into the queue.

    It gets all its tries back and starts from its prompt: its result is discarded. Only an aborted
    group keeps its tokens.
    """
    if (gid is None) is not all_dead:
        raise ConfigError("pass either a GID or --all-dead")
    run = target.run
    what = plural(len(run.dead_letters), "dead group")
    if gid:
        what = f"{gid}, which is {locate(run, gid).where}"
    require_yes(yes, f"requeue {what}")
    gids = [gid] if gid else [letter.gid for letter in run.dead_letters.newest()]
    moved = {one: run.jobs.requeue(one) for one in gids}
    said = f"{plural(len(moved), 'dead group')} requeued"
    if gid:
        said = f"{gid} was {moved[gid]}; it is requeued"
    return Output({"requeued": moved}, said)


@command("drop", epilog="Example: rolloutmq drop math-0000000042 --yes")
@on_run
def drop(
    target: Target,
    gid: GroupId = "",
    task: Annotated[
        str,
        Option(metavar="NAME", help="End all groups of a task that the run's config lacks now."),
    ] = "",
    revoke: Annotated[
        str, Option(metavar="WORKER", help="Worker that runs the group: its lease is revoked, too.")
    ] = "",
    yes: Yes = False,
) -> Output:
    """End a group that waits, is in a pool, or is dead.

    It is counted as dropped, its payload is freed, and its prompt is not drawn again. A running
    group is refused unless its worker is named with --revoke; one in a batch is always refused.
    """
    if bool(gid) == bool(task):
        raise ConfigError("drop needs a group or a task", hint="give either GID or --task NAME")
    if task:
        return _drop_task(target.run, task, yes)
    where = locate(target.run, gid).where
    require_yes(yes, f"end {gid}, which is {where}")
    before = target.run.jobs.drop(gid, revoke=revoke)
    said = f"{gid} was {before}; it is dropped"
    if before == "dropped":
        said = f"{gid} had been dropped before; nothing was changed"
    return Output({"gid": gid, "before": before}, said)


def _drop_task(run: Run, task: str, yes: bool) -> Output:
    """Drop the groups of a removed task. Raises ConfigError if the config still has the task."""
    gone = [name for name, limits in run.limits.tasks.items() if limits.is_gone]
    if task not in gone:
        raise ConfigError(
            f"task {task!r} is not one that the run's config lacks",
            hint=f"those are: {', '.join(gone) or 'none'}; `rolloutmq drop GID` ends one group",
        )
    records = list(RecordWalk(run.store, run.keys).records(task))
    free = [gid for gid, record in records if record["stage"] not in ("running", "taken")]
    held = len(records) - len(free)
    require_yes(yes, f"end {plural(len(free), 'group')} of task {task}")
    for gid in free:
        run.jobs.drop(gid)
    left = f"; {held} running or in a batch are left" if held else ""
    said = f"{plural(len(free), 'group')} of task {task} dropped{left}"
    return Output({"task": task, "dropped": len(free), "held": held}, said)
