"""Read the tasks of environments: of verifiers, Harbor, OpenEnv and NeMo Gym."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from buffer.errors import ConfigError, DatasetError, describe
from buffer.imports import import_package, search_in
from buffer.readable import format_size
from producer_workers.config.dataset import LARGEST_ROW
from producer_workers.datasets.dataset import Dataset, Problem
from producer_workers.datasets.files import JsonlDataset
from producer_workers.datasets.open import with_images
from producer_workers.datasets.records import RecordsDataset, problem_of
from rolloutmq.extensions.environments.datasets import (
    HarborSection,
    NemoGymSection,
    OpenEnvSection,
    VerifiersSection,
)

REQUIREMENT = "verifiers>=0.4,<0.5"


def environment_config(environment: str, options: Mapping[str, Any]) -> Any:
    """Return the EnvConfig of "[environment+]taskset"; `options` are keys of its table [env].

    Raises ConfigError.
    """
    vf = import_package("verifiers.v1", REQUIREMENT)
    search_in(Path.cwd())
    played_by, _, taskset = environment.rpartition("+")
    try:
        given = {**options, "taskset": {**options.get("taskset", {}), "id": taskset}}
        return vf.resolve_env_config(given | ({"id": played_by} if played_by else {}))
    except Exception as error:  # of the environment's own module, too
        raise _refused(environment, error) from error


def open_verifiers(section: VerifiersSection, *_: Any) -> Dataset:
    """Read the tasks of the environment's taskset. Raises ConfigError."""
    config = environment_config(section.environment, section.options)
    vf = import_package("verifiers.v1", REQUIREMENT)
    try:
        taskset = vf.load_taskset(config.taskset)
        if not taskset.bounded and section.size is None:
            raise ConfigError(
                f"the taskset of {section.environment!r} has no end", hint="set size of dataset"
            )
        tasks = list(taskset if section.size is None else taskset.take(section.size))
    except ConfigError:
        raise
    except Exception as error:  # of the taskset's own code
        raise _refused(section.environment, error) from error
    records = [_record_of(task.data, section.environment) for task in tasks]
    return RecordsDataset(records, section.environment, with_images(section))


def _record_of(data: Any, environment: str) -> dict[str, Any]:
    """Return a task as a record. Its agent reads `extra`; others read the rest of it."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    asked = data.prompt_text or data.description or data.name or ""
    extra = data.model_dump(mode="json")
    return {
        "messages": [*system, {"role": "user", "content": asked}],
        "ground_truth": extra.get("answer"),
        "data_source": environment,
        "extra": extra,
    }


def _refused(environment: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"verifiers cannot load the environment {environment!r}: {describe(error)}",
        hint="install its package, and see dataset.environment and dataset.options",
    )


_CONFIG = "task.toml"


def open_tasks(section: HarborSection, *_: Any) -> Dataset:
    """Read all tasks of a folder, in the order of their names. Raises DatasetError.

    Each is a folder with task.toml and instruction.md, or steps/<name>/instruction.md. Harbor
    itself checks a task again when it begins a trial.
    """
    folder = section.path.absolute()
    tasks = sorted(path.parent for path in folder.glob(f"[!.]*/{_CONFIG}"))
    if not tasks:
        hint = f"set path to a folder with one folder for each task, each with a {_CONFIG}"
        raise DatasetError(f"{folder}: there are no tasks of Harbor", hint=hint)
    for path in folder.glob("[!.]*/instruction.md"):
        if path.parent not in tasks:
            raise _fault(path.parent / _CONFIG, "is missing")
    records = [_record(task, folder.name) for task in tasks]
    return RecordsDataset(records, str(folder), problem_of)


def _record(task: Path, source: str) -> dict[str, Any]:
    settings = task / _CONFIG
    try:
        config = tomllib.loads(_content(settings))
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is one
        raise _fault(settings, str(error)) from error
    file = task / "instruction.md"
    if "steps" in config:
        try:
            file = task / "steps" / str(config["steps"][0]["name"]) / "instruction.md"
        except (LookupError, TypeError) as error:
            raise _fault(settings, "steps is no list of tables with a name") from error
    instruction = _content(file)
    if not instruction.strip():
        raise _fault(file, "is empty")
    return {"question": instruction, "data_source": source, "task_path": str(task)}


def _content(file: Path) -> str:
    try:
        if file.stat().st_size > LARGEST_ROW:
            raise _fault(file, f"has more than {format_size(LARGEST_ROW)}")
        return file.read_text("utf-8")
    except FileNotFoundError as error:
        raise _fault(file, "is missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise _fault(file, str(error)) from error


def _fault(file: Path, what: str) -> DatasetError:
    return DatasetError(f"{file}: {what}", hint="a task of Harbor has task.toml and instruction.md")


NOTHING_ASKED = {"role": "user", "content": ""}


def open_resets(section: OpenEnvSection, *_: Any) -> Dataset:
    """Return the episodes by number; the first observation is their question."""

    def problem(number: int) -> Problem:
        reset = {**section.reset, section.numbered_by: number}
        return Problem(messages=[NOTHING_ASKED], data_source="openenv", extra={"reset": reset})

    numbers = range(section.first, section.first + section.size)
    return RecordsDataset(numbers, section.url, problem)


def open_rows(section: NemoGymSection, *_: Any) -> Dataset:
    """Read JSON lines with `responses_create_params` and what their verifier needs.

    The agent gets the whole row, in the problem's `extra["row"]`; the messages are for others.
    """
    return JsonlDataset(section.path, _problem)


def _problem(row: Any) -> Problem:
    """Return a row as a problem. Raises ValueError."""
    asked = row.get("responses_create_params") if isinstance(row, Mapping) else None
    if not isinstance(asked, Mapping) or "input" not in asked:
        raise ValueError("there are no responses_create_params with an input")
    return problem_of({"messages": [*_messages(asked)], "extra": {"row": row}})


def _messages(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if asked.get("instructions"):
        yield {"role": "system", "content": asked["instructions"]}
    given = asked["input"]
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        if "role" in item and "content" in item:
            content = item["content"]
            if not isinstance(content, str):
                content = "".join(part.get("text", "") for part in content)
            yield {"role": item["role"], "content": content}
