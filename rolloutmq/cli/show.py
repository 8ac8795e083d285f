"""`rolloutmq show` and `batch`: one group, and the groups of a train step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.text import Text

from buffer.errors import ConfigError
from buffer.ids import split_group_id
from buffer.ledger.ledger import BatchLedger
from buffer.manifest import Manifest
from buffer.readable import format_size
from buffer.run import Run
from buffer.wire.staleness import staleness
from consumer.grpo.reporting.sample_log import Sample
from rolloutmq.command_list import command
from rolloutmq.options import (
    AsJson,
    GroupId,
    RedisUrl,
    RunDir,
    RunName,
    open_target,
    stopped_samples,
)
from rolloutmq.output import console, count, emit, facts, table
from rolloutmq.views.found_group import FoundGroup, find_group, print_group


@command("Look", "show", epilog="Example: rolloutmq show math-0000000042 --member 3")
def show(
    gid: GroupId,
    member: Annotated[
        int | None, typer.Option(min=0, help="Show only this rollout of the group.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Also print token ids and logprobs.")
    ] = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Show one group: its stage, texts, rewards and versions.

    A bar for every rollout shows which weights sampled which tokens, one colour per policy
    version. The texts of a group whose payload is freed are read from the sample log in the run's
    folder, if they are there ([samples]).
    """
    split_group_id(gid)
    stopped = stopped_samples(redis_url, run_dir)
    sample = stopped.find(gid) if stopped else None
    if sample:
        found = FoundGroup(gid, "", [], {}, sample=sample)
    else:
        with open_target(redis_url, run_dir, run) as target:
            found = find_group(target.run, gid, target.samples)
    document = found.document(tokens=tokens)
    if member is not None:
        document["members"] = [_member(document, member)]
    if as_json:
        emit(document)
    else:
        print_group(console(), document)


def _member(document: Mapping[str, Any], index: int) -> dict[str, Any]:
    for member in document["members"]:
        if member["index"] == index:
            found: dict[str, Any] = member
            return found
    raise ConfigError(
        f"{document['gid']} has no member {index}",
        hint=f"it has {len(document['members'])}, counted from 0",
    )


Step = Annotated[
    int | None, typer.Argument(min=1, metavar="[STEP]", help="Train step. Default: the newest.")
]
IsEval = Annotated[
    bool, typer.Option("--eval", help="A step of the evaluations, which are counted separately.")
]


@command("Look", "batch", epilog="Example: rolloutmq batch 7 --json | jq -r '.groups[].gid'")
def batch(
    step: Step = None,
    is_eval: IsEval = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Show the groups of a train step.

    They are listed in order, with versions, sizes and rewards. This record is what makes a batch
    the same after a crash. It is kept until its checkpoint and those before it are no longer
    needed. Of an older train step, and of a run whose own server is stopped, the groups in the
    sample log of the run's folder are shown ([samples]).
    """
    stopped = stopped_samples(redis_url, run_dir) if step and not is_eval else None
    if stopped and step and (samples := stopped.read(step)):
        _show_samples(samples, as_json)
        return
    with open_target(redis_url, run_dir, run) as target:
        ledger = target.run.evaluations if is_eval else target.run.ledger
        logged = target.samples if step and not is_eval else None
        try:
            manifest = _manifest(ledger, step)
        except FreedStep:
            samples = logged.read(step) if logged and step else []
            if not samples:
                raise
            _show_samples(samples, as_json)
            return
        rewards = _rewards(target.run, manifest)
    if as_json:
        emit(_as_json(manifest, rewards))
    else:
        _print(manifest, rewards)


class FreedStep(ConfigError):
    """Raised for a step that was trained and whose record is freed."""


def _manifest(ledger: BatchLedger, step: int | None) -> Manifest:
    taken, committed, freed = ledger.steps()
    wanted = taken if step is None else step
    if not 0 < wanted <= taken:
        raise ConfigError(
            f"step {wanted} has not been taken yet",
            hint=f"the newest step is {taken}" if taken else "no step has been taken",
        )
    manifest = ledger.manifest(wanted)
    if manifest is None:
        raise FreedStep(
            f"the record of step {wanted} has been freed: steps up to {freed} are "
            f"freed, up to {committed} committed",
            hint="[retention] batches keeps them longer",
        )
    return manifest


def _rewards(run: Run, manifest: Manifest) -> list[float | None]:
    """Return the mean score of each group; None if it has no score, or its record is gone."""
    reads = [("HGET", run.keys.group(gid), "reward") for gid in manifest.gids]
    sums = run.store.each("batch", reads)
    pairs = zip(sums, manifest.entries, strict=True)
    return [float(total) / entry.samples if total else None for total, entry in pairs]


def _show_samples(samples: list[Sample], as_json: bool) -> None:
    groups = [_sampled(sample) for sample in samples]
    step = samples[0]["step"]
    if as_json:
        emit({"step": step, "is_sample": True, "groups": groups})
        return
    screen = console()
    screen.print(Text(f"of step {step}, the sample log has these {len(groups)} groups"))
    numbers = ("samples", "version", "staleness", "reward")
    grid = table("gid", "why", *numbers, right=[*numbers])
    for group in groups:
        reward = "-" if group["reward"] is None else f"{group['reward']:.3f}"
        cells = [group[name] for name in ("gid", "why", "samples", "version", "staleness")]
        grid.add_row(*("-" if cell is None else str(cell) for cell in cells), reward)
    screen.print(grid)
    screen.print(Text("rolloutmq show GID shows one of them", style="dim"))


def _sampled(sample: Sample) -> dict[str, Any]:
    members = sample["members"]
    versions = [span["version"] for member in members for span in member["spans"]]
    scores = [(member["reward"] or {}).get("score") for member in members]
    known = [score for score in scores if score is not None]
    return {
        **{name: sample[name] for name in ("gid", "why", "staleness")},
        "samples": len(members),
        "version": min(versions, default=None),
        "reward": sum(known) / len(members) if known else None,
    }


def _as_json(manifest: Manifest, rewards: list[float | None]) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "header": manifest.header,
        "archived": manifest.archived,
        "revision": manifest.revision,
        "groups": [
            {
                "gid": entry.gid,
                "samples": entry.samples,
                "version": entry.version,
                "staleness": None
                if entry.version is None
                else staleness(manifest.step, entry.version),
                "size": entry.payload.size,
                "crc": entry.payload.crc,
                "reward": reward,
            }
            for entry, reward in zip(manifest.entries, rewards, strict=True)
        ],
    }


def _print(manifest: Manifest, rewards: list[float | None]) -> None:
    entries = manifest.entries
    tasks = Counter(split_group_id(gid)[0] for gid in manifest.gids)
    screen = console()
    screen.print(facts([
        ("step", str(manifest.step) + (" (archived)" if manifest.archived else "")),
        ("groups", f"{len(entries)}: " + ", ".join(f"{n} of {task}" for task, n in tasks.items())),
        ("rollouts", count(sum(entry.samples for entry in entries))),
        ("size", format_size(sum(entry.payload.size for entry in entries))),
        ("quarantined", count(manifest.revision)),
    ]))  # fmt: skip
    grid = table("gid", "rollouts", "version", "staleness", "size", "reward",
                 right=["rollouts", "version", "staleness", "size", "reward"])  # fmt: skip
    for entry, reward in zip(entries, rewards, strict=True):
        version = "-" if entry.version is None else str(entry.version)
        age = "-" if entry.version is None else str(staleness(manifest.step, entry.version))
        score = "-" if reward is None else f"{reward:.3f}"
        grid.add_row(
            entry.gid, str(entry.samples), version, age, format_size(entry.payload.size), score
        )
    screen.print(grid)
    screen.print(Text("rolloutmq show GID shows one of them", style="dim"))
