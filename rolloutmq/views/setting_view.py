"""What an operator changes while a run continues: its settings, and whether it is paused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

from buffer.config.section import meanings
from buffer.control.control import ControlState, Mode
from buffer.limits import RunLimits, TaskLimits, TaskSettings
from buffer.run.run import Run
from buffer.run.settings import (
    THRESHOLDS,
    LiveSettings,
    LiveTaskSettings,
    SettingsRecord,
    publications,
)
from rolloutmq.views.run_view import read_run_view


@dataclass(frozen=True, slots=True)
class LiveSetting:
    """One setting; `inherited`: the task has no value of its own, and follows the run's.

    `changed`: what it was in the config, since when it has this value, and who set it.
    """

    name: str
    value: Any
    doc: str
    range: str
    inherited: bool = False
    changed: Mapping[str, Any] | None = None

    @property
    def topic(self) -> str:
        return TOPICS.get(self.name.rpartition(".")[2], "Other")


TOPICS = {
    **dict.fromkeys(("steps", "weight"), "What is trained"),
    **dict.fromkeys(("max_staleness", "max_ahead"), "Age of the data"),
    **dict.fromkeys(("concurrency", "max_in_flight", "over_sample_threshold"), "How much runs"),
    **dict.fromkeys(
        ("on_straggler", "tail_batch_trigger_size", "tail_batch_max_tries"), "Long responses"
    ),
    **dict.fromkeys(
        ("max_tries", "max_consecutive_failures", "max_consecutive_filtered", "pause_timeout_s"),
        "Failures",
    ),
    **dict.fromkeys(("low_bytes", "high_bytes"), "Memory"),
}
"""Where a person looks for a setting, by its last name."""


def live_settings(limits: RunLimits, record: SettingsRecord) -> Iterator[LiveSetting]:
    """Yield the settings of the run, then those of each training task."""
    changed = {each["name"]: each for each in overrides(record)}
    fields = {name: field for name, field in LiveSettings.model_fields.items() if name != "tasks"}
    docs = meanings(LiveSettings)
    for name in sorted(fields, key=TaskSettings.model_fields.__contains__):
        field = fields[name]
        value = _value(limits, name, limits.sync_weights_interval)
        yield LiveSetting(name, value, docs[name], _range(field), changed=changed.get(name))
    docs = meanings(LiveTaskSettings)
    for task in (name for name in limits.training_tasks if not limits.tasks[name].is_gone):
        own = limits.tasks[task]
        for name, field in LiveTaskSettings.model_fields.items():
            if name == "weight":
                value = limits.newest_weights()[task]
                inherited = False
            elif name in THRESHOLDS:
                inherited = getattr(own, THRESHOLDS[name]) is None
                value = _value(limits if inherited else own, name, limits.sync_weights_interval)
            else:
                value = limits.setting(task, name)
                inherited = name in TaskSettings.model_fields and name not in own.model_fields_set
            full = f"tasks.{task}.{name}"
            yield LiveSetting(full, value, docs[name], _range(field), inherited, changed.get(full))


def _value(limits: RunLimits | TaskLimits, name: str, interval: int) -> Any:
    if name in THRESHOLDS:
        return publications(limits, interval).get(name)
    return getattr(limits, name)


def _range(field: FieldInfo) -> str:
    bounds = [
        f"{word} {limit:,}"
        for each in field.metadata
        for word, limit in (
            ("from", getattr(each, "ge", None) if isinstance(each, Ge) else None),
            ("above", getattr(each, "gt", None) if isinstance(each, Gt) else None),
            ("to", getattr(each, "le", None) if isinstance(each, Le) else None),
        )
        if limit is not None
    ]
    return " ".join(bounds)


def override_lines(record: SettingsRecord) -> Iterator[str]:
    """Yield a line for people on every setting that differs from the config."""
    for each in overrides(record):
        name = each["name"]
        config = value_text(name, each["config"])
        yield f"{name} = {each['value']} since {time_text(each['set_ms'])} (config: {config})"


def overrides(record: SettingsRecord) -> Iterator[Mapping[str, Any]]:
    for name, override in sorted(record.overrides.items()):
        yield {"name": name, "config": record.configured.get(name), **override.model_dump()}


def value_text(name: str, value: object) -> str:
    if value is None:
        return "the run's" if name.startswith("tasks.") else "not set"
    return str(value)


def time_text(set_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(set_ms / 1000))


Report = Callable[[str], object]


def set_operator_mode(run: Run, mode: Mode, report: Report) -> tuple[ControlState, bool]:
    """Set and report the operator's mode; return the control state, and whether it is new."""
    before = run.control.state()
    is_orphan = mode is Mode.RUN and read_run_view(run).is_orphaned
    field: Any = run.store.ask("mode", "HGET", run.keys.control, "operator_mode")
    is_set = (field.decode() if field else Mode.RUN) == mode
    changed = not is_set or is_orphan
    state = run.control.set_mode("operator", mode, orphan=is_orphan) if changed else before
    if is_orphan:
        report(
            f"run {run.name}: its trainer paused it ({before.mode}) and is gone; that "
            "pause is ended, too"
        )
    said = "resumed" if changed else "it was not paused by an operator"
    by_trainer = (
        "" if state.mode is Mode.RUN else f"; the trainer itself has paused it ({state.mode})"
    )
    if mode is not Mode.RUN:
        said = f"{'paused' if changed else 'was already paused'} by the operator ({mode})"
        by_trainer = ""
    report(f"run {run.name}: {said}, control epoch {state.epoch}{by_trainer}")
    return state, changed
