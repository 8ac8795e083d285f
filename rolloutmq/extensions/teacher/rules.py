"""Rules between [tasks.<name>.teachers] and other sections of a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from buffer.imports import is_dotted_path
from rolloutmq.config.cross_section_rules import context_problems
from rolloutmq.extensions.teacher.settings import TeacherSection, teachers_of

if TYPE_CHECKING:
    from rolloutmq.config.config import Config


def violations(config: Config) -> Iterator[str]:
    """Yield what teachers could not do, or nothing would read."""
    yield from _tasks_can_be_scored(config)
    yield from _teachers_agree(config)
    yield from _columns_are_read(config)


def _tasks_can_be_scored(config: Config) -> Iterator[str]:
    for name, task in config.tasks.items():
        if not (teachers := teachers_of(config, name)):
            continue
        if task.eval_of is not None:
            yield f"task {name} is an evaluation, which teachers do not score: leave teachers out"
        if task.images:
            yield f"task {name} shows images, which teachers do not see: leave teachers out"
        sample = task.sample.to_params()
        if changes := "temperature" if sample.temperature != 1.0 else sample.changes():
            yield (
                f"task {name} is sampled with {changes}, and teachers score the model's own "
                "distribution at temperature 1: the logprobs of the two could not be compared; "
                "leave it out"
            )
        for teacher, section in teachers.items():
            limit = getattr(section.engine, "max_model_len", None)
            for problem in context_problems(config, limit, [name]):
                yield f"teacher {teacher}: {problem}"


def _teachers_agree(config: Config) -> Iterator[str]:
    known: dict[str, tuple[str, TeacherSection]] = {}
    for name in config.tasks:
        for teacher, section in teachers_of(config, name).items():
            where, first = known.setdefault(teacher, (name, section))
            same = ("model", "revision", "engine")
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


def _columns_are_read(config: Config) -> Iterator[str]:
    learner, trainer = config.learner, config.trainer
    if trainer.loop is not None:
        return
    section, reference = learner.distillation, learner.loss.kl_reference
    teachers = {
        (teacher, given.top_k > 0)
        for name in config.tasks
        for teacher, given in teachers_of(config, name).items()
    }
    names = {teacher for teacher, _ in teachers}
    is_read_by_user = is_dotted_path(trainer.advantages) or is_dotted_path(learner.loss.objective)
    if (unread := names - {reference}) and section is None and not is_read_by_user:
        yield (
            f"nothing reads the logprobs of teacher {min(unread)}: add [learner.distillation], "
            f'or for a frozen reference [learner.loss] kl_coef and kl_reference = "{min(unread)}"'
        )
    has_top_loss = section is not None and section.top_k_loss != "none"
    has_tops = any(has_tops for teacher, has_tops in teachers if teacher != reference)
    if has_tops and not has_top_loss:
        yield (
            "a teacher has top_k, and nothing reads these tokens: leave it out, or set "
            "[learner.distillation] top_k_loss"
        )
    if has_top_loss and not has_tops:
        yield "[learner.distillation] top_k_loss needs a teacher with top_k, for example 32"
