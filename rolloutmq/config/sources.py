"""The repositories of the Hub that a config names: each fixed to a commit, its files here.

The first start of a run decides the commits that its config leaves open, and notes them in the
run's folder. The run's record of what it draws from has them for all other machines, and refuses
any other commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson

from buffer.errors import ConfigError
from buffer.redis.whole_file import replace_file
from buffer.run.origin import Origin
from producer_workers.config.task import TaskSection
from producer_workers.hub import Repository, model_repository
from rolloutmq.config.config import Config

NOTE = "hub.json"
"""File in the run's folder: the commit of each repository whose revision the config leaves open."""


def fetch(
    config: Config,
    origin: Origin | None = None,
    *,
    with_data: bool = True,
    with_judges: bool = True,
) -> Config:
    """Return `config` with commits as its revisions, and download what is not in the cache.

    `origin`: the record of the run, where it is known; else the folder's note decides. `with_data`:
    also download data sets, which workers do not read. `with_judges`: also models of judges, which
    producers do not read. Raises HubError.
    """
    wanted = set(_repositories(config))
    judges = {each for task in config.tasks.values() for each in _of_judges(task)}
    unread = set() if with_judges else judges - {model_repository(config.policy)}
    note = config.run.folder / NOTE
    noted = _read(note) if wanted else {}
    known = noted | (origin.commits if origin else {})
    pinned: dict[Repository, Repository] = {}
    for each in sorted(wanted, key=lambda each: (each.name, each.revision or "")):
        pinned[each] = each._replace(revision=each.revision or known.get(each.name))
        if each not in unread and (each.kind == "model" or with_data):
            commit = pinned[each].download().name
            pinned[each] = each._replace(revision=commit)
    opened = {each.name: pin.revision for each, pin in pinned.items() if each.revision is None}
    if origin is None and opened.keys() - noted.keys():
        note.parent.mkdir(parents=True, exist_ok=True)
        option = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS
        replace_file(note, orjson.dumps(opened | noted, option=option))
    policy, tasks = config.policy, {}
    if repository := model_repository(policy):
        policy = policy.model_copy(update={"revision": pinned[repository].revision})
    for name, task in config.tasks.items():
        update = {key: judge.pinned(pinned) for key, judge in task.attached.items()}
        if repository := task.dataset.repository:
            revision = pinned[repository].revision
            update["dataset"] = task.dataset.model_copy(update={"revision": revision})
        tasks[name] = task.model_copy(update=update)
    return config.model_copy(update={"policy": policy, "tasks": tasks}) if wanted else config


def names_any(config: Config) -> bool:
    """Return whether `config` names a repository, whose files may have to be downloaded."""
    return any(True for _ in _repositories(config))


def _repositories(config: Config) -> Iterator[Repository]:
    named = [model_repository(config.policy)]
    for task in config.tasks.values():
        named += [task.dataset.repository]
        named += _of_judges(task)
    yield from (each for each in named if each)


def _of_judges(task: TaskSection) -> Iterator[Repository]:
    for judge in task.attached.values():
        yield from judge.repositories


def _read(note: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = orjson.loads(note.read_bytes())
    except FileNotFoundError:
        return {}
    except orjson.JSONDecodeError as error:
        raise ConfigError(
            f"{note} is not JSON",
            hint="remove it, and set the revisions that the run records (the next start names "
            "them)",
        ) from error
    return found
