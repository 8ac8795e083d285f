"""`rolloutmq show`, `rejudge` and `batch`: one group, and the groups of a train step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text
from typer import Argument, Option

from buffer.errors import ConfigError, RolloutMQError, StoreUnavailable
from buffer.failure_text import trace_of
from buffer.ids import split_group_id
from buffer.manifest import Manifest
from buffer.readable import format_size
from buffer.run.run import Run
from buffer.wire.staleness import staleness
from consumer.handle.sample_log import SampleLog, TokenTexts, model_folders
from producer_workers.user_code.failure import failure_text
from rolloutmq.command_list import command
from rolloutmq.options import AsJson, GroupId, Output, Target, on_run, or_folder
from rolloutmq.output import count, facts, known, table
from rolloutmq.views.found_group import FoundGroup, find_group, group_parts

if TYPE_CHECKING:
    from rolloutmq.config.config import Config
    from rolloutmq.views.rejudge import Rejudged


Member = Annotated[int | None, Option("--member", min=0, help="Only this rollout of the group.")]


def _show_logged(
    folder: Path, error: StoreUnavailable, gid: str, member: int | None, tokens: bool
) -> Output:
    split_group_id(gid)
    sample = SampleLog(folder).find(gid)
    if sample is None:
        raise error
    return _shown(FoundGroup(gid, sample=sample), member, tokens)


@command("show", epilog="Example: rolloutmq show math-0000000042 --member 3")
@or_folder(_show_logged)
def show(
    target: Target,
    gid: GroupId,
    member: Member = None,
    tokens: Annotated[bool, Option("--tokens", help="Also print token ids and logprobs.")] = False,
) -> Output:
    """Show one group: its stage, texts, rewards and versions.

    A bar for every rollout shows which weights sampled which tokens, one colour per policy
    version. The texts of a group whose payload is freed are read from the sample log in the run's
    folder, if they are there ([samples]).
    """
    return _shown(find_group(target.run, gid, target.samples), member, tokens)


def _shown(found: FoundGroup, member: int | None, tokens: bool) -> Output:
    document = found.document(tokens=tokens)
    if member is not None:
        members = {each["index"]: each for each in document["members"]}
        if member not in members:
            raise ConfigError(
                f"{found.gid} has no member {member}", hint=f"it has {len(members)}, counted from 0"
            )
        document["members"] = [members[member]]
    return Output(document, list(group_parts(document)))


@command("rejudge", epilog="Example: rolloutmq rejudge math-0000000042 --member 3 --pdb")
@on_run
def rejudge(
    target: Target,
    gid: GroupId,
    member: Member = None,
    config: Annotated[
        Path | None,
        Option(metavar="CONFIG", help="Config with the judge. Default: that of `rolloutmq run`."),
    ] = None,
    with_pdb: Annotated[
        bool, Option("--pdb", help="Open a debugger at the line of yours that raised.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run the judge of a group's task again on its responses.

    It shows rewards and tracebacks, and changes nothing of the run. The judge runs as its code is
    now, in this process, without limits of time and memory. The group may be in a pool or a batch,
    in the sample log, or a dead letter that has kept its responses. Exits with 1 if the judge
    raises.
    """
    from rolloutmq.views.rejudge import debug, judge_again, responses_of

    found = find_group(target.run, gid, target.samples)
    task = _config(target, config).tasks.get(name := split_group_id(gid)[0])
    if task is None:
        raise ConfigError(f"the config has no task {name!r}", hint="give another one by --config")
    texts = TokenTexts(model_folders(target.run, target.run_dir))
    shown = list(judge_again(name, task, responses_of(found, texts), member))
    document = {"gid": gid, "verdicts": [verdict.document() for verdict in shown]}
    above = [None, *(verdict.error for verdict in shown)]
    Output(document, list(map(_verdict, shown, above))).print(as_json=as_json)
    if raised := next((verdict.error for verdict in shown if verdict.error), None):
        if with_pdb:
            debug(raised)
        raise typer.Exit(1)


def _verdict(verdict: Rejudged, above: BaseException | None) -> Text:
    """Return a verdict as text; `above`: the error that the verdict above it shows."""
    state = verdict.state
    text = Text.assemble((f"#{state.index} ", "bold"), f"{state.response[:200]!r}\n   ")
    if verdict.error:
        if verdict.error is above:  # a judge of groups raises for all of them
            return text.append("the same error", style="red")
        said = failure_text(verdict.error)
        return text.append(trace_of(said).replace("\n", "\n   ") or said, style="red")
    parts = ", ".join(f"{name} {value:g}" for name, value in (verdict.reward or {}).items())
    before = known((state.reward or {}).get("score"), "g")
    return text.append(parts).append(f"  (before: {before})", style="dim")


def _config(target: Target, path: Path | None) -> Config:
    """Return the config that the user names, else that of the run's last launcher."""
    from rolloutmq.presets import config_of_run, open_config
    from rolloutmq.run_owner import read_record

    if path:
        return open_config(path)
    record = read_record(target.run_dir) if target.run_dir else None
    if record is None or not record.command:
        raise ConfigError("the run was not started by `rolloutmq run`", hint="give --config CONFIG")
    return config_of_run(record.command)


def _batch_logged(folder: Path, error: RolloutMQError, step: int | None, is_eval: bool) -> Output:
    samples = SampleLog(folder).read(step) if step and not is_eval else []
    if not samples:
        raise error
    groups = []
    for sample in samples:
        members = sample["members"]
        versions = [span["version"] for member in members for span in member["spans"]]
        scores = [(member["reward"] or {}).get("score") for member in members]
        known_scores = [score for score in scores if score is not None]
        groups.append({
            **{name: sample[name] for name in ("gid", "why", "staleness")},
            "samples": len(members),
            "version": min(versions, default=None),
            "reward": sum(known_scores) / len(members) if known_scores else None,
        })  # fmt: skip
    title = f"of step {step}, the sample log has these {len(groups)} groups"
    shown = _listed(groups, "why", "samples", "version", "staleness", "reward")
    return Output({"step": step, "is_sample": True, "groups": groups}, [title, *shown])


@command("batch", epilog="Example: rolloutmq batch 7 --json | jq -r '.groups[].gid'")
@or_folder(_batch_logged)
def batch(
    target: Target,
    step: Annotated[
        int | None, Argument(min=1, metavar="STEP", help="Train step. Default: the newest.")
    ] = None,
    is_eval: Annotated[
        bool, Option("--eval", help="A step of the evaluations, which are counted separately.")
    ] = False,
) -> Output:
    """Show the groups of a train step.

    They are listed in order, with versions, sizes and rewards. This record is what makes a batch
    the same after a crash. It is kept until its checkpoint and those before it are no longer
    needed. Of an older train step, and of a run whose server is lost, the groups in the sample
    log of the run's folder are shown ([samples]).
    """
    ledger = target.run.evaluations if is_eval else target.run.ledger
    taken, committed, freed = ledger.steps()
    wanted = taken if step is None else step
    if not 0 < wanted <= taken:
        raise ConfigError(
            f"step {wanted} has not been taken yet",
            hint=f"the newest step is {taken}" if taken else "no step has been taken",
        )
    if manifest := ledger.manifest(wanted):
        return _recorded(target.run, manifest)
    error = ConfigError(
        f"the record of step {wanted} has been freed: steps up to {freed} are freed, up to "
        f"{committed} committed",
        hint="[retention] batches keeps them longer",
    )
    if target.run_dir is None:
        raise error
    return _batch_logged(target.run_dir, error, step, is_eval)


def _listed(groups: list[dict[str, Any]], *names: str) -> list[RenderableType]:
    formats: dict[str, Callable[[Any], str]]
    formats = {"size": format_size, "reward": lambda reward: known(reward, ".3f")}
    grid = table("gid", *names, right=[name for name in names if name != "why"])
    for group in groups:
        grid.add_row(group["gid"], *(formats.get(name, known)(group[name]) for name in names))
    return [grid, Text("rolloutmq show GID shows one of them", style="dim")]


def _recorded(run: Run, manifest: Manifest) -> Output:
    # a group has no sum if it has no score, or its record is gone
    reads = [("HGET", run.keys.group(gid), "reward") for gid in manifest.gids]
    sums = run.store.send("batch", reads)
    groups: list[dict[str, Any]] = [
        {
            "gid": entry.gid,
            "samples": entry.samples,
            "version": entry.version,
            "staleness": None if entry.version is None else staleness(manifest.step, entry.version),
            "size": entry.payload.size,
            "crc": entry.payload.crc,
            "reward": float(total) / entry.samples if total else None,
        }
        for entry, total in zip(manifest.entries, sums, strict=True)
    ]
    names = ("step", "header", "archived", "revision")
    document = {name: getattr(manifest, name) for name in names} | {"groups": groups}
    tasks = Counter(split_group_id(gid)[0] for gid in manifest.gids)
    parts = ", ".join(f"{n} of {task}" for task, n in tasks.items())
    about = facts([
        ("step", str(manifest.step) + (" (archived)" if manifest.archived else "")),
        ("groups", f"{len(groups)}: {parts}"),
        ("rollouts", count(sum(entry.samples for entry in manifest.entries))),
        ("size", format_size(sum(entry.payload.size for entry in manifest.entries))),
        ("quarantined", count(manifest.revision)),
    ])  # fmt: skip
    shown = _listed(groups, "samples", "version", "staleness", "size", "reward")
    return Output(document, [about, *shown])
