"""Rules between [tasks.<name>.teachers] and other sections of a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from producer_workers.config.teacher import TeacherSection

if TYPE_CHECKING:
    from rolloutmq.config.config import Config


def teachers_can_score(config: Config) -> Iterator[str]:
    """Yield why a teacher could not score the rollouts of a task."""
    known: dict[str, tuple[str, TeacherSection]] = {}
    same = ("model", "revision", "engine", "workers")
    for name, task in config.tasks.items():
        if task.teachers and task.eval_of is not None:
            yield f"task {name} is an evaluation, which teachers do not score: leave teachers out"
        if task.teachers and task.images:
            yield f"task {name} shows images, which teachers do not see: leave teachers out"
        temperature = task.sample.temperature
        if task.teachers and temperature != 1.0:
            yield (
                f"task {name} is sampled with temperature {temperature:g}, and teachers score at "
                "temperature 1: the logprobs of the two could not be compared; set "
                "sample.temperature = 1.0"
            )
        for teacher, section in task.teachers.items():
            where, first = known.setdefault(teacher, (name, section))
            if other := [key for key in same if getattr(first, key) != getattr(section, key)]:
                yield (
                    f"teacher {teacher} of tasks {where} and {name} has different values of "
                    f"{', '.join(other)}: give another teacher another name"
                )
            if section.engine is None and config.engine.kind == "http":
                yield (
                    f"teacher {teacher} of task {name} needs an engine: the server of [engine] has "
                    'the model that is trained; set engine = { kind = "http", url = … }'
                )
