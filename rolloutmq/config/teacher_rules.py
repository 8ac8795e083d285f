"""Rules between [tasks.<name>.teachers] and other sections of a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from buffer.imports import is_dotted_path
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
        sample = task.sample.to_params()
        changes = "temperature" if sample.temperature != 1.0 else sample.changes()
        if task.teachers and changes:
            yield (
                f"task {name} is sampled with {changes}, and teachers score the model's own "
                "distribution at temperature 1: the logprobs of the two could not be compared; "
                "leave it out"
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


def teachers_are_read(config: Config) -> Iterator[str]:
    """Yield where teachers have no effect, or the trainer has no teacher to learn from."""
    learner, trainer = config.learner, config.trainer
    if trainer.loop is not None:
        return
    section, reference = learner.distillation, learner.loss.kl_reference
    teachers = {
        (teacher, given.top_k > 0)
        for task in config.tasks.values()
        for teacher, given in task.teachers.items()
    }
    names = {teacher for teacher, _ in teachers}
    is_read_by_user = is_dotted_path(trainer.advantages) or is_dotted_path(learner.loss.objective)
    if (unread := names - {reference}) and section is None and not is_read_by_user:
        yield (
            f"nothing reads the logprobs of teacher {min(unread)}: add [learner.distillation], "
            f'or for a frozen reference [learner.loss] kl_coef and kl_reference = "{min(unread)}"'
        )
    if reference is not None and reference not in names:
        yield f"[learner.loss] kl_reference = {reference} is no teacher of a task"
    has_top_loss = section is not None and section.top_k_loss != "none"
    has_tops = any(has_tops for teacher, has_tops in teachers if teacher != reference)
    if has_tops and not has_top_loss:
        yield (
            "a teacher has top_k, and nothing reads these tokens: leave it out, or set "
            "[learner.distillation] top_k_loss"
        )
    if has_top_loss and not has_tops:
        yield "[learner.distillation] top_k_loss needs a teacher with top_k, for example 32"


def teachers_replace_rewards(config: Config) -> Iterator[str]:
    """Yield what would teach nothing without rewards."""
    for name, task in config.tasks.items():
        if "none" in task.judges and task.eval_of is None and not task.teachers:
            yield f"judge = none of task {name}: without a teacher, it teaches nothing"
    if config.trainer.loop is not None or config.trainer.advantages != "none":
        return
    objective = config.learner.loss.objective
    if config.learner.distillation is None and not is_dotted_path(objective):
        yield (
            "[trainer] advantages = none trains nothing without [learner.distillation], or an "
            "objective of yours"
        )
    for name, task in config.tasks.items():
        if task.eval_of is None and config.strategy_of(name).is_valid_sample_fn == "not_all_equal":
            yield (
                f"is_valid_sample_fn = not_all_equal of task {name} replaces groups by their "
                "rewards, which advantages = none does not read: leave it out"
            )
