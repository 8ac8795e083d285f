"""`rolloutmq save`, `restore`, `export` and `import`: runs in folders, and groups in files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from buffer.control.control import Mode
from buffer.curation.group_export import Exported
from buffer.curation.group_import import Imported
from buffer.errors import ConfigError
from buffer.ids import POOLS
from buffer.query.language import parse
from buffer.run.run import Run
from buffer.snapshot.folder import read_manifest
from rolloutmq.cli.groups import WHERE_HELP
from rolloutmq.cli.logs import follow
from rolloutmq.command_list import command
from rolloutmq.options import (
    AsJson,
    OneTask,
    Output,
    RedisUrl,
    RunDir,
    Target,
    on_run,
    open_server,
    read_where,
    require_known,
)
from rolloutmq.output import count, plural, progress


@command("save", epilog="Example: rolloutmq save backups/demo-1200 --pause")
@on_run
def save(
    target: Target,
    folder: Annotated[Path, Argument(metavar="FOLDER", help="New folder for the snapshot.")],
    pause: Annotated[
        bool,
        Option(
            "--pause", help="Let the workers finish their groups, and hold them during the copy."
        ),
    ] = False,
    as_json: AsJson = False,
) -> Output:
    """Save a paused or stopped run to a folder: groups, order, counters, batches.

    With --pause, the workers first finish the groups that they hold, and continue after the copy;
    the saved run is paused, too. Workers, events, weights and checkpoints are not saved.
    """
    start = time.monotonic()
    with _paused(target.run, pause), progress(as_json) as advance:
        facts = target.run.save(folder, advance=advance)
    took_s = time.monotonic() - start
    document = {"folder": str(folder), "took_s": round(took_s, 3)}
    said = (
        f"run {facts.run}: {plural(facts.keys, 'key')} and {count(facts.bytes)} bytes saved to "
        f"{folder} in {took_s:.1f} s"
    )
    return Output(document | facts.model_dump(exclude={"files"}), said)


@contextmanager
def _paused(run: Run, wanted: bool) -> Iterator[None]:
    """Drain the workers before the block; a run that is already paused stays paused."""
    if not wanted or run.control.state().mode is not Mode.RUN:
        yield
        return
    try:
        run.receipts.wait(run.control.set_mode("operator", Mode.DRAIN))
        yield
    finally:
        run.control.set_mode("operator", Mode.RUN)


@command("restore", epilog="Example: rolloutmq restore backups/demo-1200 --run demo2")
def restore(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="Folder of the snapshot.")],
    columns: Annotated[
        Path | None, Option(metavar="FOLDER", help="[run] columns from now on. Default: as it was.")
    ] = None,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: Annotated[
        str | None,
        Option("--run", metavar="NAME", help="Name of the run. Default: its former name."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Restore a saved run to a server.

    The folder is checked first, and the run cannot be opened before it is complete. A run of that
    name must not be on the server. Workers, a producer and a trainer (with a checkpoint that is as
    old as the snapshot, or older) then join as usual. A run that was paused when it was saved is
    still paused.
    """
    start = time.monotonic()
    facts = read_manifest(folder)
    with open_server(redis_url, run_dir) as (store, _), progress(as_json) as advance:
        restored = Run.restore(store, folder, name=run, columns=columns, advance=advance)
        mode = restored.control.state().mode
    took_s = time.monotonic() - start
    said = [f"run {restored.name}: {plural(facts.keys, 'key')} restored in {took_s:.1f} s"]
    if mode is not Mode.RUN:
        said.append(
            f"it is paused ({mode}), as it was when it was saved; `rolloutmq resume` ends the pause"
        )
    document = {"run": restored.name, "keys": facts.keys, "mode": mode}
    Output(document | {"took_s": round(took_s, 3)}, said).print(as_json=as_json)


_STATUSES = (*POOLS, "init", "failed")


@command(
    "export",
    epilog="""Example: rolloutmq export good.parquet --where '{"reward": {"$gte": 0.5}}'""",
)
@on_run
def export(
    target: Target,
    file: Annotated[
        Path,
        Argument(
            metavar="FILE", help="New file: NAME.jsonl or NAME.parquet; with --follow, a folder."
        ),
    ],
    task: OneTask = None,
    status: Annotated[
        str | None,
        Option(
            help=f"Only groups of this status: {', '.join(_STATUSES)}. Default, "
            "without --where: completed."
        ),
    ] = None,
    where: Annotated[str | None, Option(metavar="JSON", help=WHERE_HELP)] = None,
    archived: Annotated[
        bool,
        Option(
            "--archived", help="All archived batches that are retained and have not been exported."
        ),
    ] = False,
    follow_steps: Annotated[
        bool,
        Option(
            "--follow",
            help="As --archived, and write each step to a file of the folder as soon as it is "
            "committed, until the run is finished or Ctrl-C; the same command continues.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> Output:
    """Write groups to a file, one line per rollout.

    A line has messages, texts, token ids, logprobs, versions and rewards. With --archived, the
    batches that were trained are written; where retention waits for an export, they are freed once
    the file is on disk. A group that cannot be read is left out and reported. The file appears
    only when it is complete. Parquet needs the package pyarrow.
    """
    require_known("status", status, _STATUSES)
    archived = archived or follow_steps
    if archived and (task or status or where):
        raise ConfigError(
            "--archived exports whole batches", hint="remove --task, --status and --where"
        )
    query = parse(read_where(where))
    require_known("task", task, target.run.limits.tasks)
    if archived and target.run.limits.archive:
        raise ConfigError(
            f"the trainer of this run copies its batches to {target.run.limits.archive} itself",
            hint='`rolloutmq replay` reads them; [retention] policy = "export" leaves them to you',
        )
    with progress(as_json) as advance:
        if follow_steps:
            done = _follow(target.run, file, as_json=as_json)
        elif archived:
            done = target.run.export_archived(file, advance=advance)
        else:
            done = target.run.export(file, task=task, status=status, where=query, advance=advance)
    document = {
        "file": str(file),
        "groups": done.groups,
        "rollouts": done.rollouts,
        "unreadable": done.unreadable,
    }
    if archived:
        document["steps"] = [done.steps[0], done.steps[-1]] if done.steps else []
    return Output(document, list(_exported(file, done, archived)))


def _follow(run: Run, folder: Path, *, as_json: bool) -> Exported:
    """Write steps into `folder` as they are committed, until the run is finished."""
    if not run.limits.retain_until_exported and not run.limits.retain_batches:
        raise ConfigError(
            "the run keeps no trained batch that could be exported",
            hint='set [retention] policy = "export" in its config',
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--follow writes into a folder, and {folder} is none: {error}") from None
    total = Exported()
    # the first look is for steps from before, the last one for those that no event announced
    for name in chain(["committed"], (event[1] for _, event in follow(run)), ["committed"]):
        if name == "committed":
            done = run.export_archived(folder)
            total.groups += done.groups
            total.rollouts += done.rollouts
            total.unreadable |= done.unreadable
            if done.steps:
                total.steps = range(total.steps.start or done.steps.start, done.steps.stop)
                if not as_json:
                    typer.echo(next(_exported(folder, done, archived=True)))
    return total


def _exported(file: Path, done: Exported, archived: bool) -> Iterator[str]:
    if archived and not done.steps:
        yield "No archived batch is left to export; no file was written."
        return
    batches = f" of steps {done.steps[0]} to {done.steps[-1]}" if archived else ""
    yield f"{_amount(done)}{batches} written to {file}"
    if done.unreadable:
        yield f"warning: {plural(len(done.unreadable), 'group')} left out, because unreadable:"
        for gid, fault in list(done.unreadable.items())[:20]:
            yield f"  {gid}: {fault}"


def _amount(done: Exported | Imported) -> str:
    return f"{plural(done.groups, 'group')} with {plural(done.rollouts, 'rollout')}"


@command("import", epilog="Example: rolloutmq import chosen.jsonl --task math")
@on_run
def import_groups(
    target: Target,
    file: Annotated[Path, Argument(metavar="FILE", help="File: NAME.jsonl or NAME.parquet.")],
    task: Annotated[
        str | None, Option(help="Task that the groups join. Default: the task in each line.")
    ] = None,
    from_line: Annotated[int, Option(min=1, help="First line to import.")] = 1,
    as_json: AsJson = False,
) -> Output:
    """Put completed groups from a file into the pools of a run.

    All lines are checked before the first group is imported. Consecutive lines with the same gid
    are one group, which gets a new gid. The format is the one that export writes.
    """
    run = target.run
    with progress(as_json) as advance:
        done = run.import_groups(file, task=task, from_line=from_line, advance=advance)
    said = [f"{_amount(done)} imported from {file}"]
    if done.too_old:
        said.append(f"{done.too_old} of them are too old for the next train step: they will expire")
    return Output({"file": str(file), **asdict(done)}, said)
