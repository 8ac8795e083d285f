"""`rolloutmq batch STEP`: show the groups of a train step."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer
from rich.text import Text

from buffer.batches.ledger import BatchLedger
from buffer.errors import ConfigError
from buffer.model.byte_size import format_size
from buffer.model.ids import split_group_id
from buffer.model.manifest import Manifest
from buffer.monitoring.console import console
from buffer.rollouts.staleness import staleness
from buffer.run import Run
from rolloutmq.options import AsJson, RedisUrl, RunDir, RunName, open_target
from rolloutmq.output import count, emit, facts, table

EPILOG = "Example: rolloutmq batch 7 --json | jq -r '.groups[].gid'"

Step = Annotated[
    int | None, typer.Argument(min=1, metavar="[STEP]", help="Train step. Default: the newest.")
]
IsEval = Annotated[
    bool, typer.Option("--eval", help="A step of the evaluations, which are counted separately.")
]


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(batch)


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
    needed.
    """
    with open_target(redis_url, run_dir, run) as target:
        ledger = target.run.evaluations if is_eval else target.run.ledger
        manifest = _manifest(ledger, step)
        rewards = _rewards(target.run, manifest)
    if as_json:
        emit(_as_json(manifest, rewards))
    else:
        _print(manifest, rewards)


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
        raise ConfigError(
            f"the record of step {wanted} has been freed: steps up to {freed} are "
            f"freed, up to {committed} committed",
            hint="[retention] batches keeps them longer",
        )
    return manifest


def _rewards(run: Run, manifest: Manifest) -> list[float | None]:
    """Return the mean score of each group; None where there is none, or the record is gone."""
    reads = [("HGET", run.keys.group(gid), "reward") for gid in manifest.gids]
    sums = run.store.each("batch", reads)
    pairs = zip(sums, manifest.entries, strict=True)
    return [float(total) / entry.samples if total else None for total, entry in pairs]


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
