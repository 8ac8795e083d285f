"""Findings about learning (`consumer/learning/findings.py`) as symptoms of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from buffer.ids import GID
from consumer.handle.sample_log import SampleLog
from consumer.handle.step_log import TrainedStep, read_evaluations
from consumer.learning.findings import findings
from rolloutmq.views.explain.symptom import Symptom


def learning(folder: Path | None, steps: Sequence[TrainedStep]) -> list[Symptom]:
    """Return what the trained steps of a run say about its learning.

    `folder`: the run's, for evaluations, and for groups that can be shown whose payloads are freed.
    """
    found = findings(steps, read_evaluations(folder) if folder else {})
    symptoms = []
    for each in found:
        look = each.look
        if folder and any(GID.fullmatch(name) for name in look):
            samples = SampleLog(folder).read(steps[-1].step)
            logged = [sample["gid"] for sample in samples if sample["task"] == each.task]
            others = [name for name in look if not GID.fullmatch(name)]
            look = (*logged, *others) if logged else look
        what = f"{each.what}, since step {each.since}"
        fix = f'{each.fix}; [trainer] silence = ["{each.name}"] hides it'
        symptoms.append(Symptom(each.level, each.name, what, fix, look=look))
    return symptoms
