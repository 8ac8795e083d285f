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
from rolloutmq.extensions.records.step_file import RecordDamaged
from rolloutmq.options import RUNS, AsJson, ConfigUrl, Output, Overrides
from rolloutmq.output import console, count, progress
from rolloutmq.run_owner import LOCK_FILE, Stage, choose_folder, own, read_record
from rolloutmq.views.explain.symptom import marked

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
    left = _unfinished(target, "replay")
    with own(target, name, ["replay", *sys.argv[2:]], end) as owned:
        _delete(left)
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


def _unfinished(target: Path, verb: str) -> list[Path]:
    """Return what this command left where it did not finish. Raises ConfigError for all else."""
    left = [path for path in target.glob("*") if path.name != LOCK_FILE]
    record = read_record(target)
    is_ours = record is not None and record.command[:1] == [verb]
    if left and not (is_ours and record and record.stage is not Stage.FINISHED):
        raise ConfigError(f"{target} exists", hint="choose another --name, or delete the folder")
    return left


def _delete(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


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


FORK_EPILOG = """
\b
Examples: rolloutmq fork runs/demo --at 40 --name b --set learner.learning_rate=1e-5
          rolloutmq run runs/b/config.toml
"""


@command("fork", epilog=FORK_EPILOG)
def fork_run(
    at: Annotated[int, Option("--at", min=1, help="Checkpoint to go on from.")],
    name: Annotated[str, Option(help="Name of the new run, and of its folder.")],
    folder: RunFolderArgument = None,
    overrides: Overrides = None,
    redis_url: ConfigUrl = None,
    as_json: AsJson = False,
) -> None:
    """Make a run that goes on from a checkpoint of another one, with other settings.

    It has the weights, the optimizer and the draws of that step, and the config that the step was
    trained with. What was in flight is generated anew. The other run is only read, and may go on.
    """
    parent = choose_folder(folder, RUNS)
    target = parent.with_name(name)
    left = [path for path in _unfinished(target, "fork") if path.name != "run.json"]
    with own(target, name, ["fork", *sys.argv[2:]], at):
        _delete(left)
        from rolloutmq.extensions.records.fork import CONFIG, create_forked, fork

        def say(line: str) -> None:
            if not as_json:
                console().print(line, soft_wrap=True)

        config = fork(parent, at, name, list(overrides or []), say)
        create_forked(config, redis_url, say)
    file = target / CONFIG
    Output(
        {"run": name, "folder": str(target), "config": str(file), "step": at},
        [Text(f"run {name} continues at step {at + 1}: rolloutmq run {file}")],
    ).print(as_json=as_json)


PROVE_EPILOG = """
\b
Examples: rolloutmq prove runs/demo/checkpoints/step-000060
          rolloutmq prove runs/demo/checkpoints/step-000060 --without-source gsm8k
"""


@command("prove", epilog=PROVE_EPILOG)
def prove_checkpoint(
    checkpoint: Annotated[Path, Argument(metavar="CHECKPOINT", help="Folder of a checkpoint.")],
    archive: ArchivePlace = None,
    without: Annotated[
        str | None,
        Option("--without-source", metavar="SOURCE", help="Name the steps that touched it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell which prompts, judges and weights made a checkpoint, and whether all is unaltered.

    Compares the checkpoint's files, the chain of trained batches, every group in the archive, the
    config and the user's code. Ends with code 6 if something was altered, and with --without-source
    if a step touched it.
    """
    if not checkpoint.is_dir():
        raise ConfigError(f"{checkpoint} is no folder", hint="give a folder in checkpoints/")
    from rolloutmq.extensions.records.prove import judges_of, prove

    checkpoint = checkpoint.resolve()
    records = Archive(archive or str(checkpoint.parents[1] / "archive"))
    proof = prove(checkpoint, records, without)
    judges = sorted({name for terms in proof.terms.values() for name in judges_of(terms)})
    document = {
        "whole": proof.is_whole, "proof": proof.head, "groups": dict(proof.groups),
        "judges": judges, "steps_with_source": proof.touched if without else None,
        "checks": [check._asdict() for check in proof.checks],
    }  # fmt: skip
    shown = [marked(check.level, check.what) for check in proof.checks]
    made = ", ".join(f"{name} {count(number)}" for name, number in proof.groups.most_common())
    shown.append(Text(f"trained groups: {made or 'none'}; judges: {', '.join(judges)}"))
    if without:
        steps = ", ".join(map(str, proof.touched)) or "none"
        shown.append(Text(f"steps that trained groups of {without}: {steps}"))
    Output(document, shown).print(as_json=as_json)
    if not proof.is_whole or proof.touched:
        raise Exit(RecordDamaged.exit_code)
