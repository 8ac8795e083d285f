"""`rolloutmq replay`: train archived batches again, and compare what comes out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text
from typer import Argument, Exit, Option

from buffer.errors import ConfigError
from rolloutmq.command_list import command
from rolloutmq.extensions.records.archive import Archive, ArchivePlace, archive_of
from rolloutmq.extensions.records.bundle import open_bundle
from rolloutmq.extensions.records.folders import beside, choose_parent, new_run, unpacked
from rolloutmq.options import AsJson, Output, Overrides
from rolloutmq.output import console, progress
from rolloutmq.views.explain.symptom import marked

if TYPE_CHECKING:
    from rolloutmq.extensions.records.replay import Difference, ReplayedStep

DIFFERS = 7
"""The exit code of a replay with the run's own settings that came out differently."""

SHOWN = 3  # numbers that differ in one step

EPILOG = """
\b
Examples: rolloutmq replay runs/demo
          rolloutmq replay runs/demo --from 110 --to 120
          rolloutmq replay runs/demo --from 110 --set learner.loss.clip_high=0.28 --name wide
          rolloutmq replay step111.rmq
"""


@command("replay", epilog=EPILOG)
def replay(
    source: Annotated[
        Path | None,
        Argument(
            metavar="RUN_FOLDER|BUNDLE",
            help="Folder of the run, or a file of `rolloutmq bundle`. Default: the run under "
            "./runs that was used last.",
        ),
    ] = None,
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
    kept, it begins with the newest one before it. A run that several ranks have trained is equal
    on as many: torchrun --nproc-per-node 2 -m rolloutmq replay RUN_FOLDER.
    """
    given = list(overrides or [])
    if source and source.is_file():
        _replay_bundle(source, given, name, as_json=as_json)
        return
    parent = choose_parent(source)
    target = beside(parent, f"{parent.name}-replay" if name is None else name)
    records = archive_of(parent, archive)
    end = last or records.steps()[-1]
    _replay(parent, records, target, start, end, given, as_json=as_json, kept=target)


def _replay_bundle(file: Path, given: list[str], name: str | None, *, as_json: bool) -> None:
    """Replay the step of a bundle; keep the run only if it has a name."""
    kept = None if name is None else beside(file, name)
    if kept and kept.exists():
        raise ConfigError(f"{kept} exists", hint="choose another --name")
    from consumer.handle.ranks import join

    ranks = join()
    with ExitStack() as stack:
        place = Path(ranks.share("" if ranks.rank else str(stack.enter_context(unpacked()))))
        folder, target = place / ".bundle", place / (name or "replayed")
        step = ranks.share(0 if ranks.rank else open_bundle(file, folder))
        records = Archive(folder / "archive")
        if (folder / "policy").is_dir():
            if name is not None or given or ranks.size > 1:
                raise ConfigError("it has no model", hint="leave out --name, --set, torchrun")
            _compare_scores(folder, records, step, as_json=as_json)
            return
        if kept and not ranks.rank:
            stack.callback(lambda: target.exists() and shutil.move(target, kept))
        _replay(folder, records, target, step - 1, step, given, as_json=as_json, kept=kept)


def _compare_scores(folder: Path, records: Archive, step: int, *, as_json: bool) -> None:
    """Compare what follows from the scores of an unpacked bundle with the run's log."""
    from rolloutmq.extensions.records.recorded_policy import check_step

    compared, found = check_step(folder, records.open(step))
    differing = {step: found} if found else {}
    note = f"{compared} numbers were compared, to 1e-6; without the model, no gradient and no state"
    document = {"steps": [step, step], "compared": compared, "differing": differing}
    Output(document, [*_verdict(step, differing, None, note)]).print(as_json=as_json)
    if differing:
        raise Exit(DIFFERS)


def _replay(
    parent: Path,
    records: Archive,
    target: Path,
    start: int,
    end: int,
    given: list[str],
    *,
    as_json: bool,
    kept: Path | None,
) -> None:
    """Replay steps of a run as a new one in `target`; `kept`: where it is afterwards."""
    from consumer.handle.ranks import join
    from rolloutmq.extensions.records.replay import prepare

    ranks = join()
    steps: list[ReplayedStep] = []
    quiet = as_json or ranks.rank > 0
    with new_run(target, "replay", end, rank=ranks.rank), progress(quiet) as advance:
        job = prepare(parent, records, target, start, end, given)
        for step in job.train(ranks):
            advance(f"step, of {end}", step.step)
            text = Text(f"step {step.step:>6}  state {step.state[:16]}  {step.seconds:6.2f} s")
            if found := step.differences:
                first = [f"{name} was {own!r}, is {new!r}" for name, own, new in found[:SHOWN]]
                text.append(f"  {len(found)} numbers differ: {'; '.join(first)}", style="red")
            if not as_json:
                console().print(text, soft_wrap=True)
            steps.append(step)
        if ranks.rank:
            return
        tensor = None if given else job.differing_tensor()
    differing = {step.step: step.differences for step in steps if step.differences}
    other_ranks = {step.step: step.ranks for step in steps if step.ranks != ranks.size}
    document = {
        "run": target.name, "folder": kept and str(kept), "steps": [steps[0].step, end],
        "state": steps[-1].state, "ranks": ranks.size, "other_ranks": other_ranks,
        "differing": differing, "differing_tensor": tensor,
    }  # fmt: skip
    note = "" if given else f"the run keeps no checkpoint of step {end} to compare with"
    shown = [*_verdict(end, differing, tensor, note)]
    for number in sorted({*other_ranks.values()}):
        what = f"last digits differ: {number} ranks trained steps that {ranks.size} trained here"
        as_many = f"to be equal: torchrun --nproc-per-node {number} -m rolloutmq replay …"
        shown.append(marked("note", what, as_many))
    if kept:
        look = f"rolloutmq web --run-dir {kept}"
        shown.append(Text(f"{kept} has curves, samples and a checkpoint: {look}"))
    Output(document, shown).print(as_json=as_json)
    if differing or tensor:
        raise Exit(DIFFERS)


def _verdict(
    end: int, differing: Mapping[int, Sequence[Difference]], tensor: str | None, note: str
) -> Iterator[Text]:
    """Yield lines about a replay; `note`: why no states are compared, "" for an experiment."""
    if differing:
        step = min(differing)
        yield marked(
            "fault", f"the first number that differs: {differing[step][0][0]} of step {step}"
        )
    elif note:
        yield marked("ok", "all numbers that the run logged are equal")
    if tensor:
        yield marked("fault", f"step {end}: {tensor} differs from the checkpoint")
    elif tensor is not None:
        yield marked("ok", f"the state of step {end} is equal bit for bit")
    elif note:
        yield marked("note", note)
