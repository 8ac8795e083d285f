"""Check the files of a run's model, and that a response can end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from buffer.errors import HubError
from consumer.grpo.models.model_folder import check_model_folder
from producer_workers.config.task import attached_kinds
from producer_workers.engines.model_folder import eos_ids
from producer_workers.hub import model_repository
from rolloutmq.check.finding import Finding, Unit, absent, findings_of
from rolloutmq.check.memory import read_shape
from rolloutmq.config.config import Config

ok, warning, mistake = findings_of("model")


def units(config: Config, *, quick: bool) -> list[Unit]:
    judges = [
        Unit("model", what, partial(_check_judge, check))
        for kind in attached_kinds(config.tasks)
        for what, check in kind.checks(config).items()
    ]
    try:
        folder = config.model_folder
    except HubError:
        found = [absent("model", model_repository(config.policy))]
        own = Unit("model", str(config.policy.model), partial(iter, found))
    else:
        own = Unit("model", f"{folder}, its files", partial(_check_files, folder))
        if config.policy.model is None and not folder.is_dir():
            build = partial(_check_warm_start, config)
            own = Unit("model", "the model that the run builds", build)
    return [own, *judges]


def _check_judge(check: Callable[[], str]) -> Iterator[Finding]:
    try:
        yield ok(check())
    except HubError as error:
        yield warning(f"not checked: {error.message}", error.hint)


def _check_warm_start(config: Config) -> Iterator[Finding]:
    path = config.warm_start.path
    training = [config.tasks[name] for name in config.training_tasks]
    has_problems = path or any(getattr(task.dataset, "warm_start_size", 0) for task in training)
    if not config.warm_start.max_steps:
        return
    if path and not path.is_file():
        yield mistake(f"{path}: there is no such file", "correct [warm_start] path")
    if not has_problems:
        yield mistake(
            "there is no [policy] model, and no task has problems on which one could be trained",
            "set [policy] model, or [warm_start] path, or warm_start_size of a reasoning_gym data "
            "set, or [warm_start] max_steps = 0 for random weights",
        )


def _check_files(folder: Path) -> Iterator[Finding]:
    check_model_folder(folder)
    shape = read_shape(folder)
    context = f", reads {shape.positions:,} tokens" if shape.positions else ""
    millions = shape.parameters / 1e6
    size = f"{millions:.1f} million" if millions < 100 else f"{millions / 1000:.2f} billion"
    yield ok(f"{folder}: {shape.name}, {size} parameters{context}")
    ends = eos_ids(folder)
    if not ends:
        yield warning(
            f"{folder} names no token that ends a response: every one runs to max_tokens",
            "set eos_token_id in its generation_config.json",
        )
    elif max(ends) >= shape.vocabulary:
        yield mistake(
            f"{folder}: eos_token_id {max(ends)} is beyond its {shape.vocabulary:,} token ids: "
            "no response can end",
            "correct eos_token_id in its generation_config.json, or vocab_size in its config.json",
        )
