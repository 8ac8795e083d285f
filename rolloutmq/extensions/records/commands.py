"""The commands that read the records of a run."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from typer import Argument, Exit, Option

from buffer.errors import ConfigError
from rolloutmq.command_list import command
from rolloutmq.extensions.records.archive import Archive
from rolloutmq.extensions.records.new_run import JUDGE_FILE, beside, choose_parent, new_run
from rolloutmq.extensions.records.step_file import RecordDamaged
from rolloutmq.options import AsJson, ConfigUrl, Output, Overrides, RunDir
from rolloutmq.output import console, count, progress
from rolloutmq.views.explain.symptom import marked

if TYPE_CHECKING:
    from rolloutmq.extensions.records.replay import Difference, ReplayedStep
    from rolloutmq.extensions.records.rescore import Differences

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
RunFolderOrBundle = Annotated[
    Path | None,
    Argument(
        metavar="RUN_FOLDER|BUNDLE",
        help="Folder of the run, or a file of `rolloutmq bundle`. Default: the run under ./runs "
        "that was used last.",
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
          rolloutmq replay runs/demo --from 110 --to 120
          rolloutmq replay runs/demo --from 110 --set learner.loss.clip_high=0.28 --name wide
          rolloutmq replay step111.rmq
"""

BUNDLE_EPILOG = """
\b
Examples: rolloutmq bundle step111.rmq --step 111
          rolloutmq bundle step111.rmq --step 111 --run-dir runs/demo
"""


def records_of(parent: Path, archive: str | None) -> Archive:
    return Archive(archive or str(parent / "archive"))


@command("replay", epilog=REPLAY_EPILOG)
def replay(
    folder: RunFolderOrBundle = None,
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
    if folder and folder.is_file():
        _replay_bundle(folder, given, name, as_json=as_json)
        return
    parent = choose_parent(folder)
    target = beside(parent, f"{parent.name}-replay" if name is None else name)
    records = records_of(parent, archive)
    _replay(parent, records, target, start, last, given, as_json=as_json, shown_as=target)


def _replay_bundle(file: Path, given: list[str], name: str | None, *, as_json: bool) -> None:
    """Replay the step of a bundle; keep the run only if it has a name."""
    kept = None if name is None else beside(file, name)
    if kept and kept.exists():
        raise ConfigError(f"{kept} exists", hint="choose another --name")
    from consumer.handle.ranks import join
    from rolloutmq.extensions.records.bundle import open_bundle

    ranks = join()
    with tempfile.TemporaryDirectory(prefix="rolloutmq-") as own:
        place = Path(ranks.share(own))  # that of rank 0
        folder, target = place / ".bundle", place / (name or "replayed")
        step = ranks.share(0 if ranks.rank else open_bundle(file, folder))
        records = Archive(str(folder / "archive"))
        if (folder / "policy").is_dir():
            if name is not None or given or ranks.size > 1:
                raise ConfigError("it has no model", hint="leave out --name, --set, torchrun")
            _check_scores(folder, records, step, as_json=as_json)
            return
        try:
            _replay(
                folder, records, target, step - 1, step, given,
                as_json=as_json, shown_as=kept,
            )  # fmt: skip
        finally:
            if kept and not ranks.rank and target.exists():
                shutil.move(target, kept)


def _check_scores(folder: Path, records: Archive, step: int, *, as_json: bool) -> None:
    """Compare what follows from the scores of an unpacked bundle with the run's log."""
    from rolloutmq.extensions.records.recorded_policy import check_step

    with records.open(step) as file:
        compared, found = check_step(folder, file)
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
    last: int | None,
    given: list[str],
    *,
    as_json: bool,
    shown_as: Path | None,
) -> None:
    """Replay steps of a run as a new one in `target`; `shown_as`: where it can be seen."""
    steps = records.steps()
    if not steps:
        raise ConfigError(
            f"{records.place} has no batch",
            hint='set [retention] policy = "archive" before a run; --archive names another place',
        )
    from consumer.handle.ranks import join
    from rolloutmq.extensions.records.replay import prepare

    ranks, end = join(), last or steps[-1]
    quiet = as_json or ranks.rank > 0
    with new_run(target, "replay", end, rank=ranks.rank), progress(quiet) as advance:
        job = prepare(parent, records, target, start, end, given)
        differing: dict[int, Sequence[Difference]] = {}
        other_ranks: dict[int, int] = {}
        state = ""
        for step in job.train(ranks):
            advance(f"step, of {end}", step.step)
            state = step.state
            is_own = not given or step.step <= start
            if is_own and step.differences:
                differing[step.step] = step.differences
            if is_own and step.ranks != ranks.size:
                if not other_ranks and not as_json:
                    console().print(_other_ranks(step, ranks.size), soft_wrap=True)
                other_ranks[step.step] = step.ranks
            if not as_json:
                console().print(_line(step, differing.get(step.step, ())), soft_wrap=True)
        if ranks.rank:
            return
        tensor = None if given else job.differing_tensor()
    document = {
        "run": target.name, "folder": shown_as and str(shown_as),
        "steps": [job.phases[0].first, end], "state": state, "ranks": ranks.size,
        "other_ranks": other_ranks, "differing": differing, "differing_tensor": tensor,
    }  # fmt: skip
    note = "" if given else f"the run keeps no checkpoint of step {end} to compare with"
    shown = [*_verdict(end, differing, tensor, note)]
    if shown_as:
        look = f"rolloutmq web --run-dir {shown_as}"
        shown.append(Text(f"{shown_as} has curves, samples and a checkpoint: {look}"))
    Output(document, shown).print(as_json=as_json)
    if differing or tensor:
        raise Exit(DIFFERS)


def _other_ranks(step: ReplayedStep, size: int) -> Text:
    return Text(
        f"[note] step {step.step} was trained on {step.ranks} ranks, and this replay has {size}: "
        "numbers differ in the last digits; for as many ranks, start it with "
        f"torchrun --nproc-per-node {step.ranks} -m rolloutmq replay …",
        style="yellow",
    )


def _line(step: ReplayedStep, differences: Sequence[Difference]) -> Text:
    text = Text(f"step {step.step:>6}  state {step.state[:16]}  {step.seconds:6.2f} s")
    if not differences:
        return text
    shown = [f"{name} was {own!r}, is {new!r}" for name, own, new in differences[:SHOWN]]
    return text.append(f"  {len(differences)} numbers differ: {'; '.join(shown)}", style="red")


def _verdict(
    end: int,
    differing: Mapping[int, Sequence[Difference]],
    tensor: str | None,
    note: str,
) -> Iterator[Text]:
    if differing:
        first = min(differing)
        name = differing[first][0][0]
        yield Text(f"[BAD ] the first number that differs: {name} of step {first}", style="red")
    elif note:
        yield Text("[ok  ] all numbers that the run logged are equal", style="green")
    if tensor:
        yield Text(f"[BAD ] step {end}: {tensor} differs from the checkpoint", style="red")
    elif tensor is not None:
        yield Text(f"[ok  ] the state of step {end} is equal bit for bit", style="green")
    elif note:
        yield Text(f"[note] {note}", style="dim")


@command("bundle", epilog=BUNDLE_EPILOG)
def bundle_step(
    file: Annotated[Path, Argument(metavar="FILE", help="New file, such as step111.rmq.")],
    step: Annotated[int, Option("--step", min=1, help="A step of the archive.")],
    run_dir: RunDir = None,
    archive: ArchivePlace = None,
    max_mb: Annotated[
        int, Option("--max-mb", min=1, help="Most MB that state and model may have.")
    ] = 256,
    logprobs: Annotated[
        bool, Option("--logprobs", help="Store log-probabilities in place of state and model.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write one step of a run as a file that `rolloutmq replay` trains on any machine.

    It has the batch with its texts, the checkpoint before the step, the first weights, settings,
    versions, and the numbers that came out: what a report of a bug needs. Needs the checkpoint of
    the step before, and [retention] policy = "archive". With --logprobs, the step is trained once
    here, on one rank; `replay` then compares rewards, advantages, masks and losses, but no
    gradient norm and no state.
    """
    parent = choose_parent(run_dir)
    from rolloutmq.extensions.records.bundle import write_bundle

    records = records_of(parent, archive)
    most = None if logprobs else max_mb * 10**6
    size, differing = write_bundle(parent, records, step, file, most)
    shown = [Text(f"{file}: {size / 1e6:.1f} MB. To train it again: rolloutmq replay {file}")]
    for name, own, new in differing[:1]:
        what = f"`replay` will find {name} = {new!r}, as here; the run logged {own!r}"
        shown.append(Text(f"[note] {what}", style="yellow"))
    document = {"file": str(file), "step": step, "bytes": size, "differing": differing}
    Output(document, shown).print(as_json=as_json)


FORK_EPILOG = """
\b
Examples: rolloutmq fork runs/demo --at 110 --name b --set learner.learning_rate=1e-5
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
    parent = choose_parent(folder)
    target = beside(parent, name)
    with new_run(target, "fork", at, keep=["run.json"]):
        from rolloutmq.extensions.records.fork import CONFIG, create_forked, fork

        say = partial(console(stderr=as_json).print, soft_wrap=True)
        config = fork(parent, at, target, list(overrides or []))
        create_forked(config, redis_url, say)
    file = target / CONFIG
    Output(
        {"run": name, "folder": str(target), "config": str(file), "step": at},
        [Text(f"run {name} continues at step {at + 1}: rolloutmq run {file}")],
    ).print(as_json=as_json)


RESCORE_EPILOG = """
\b
Examples: rolloutmq rescore runs/demo --from 110 --task chain_sum --judge new:score
          rolloutmq rescore runs/demo --from 110 --task chain_sum --judge new:score --yes
"""


@command("rescore", epilog=RESCORE_EPILOG)
def rescore_run(
    start: Annotated[int, Option("--from", min=0, help="Checkpoint to begin with; 0: none.")],
    task: Annotated[str, Option(help="Task whose groups are judged.")],
    judge: Annotated[str, Option(help="Judge, as in a config: a name, module:function, a URL.")],
    folder: RunFolderArgument = None,
    name: Annotated[
        str | None, Option(help="Name of the new run, and of its folder. Default: RUN-rescored.")
    ] = None,
    archive: ArchivePlace = None,
    yes: Annotated[bool, Option("--yes", help="Train on the new scores, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Score the archived responses of a run by another judge, and train on the new scores.

    Without --yes it only judges, and shows what would change. With --yes it trains the steps from
    checkpoint FROM again, without generating a token; `rolloutmq fork` then goes on from the new
    run. The judge runs behind the task's border and limits of time and memory.
    """
    parent = choose_parent(folder)
    target = beside(parent, f"{parent.name}-rescored" if name is None else name)
    records = records_of(parent, archive)
    steps = records.steps()
    if not steps or steps[-1] <= start:
        raise ConfigError(f"{records.place} has no batch after step {start}", hint="set --from")
    from consumer.handle.ranks import join
    from rolloutmq.extensions.records.rescore import Differences, forget_other_scores, rescore

    ranks, last = join(), steps[-1]
    kept, quiet = ["archive", JUDGE_FILE], as_json or ranks.rank > 0
    with new_run(target, "rescore", last, kept, rank=ranks.rank), progress(quiet) as advance:
        scored, found = Archive(str(target / "archive")), Differences()
        if not ranks.rank:
            forget_other_scores(target, task, judge)
            wanted = range(start + 1, last + 1)
            for step in rescore(records, scored, task, judge, wanted, found):
                advance(f"step, of {last}, judged", step)
        ranks.share(True)  # all is scored
        document: dict[str, Any] = asdict(found)
        then = "to train on these scores: the same command with --yes"
        if yes:
            from rolloutmq.extensions.records.replay import prepare

            override = f"tasks.{task}.judge={json.dumps(judge)}"
            job = prepare(parent, scored, target, start, last, [], [override])
            for trained in job.train(ranks):
                advance(f"step, of {last}, trained", trained.step)
                document["state"] = trained.state
            goes_on = f"rolloutmq fork {target} --at {last} --name NAME"
            then = f"trained in {target}; to go on from it: {goes_on}"
    if not ranks.rank:
        Output(document, [_differences(found), Text(then)]).print(as_json=as_json)


def _differences(found: Differences) -> Text:
    groups = max(1, found.groups)
    text = Text(
        f"{count(found.changed)} of {count(found.groups)} groups have other scores, "
        f"{count(found.advantages)} other advantages; "
        f"mean score {found.before / groups:.3f}, then {found.after / groups:.3f}"
    )
    for each in found.examples:
        text.append("\n  {gid} rollout {index}: {before:g}, then {after:g}".format(**each))
    return text


PROVE_EPILOG = """
\b
Examples: rolloutmq prove runs/demo/checkpoints/step-000120
          rolloutmq prove runs/demo/checkpoints/step-000120 --without-source gsm8k
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
    proof = prove(checkpoint, records_of(checkpoint.parent.parent, archive), without)
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
