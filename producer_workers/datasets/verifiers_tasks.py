"""Read the tasks of an environment of `verifiers` 0.4, by the environment's name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from buffer.errors import ConfigError, describe
from buffer.imports import import_package, search_in
from producer_workers.config.dataset import VerifiersSection
from producer_workers.datasets.dataset import Dataset
from producer_workers.datasets.open import with_images
from producer_workers.datasets.records import RecordsDataset

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
    records = [_record(task.data, section.environment) for task in tasks]
    return RecordsDataset(records, section.environment, with_images(section))


def _record(data: Any, environment: str) -> dict[str, Any]:
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
