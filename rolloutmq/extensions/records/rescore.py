"""Score the stored responses of a run by another judge, for a replay on the new scores.

The new archive has the same groups with other rewards. A step is judged at once and its file
written last, so the command goes on where it was killed, as long as the judge is the same. A judge
that raises ends it: a rollout without its new score would keep the wrong one.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
from numpy.typing import NDArray
from rich.text import Text
from typer import Option

from buffer.errors import ConfigError, JudgeError, Skip
from buffer.job import PayloadRef
from buffer.manifest import Manifest, ManifestEntry
from buffer.redis.payloads import checksum
from buffer.redis.whole_file import replace_file
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from consumer.handle.sample_log import TokenTexts
from producer_workers.judges.judge import Judge
from producer_workers.judges.load import load_for, load_worker_judge, make_judge
from rolloutmq.command_list import command
from rolloutmq.extensions.records.archive import Archive, ArchivePlace, archive_of, files_of
from rolloutmq.extensions.records.folders import ParentFolder, beside, choose_parent, new_run
from rolloutmq.extensions.records.step_file import StepFile, config_of, step_writer
from rolloutmq.launch.terms import source_digest
from rolloutmq.options import AsJson, Output
from rolloutmq.output import progress

JUDGE_FILE = "judge.json"
"""Which judge has scored the archive in the folder."""

AT_ONCE = 16  # groups that are judged at the same time
EXAMPLES = 3

Scores = tuple[str, NDArray[Any], NDArray[Any]]
"""A gid, and the scores of its rollouts by the run's judge and by the other one, float32[n]."""


@command(
    "rescore",
    epilog="Example: rolloutmq rescore runs/demo --from 110 --task chain_sum --judge new:score",
)
def rescore_run(
    start: Annotated[int, Option("--from", min=0, help="Checkpoint to begin with; 0: none.")],
    task: Annotated[str, Option(help="Task whose groups are judged.")],
    judge: Annotated[str, Option(help="Judge, as in a config: a name, module:function, a URL.")],
    folder: ParentFolder = None,
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
    records = archive_of(parent, archive)
    last = records.steps()[-1]
    if last <= start:
        raise ConfigError(f"{records.place} has no batch after step {start}", hint="set --from")
    from consumer.handle.ranks import join

    ranks, kept = join(), ["archive", JUDGE_FILE]
    quiet = as_json or ranks.rank > 0
    with new_run(target, "rescore", last, kept, rank=ranks.rank), progress(quiet) as advance:
        scored, found = Archive(target / "archive"), list[Scores]()
        if not ranks.rank:
            for step in rescore(records, scored, task, judge, range(start + 1, last + 1), found):
                advance(f"step, of {last}, judged", step)
        ranks.share(True)  # all is scored
        document = differences(found)
        then = "to train on these scores: the same command with --yes"
        if yes:
            from rolloutmq.extensions.records.replay import prepare

            override = f"tasks.{task}.judge={json.dumps(judge)}"
            job = prepare(parent, scored, target, start, last, [], [override])
            for trained in job.train(ranks):
                advance(f"step, of {last}, trained", trained.step)
                document["state"] = trained.state
            goes_on = f"rolloutmq fork {target} --at {last} --name NAME"
            then = f"trained; to go on from there:\n  {goes_on}"
    if ranks.rank:
        return
    before, after = (document[when] / max(1, len(found)) for when in ("before", "after"))
    example = "  {gid} rollout {index}: {before:g}, then {after:g}".format_map
    shown = [
        "{changed:,} of {groups:,} groups have other scores, {advantages:,} other advantages; "
        "mean score ".format_map(document)
        + f"{before:.3f}, then {after:.3f}",
        *map(example, document["examples"]),
        then,
    ]
    Output(document, list(map(Text, shown))).print(as_json=as_json)


def differences(scores: Sequence[Scores]) -> dict[str, Any]:
    """Return what another judge changes, with the rollouts whose scores change most as examples.

    `advantages`: groups of which also the scores relative to their mean change, so that something
    else is learned. `before`, `after`: sums of the groups' mean scores.
    """
    changed = [each for each in scores if not np.array_equal(each[1], each[2])]
    examples = []
    for gid, old, new in sorted(changed, key=lambda each: -np.abs(each[2] - each[1]).max()):
        index = int(np.abs(new - old).argmax())
        scores_of = {"before": float(old[index]), "after": float(new[index])}
        examples.append({"gid": gid, "index": index} | scores_of)
    centred = [(old - old.mean(), new - new.mean()) for _, old, new in changed]
    return {
        "groups": len(scores),
        "changed": len(changed),
        "advantages": sum(not np.allclose(old, new) for old, new in centred),
        "before": float(sum(old.mean() for _, old, _ in scores)),
        "after": float(sum(new.mean() for *_, new in scores)),
        "examples": examples[:EXAMPLES],
    }


def forget_other_scores(folder: Path, task: str, judge: str) -> None:
    """Delete the archive in `folder`, unless this very judge, with this source, has scored it."""
    now = orjson.dumps({"task": task, "judge": judge, "source": source_digest(judge)})
    file = folder / JUDGE_FILE
    if not file.exists() or file.read_bytes() != now:
        shutil.rmtree(folder / "archive", ignore_errors=True)
        replace_file(file, now)


def rescore(
    source: Archive, target: Archive, task: str, judge: str, steps: range, found: list[Scores]
) -> Iterator[int]:
    """Judge the groups of `task` in these steps; write each, add its scores to `found`, yield it.

    A step that `target` has is only compared. Raises ConfigError for a judge that cannot be
    loaded, and what it raises.
    """
    config = config_of(source.open(steps[0]).facts.config)
    known = [name for name, each in config.tasks.items() if not each.eval_of]
    if task not in known:
        raise ConfigError(f"no task {task!r} is trained", hint=f"known: {', '.join(known)}")
    section = config.tasks[task].model_copy(update={"judge": judge})
    texts = TokenTexts([config.model_folder])
    scorer = make_judge(section.judge, lambda spec: load_for(section, spec, load_worker_judge))
    forget_other_scores(Path(target.place).parent, task, judge)
    with asyncio.Runner() as runner, closing(scorer):
        for step in steps:
            file = source.open(step)
            if step not in target.steps():
                _write(file, target, runner.run(_judge(file, task, scorer, texts)))
            pairs = zip(file.groups(), target.open(step).groups(), strict=True)
            found += [
                (before.gid, np.nan_to_num(before.scores), np.nan_to_num(after.scores))
                for before, after in pairs
                if before.task == task
            ]
            yield step


async def _judge(
    file: StepFile, task: str, judge: Judge, texts: TokenTexts
) -> dict[str, list[dict[str, float]]]:
    """Return the new rewards by gid."""
    places = asyncio.Semaphore(AT_ONCE)

    async def of(group: RolloutGroup) -> list[dict[str, float]]:
        states = [state.model_copy(deep=True) for state in group.states]
        for state in states:
            ids = state.response_ids.tolist()
            state.response = state.response or texts.joined(ids, skip_special_tokens=True) or ""
        async with places:
            try:
                return await judge.judge_group(states)
            except Skip as skip:
                what = f"the judge skips group {group.gid}, which was trained: {skip.message}"
                raise JudgeError(what, hint="let it return a score for this group") from skip

    chosen = [group for group in file.groups() if group.task == task]
    found = await asyncio.gather(*map(of, chosen))
    return {group.gid: rewards for group, rewards in zip(chosen, found, strict=True)}


def _write(file: StepFile, target: Archive, rewards: dict[str, list[dict[str, float]]]) -> None:
    """Write the step with these rewards, and a manifest that names the new bytes."""
    payloads: dict[str, bytes] = {}
    entries: list[ManifestEntry] = []
    for entry in file.manifest.entries:
        data = file.payload(entry)
        if entry.gid in rewards:
            group = group_bytes.decode(data)
            states = group.states
            for state, reward in zip(states, rewards[entry.gid], strict=True):
                state.reward = {name: float(value) for name, value in reward.items()}
            data = group_bytes.encode_checked(RolloutGroup(group.gid, group.task, states))
            ref = PayloadRef(entry.gid, entry.payload.token, 1, len(data), checksum(data))
            entry = ManifestEntry(ref, entry.samples, entry.version)
        payloads[entry.gid] = data
        entries.append(entry)
    manifest = Manifest(file.manifest.step, file.manifest.header, tuple(entries))
    facts = file.facts.model_copy(update={"manifest": manifest.lines})
    with target.new_step(manifest.step) as path, step_writer(path, facts) as add:
        for gid, data in payloads.items():
            add(f"groups/{gid}", data)
        for name in (name for group in file.groups() for name in files_of(group)):
            add(f"columns/{name}", file.member(f"columns/{name}"))
