"""The commands that read the records of a run."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text
from typer import Argument, Exit, Option

from buffer.errors import ConfigError
from rolloutmq.command_list import command
from rolloutmq.extensions.records.archive import Archive
from rolloutmq.options import RUNS, AsJson, Output, Overrides
from rolloutmq.output import console, progress
from rolloutmq.run_owner import LOCK_FILE, Stage, choose_folder, own, read_record

if TYPE_CHECKING:
    from rolloutmq.extensions.records.replay import ReplayedStep

Difference = tuple[str, float, float]
"""The name of a metric, its value in the run's log, and the value of the replay."""

DIFFERS = 7
"""The exit code of a replay with the run's own settings that came out differently."""

SHOWN = 3  # numbers that differ in one step

RunFolderArgument = Annotated[
    Path | None,
    Argument(
        metavar="RUN_FOLDER",
        help="Folder of the run. Default: the one under ./runs that runs, or was used last.",
    ),
]
ArchivePlace = Annotated[
    str | None,
    Option(
        "--archive",
        metavar="PLACE",
        help="Folder or URL of its archive. Default: `archive` in the run's folder.",
    ),
]

REPLAY_EPILOG = """
\b
Examples: rolloutmq replay runs/demo
          rolloutmq replay runs/demo --from 40 --to 60
          rolloutmq replay runs/demo --from 40 --set learner.loss.clip_high=0.28 --name wide
"""


@command("replay", epilog=REPLAY_EPILOG)
def replay(
    folder: RunFolderArgument = None,
    start: Annotated[
        int, Option("--from", min=0, help="Checkpoint to begin with; 0: the run's first weights.")
    ] = 0,
    last: Annotated[
        int | None, Option("--to", min=1, help="Last step. Default: the newest in the archive.")
    ] = None,
    overrides: Overrides = None,
    name: Annotated[
        str | None, Option(help="Name of the new run, and of its folder. Default: RUN-replay.")
    ] = None,
    archive: ArchivePlace = None,
    as_json: AsJson = False,
) -> None:
    """Train archived batches of a run again, without workers.

    With the run's own settings, each step says whether all of its numbers are those that the run
    logged, and the last one whether weights and optimizer are equal bit for bit; if not, it ends
    with code 7. With --set, it is an experiment of its own, which the browser compares with the
    run. Needs [retention] policy = "archive" in the run's config. Where checkpoint FROM is not
    kept, it begins with the newest one before it.
    """
    parent = choose_folder(folder, RUNS)
    given = list(overrides or [])
    records = Archive(archive or str(parent / "archive"))
    steps = records.steps()
    if not steps:
        raise ConfigError(
            f"{records.place} has no batch",
            hint='set [retention] policy = "archive" before a run; --archive names another place',
        )
    name = name or f"{parent.name}-replay"
    target = parent.with_name(name)
    end = last or steps[-1]
    before = _unfinished(target)
    with own(target, name, ["replay", *sys.argv[2:]], end) as owned:
        for path in before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        from rolloutmq.extensions.records.replay import prepare

        job = prepare(parent, records, name, start, end, given)
        owned.note(Stage.RUNNING)
        differing: dict[int, Sequence[Difference]] = {}
        state = ""
        with progress(as_json) as advance:
            for step in job.train():
                advance(f"step, of {end}", step.step)
                state = step.state
                if step.differences and (not given or step.step <= start):
                    differing[step.step] = step.differences
                if not as_json:
                    console().print(_line(step, differing.get(step.step, ())), soft_wrap=True)
        tensor = None if given else job.differing_tensor()
    document = {
        "run": name, "folder": str(target), "steps": [job.phases[0].first, end], "state": state,
        "differing": differing, "differing_tensor": tensor,
    }  # fmt: skip
    Output(document, [*_verdict(target, end, differing, tensor, is_changed=bool(given))]).print(
        as_json=as_json
    )
    if differing or tensor:
        raise Exit(DIFFERS)


def _unfinished(target: Path) -> list[Path]:
    """Return what a replay left that did not finish. Raises ConfigError for anything else."""
    left = [path for path in target.glob("*") if path.name != LOCK_FILE]
    record = read_record(target)
    is_ours = record is not None and record.command[:1] == ["replay"]
    if left and not (is_ours and record and record.stage is not Stage.FINISHED):
        raise ConfigError(f"{target} exists", hint="choose another --name, or delete the folder")
    return left


def _line(step: ReplayedStep, differences: Sequence[Difference]) -> Text:
    text = Text(f"step {step.step:>6}  state {step.state[:16]}  {step.seconds:6.2f} s")
    if not differences:
        return text
    shown = [f"{name} was {own!r}, is {new!r}" for name, own, new in differences[:SHOWN]]
    return text.append(f"  {len(differences)} numbers differ: {'; '.join(shown)}", style="red")


def _verdict(
    target: Path,
    end: int,
    differing: Mapping[int, Sequence[Difference]],
    tensor: str | None,
    *,
    is_changed: bool,
) -> Iterator[Text]:
    if differing:
        first = min(differing)
        name = differing[first][0][0]
        yield Text(f"[BAD ] the first number that differs: {name} of step {first}", style="red")
    elif not is_changed:
        yield Text("[ok  ] all numbers that the run logged are equal", style="green")
    if tensor:
        yield Text(f"[BAD ] step {end}: {tensor} differs from the checkpoint", style="red")
    elif tensor is not None:
        yield Text(f"[ok  ] the state of step {end} is equal bit for bit", style="green")
    elif not is_changed:
        yield Text(f"[note] the run keeps no checkpoint of step {end} to compare with", style="dim")
    yield Text(f"{target} has curves, samples and a checkpoint: rolloutmq web --run-dir {target}")
