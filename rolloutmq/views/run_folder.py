"""Read a run from its folder alone: for its report, and where its server is lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table

from buffer.failure_text import message_of, trace_of
from buffer.groups.dead_letters import DeadLetter, by_cause
from buffer.redis.url import mask_url
from consumer.handle.dead_letter_file import read_dead_letters
from consumer.handle.step_log import Evaluations, StepLog
from rolloutmq.output import age, table
from rolloutmq.run_owner import LaunchRecord, read_record
from rolloutmq.views.explain.learning import learning
from rolloutmq.views.explain.processes import explain_folder
from rolloutmq.views.explain.shares import mean_shares
from rolloutmq.views.explain.symptom import Symptom, worst_first

ON_SERVER = "groups in the queue, records of batches, workers and events, which were on the server"


@dataclass(frozen=True)
class RunFolder:
    folder: Path

    @cached_property
    def record(self) -> LaunchRecord | None:
        return read_record(self.folder)

    @cached_property
    def log(self) -> StepLog:
        log = StepLog(self.folder / "steps.jsonl")
        log.read_new()
        return log

    @cached_property
    def letters(self) -> list[DeadLetter]:
        return read_dead_letters(self.folder)

    @property
    def name(self) -> str:
        return self.record.run if self.record else self.folder.resolve().name

    @property
    def step(self) -> int:
        """The newest trained step; 0 before the first."""
        return self.log.steps[-1].step if self.log.steps else 0

    @property
    def reward(self) -> float | None:
        """The mean reward of the newest trained step."""
        return self.log.steps[-1].metrics.get("rewards/mean") if self.log.steps else None

    @cached_property
    def findings(self) -> list[Symptom]:
        """What the launcher knows of the run's processes and its end, and of learning."""
        return worst_first([*explain_folder(self.folder), *learning(self.folder, self.log.steps)])

    def facts(self) -> dict[str, str]:
        """Return what the folder knows, and what it lacks, as texts by name."""
        record, steps = self.record, self.log.steps
        seconds = sum(step.metrics.get("time/step_s", 0.0) for step in steps)
        logs = sorted(path.stem for path in (self.folder / "logs").glob("*.log"))
        facts = {
            "folder": str(self.folder.resolve()),
            "state": record.stage if record else "not started by `rolloutmq run`",
            "reason": record.detail if record else "",
            "steps": f"{self.step} of {record.steps}" if record else str(self.step),
            "reward": "" if self.reward is None else f"{self.reward:.3f}",
            "groups trained": f"{sum(len(step.gids) for step in steps):,}",
            "trained twice": str(len(self.log.trained_twice())),
            "time in steps": age(1000 * seconds),
            "lost and cut at the end": mean_shares(steps) or "nothing",
            "dead letters": str(len(self.letters)),
            "logs": ", ".join(logs),
            "written": time.strftime("%Y-%m-%d %H:%M"),
        }
        if record:
            if record.account or record.has_ended:
                facts["account"] = record.account or "not checked at its end: see rolloutmq fsck"
            facts["command"] = mask_url("rolloutmq run " + " ".join(record.command))
        return {name: text for name, text in facts.items() if text} | {"not here": ON_SERVER}


def letters_by_cause(letters: Sequence[DeadLetter], total: int) -> dict[str, Any]:
    """Return the causes of `letters`; `total`: with those that were not read."""
    causes = [
        {
            "cause": cause,
            "count": len(found),
            "tasks": sorted({letter.task for letter in found}),
            "workers": sorted({letter.worker for letter in found if letter.worker}),
            "newest_ms": min(letter.age_ms for letter in found),
            "trace": trace_of(found[0].reason),
            "letters": [
                asdict(letter) | {"reason": message_of(letter.reason)} for letter in found[:50]
            ],
        }
        for cause, found in by_cause(letters)
    ]
    return {"total": total, "read": len(letters), "causes": causes}


def accuracy_table(evaluations: Evaluations) -> Table:
    """Return the accuracy before the first step and at the newest evaluation, and what it is of."""
    names = ("before", "after", "step", "change", "problems", "failed", "weights", "temperature")
    grid = table("held-out accuracy", *names, right=names)
    for task in sorted({task for task, _ in evaluations}):
        step = max(step for name, step in evaluations if name == task)
        first, then = evaluations.get((task, 0), {}), evaluations[task, step]
        before, after = (each.get("eval/accuracy") for each in (first, then))
        old, new = ("-" if value is None else f"{value:.3f}" for value in (before, after))
        change = "-" if before is None or after is None else f"{after - before:+.3f}"
        failed = then.get("eval/failed", 0.0)
        # those of a background evaluation may be of several versions
        ends = [then.get(f"eval/{end}_version", step) for end in ("oldest", "newest")]
        weights = " to ".join(f"{version:.0f}" for version in dict.fromkeys(ends))
        temperature = then.get("eval/temperature")
        how = "-" if temperature is None else f"{temperature:g}" if temperature else "0, greedy"
        problems = f"{then.get('eval/groups', 0.0) + failed:.0f}"
        grid.add_row(task, old, new, str(step), change, problems, f"{failed:.0f}", weights, how)
    return grid
