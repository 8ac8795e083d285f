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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
from rich.text import Text
from typer import Option

from buffer.errors import ConfigError
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
from rolloutmq.extensions.records.archive import Archive, files_of
from rolloutmq.extensions.records.new_run import (
    ArchivePlace,
    ParentFolder,
    archive_of,
    beside,
    choose_parent,
    new_run,
)
from rolloutmq.extensions.records.step_file import StepFile, config_of, new_step_file
from rolloutmq.launch.terms import source_digest
from rolloutmq.options import AsJson, Output
from rolloutmq.output import count, progress

JUDGE_FILE = "judge.json"
"""Which judge has scored the archive in the folder."""

AT_ONCE = 16  # groups that are judged at the same time
EXAMPLES = 3

EPILOG = """
\b
Examples: rolloutmq rescore runs/demo --from 110 --task chain_sum --judge new:score
          rolloutmq rescore runs/demo --from 110 --task chain_sum --judge new:score --yes
"""


@command("rescore", epilog=EPILOG)
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
        scored, found = Archive(target / "archive"), Differences()
        if not ranks.rank:
            forget_other_scores(target, task, judge)
            for step in rescore(records, scored, task, judge, range(start + 1, last + 1), found):
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
        Output(document, [found.text(), Text(then)]).print(as_json=as_json)


@dataclass(slots=True)
class Differences:
    """What another judge says of some steps."""

    groups: int = 0
    changed: int = 0
    """groups of which a score is another one"""
    advantages: int = 0
    """groups of which also the scores relative to their mean are others: what is learned differs"""
    before: float = 0.0
    after: float = 0.0
    """sums of mean scores of the groups"""
    examples: list[dict[str, Any]] = field(default_factory=list)
    """rollouts whose scores changed most in their steps: gid, index, before, after"""

    def add(self, group: RolloutGroup, scores: Sequence[float]) -> None:
        old, new = np.nan_to_num(group.scores), np.asarray(scores)
        self.groups += 1
        self.before += float(old.mean())
        self.after += float(new.mean())
        if np.array_equal(old, new):
            return
        self.changed += 1
        self.advantages += not np.allclose(old - old.mean(), new - new.mean())
        index = int(np.abs(new - old).argmax())
        scores_of = {"before": float(old[index]), "after": float(new[index])}
        self.examples.append({"gid": group.gid, "index": index} | scores_of)
        self.examples.sort(key=lambda each: -abs(each["after"] - each["before"]))
        del self.examples[EXAMPLES:]

    def text(self) -> Text:
        groups = max(1, self.groups)
        text = Text(
            f"{count(self.changed)} of {count(self.groups)} groups have other scores, "
            f"{count(self.advantages)} other advantages; "
            f"mean score {self.before / groups:.3f}, then {self.after / groups:.3f}"
        )
        for each in self.examples:
            text.append("\n  {gid} rollout {index}: {before:g}, then {after:g}".format(**each))
        return text


def forget_other_scores(folder: Path, task: str, judge: str) -> None:
    """Delete the archive in `folder`, unless this very judge, with this source, has scored it."""
    now = orjson.dumps({"task": task, "judge": judge, "source": source_digest(judge)})
    file = folder / JUDGE_FILE
    if not file.exists() or file.read_bytes() != now:
        shutil.rmtree(folder / "archive", ignore_errors=True)
        replace_file(file, now)


def rescore(
    source: Archive, target: Archive, task: str, judge: str, steps: range, found: Differences
) -> Iterator[int]:
    """Judge the groups of `task` in these steps; write, add to `found` and yield each step.

    A step that `target` has is only compared. Raises ConfigError for a judge that cannot be
    loaded, and what it raises.
    """
    with source.open(steps[0]) as first:
        config = config_of(first.facts.config)
    if task not in config.tasks:
        raise ConfigError(f"there is no task {task!r}", hint=f"known: {', '.join(config.tasks)}")
    section = config.tasks[task].model_copy(update={"judge": judge})
    texts = TokenTexts([config.model_folder])
    scorer = make_judge(section.judge, lambda spec: load_for(section, spec, load_worker_judge))
    with asyncio.Runner() as runner, closing(scorer):
        for step in steps:
            with source.open(step) as file:
                if step not in target.steps():
                    rewards = runner.run(_judge(file, task, scorer, texts))
                    _write(file, target, rewards)
                with target.open(step) as other:
                    pairs = zip(file.groups(), other.groups(), strict=True)
                    for before, after in pairs:
                        if before.task == task:
                            found.add(before, np.nan_to_num(after.scores).tolist())
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
            return await judge.judge_group(states)

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
    with target.new_file(manifest.step) as path, new_step_file(path, facts) as add:
        for gid, data in payloads.items():
            add(f"groups/{gid}", data)
        for name in (name for group in file.groups() for name in files_of(group)):
            add(f"columns/{name}", file.member(f"columns/{name}"))
