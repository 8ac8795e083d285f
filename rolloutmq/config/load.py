"""Reads a config from TOML and `section.key=value` assignments.

An assignment replaces the value of the file, which replaces the default. All mistakes are reported
in one error, so that a run need not be started five times to find five typos.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from buffer.config.assignments import assign, nested, require_plain, to_strict_json, validate
from buffer.config.attached import attached_types
from buffer.config.run_settings import RunSection
from buffer.errors import ConfigError
from buffer.imports import search_in
from buffer.redis.url import mask_url
from producer_workers.config.task import TaskSection, inherit_held_out
from rolloutmq.config.config import Config
from rolloutmq.config.cross_section_rules import Sections, rule_violations


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, with `overrides` like "lease.lease_ms=5000" applied on top.

    Modules that the config names are searched for in the folder of the file, too. Raises
    ConfigError, which names every wrong key, or says why the file cannot be read.
    """
    return validate_config(read_tree(path, overrides), str(path))


def inspect_config(path: Path, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """Return the config of a file that may have mistakes, and one line per mistake.

    Sections with a mistake have their defaults, and tasks with one are left out, so that everything
    else of the file can still be checked. Raises ConfigError where the file is no TOML.
    """
    tree = read_tree(path, overrides)
    try:
        return validate_config(tree, str(path)), []
    except ConfigError as error:
        _, *problems = error.message.split("\n  ")
        valid = {"run": RunSection(name="unnamed"), **_valid_sections(tree)}
        valid |= valid.pop("attached")
        return Config.model_construct(**valid), problems or [error.message]


def validate_config(tree: Mapping[str, Any], where: str) -> Config:
    """Return the config of `tree`, the values at `where`. Raises ConfigError."""

    def between_sections() -> list[str]:
        # pydantic compares the sections only where all of them are valid
        return [
            f"the file: {problem}" for problem in rule_violations(Sections(_valid_sections(tree)))
        ]

    return validate(Config, tree, where, between_sections)


def read_tree(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the tables of a TOML file with `overrides`, not yet checked. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read the config: {error.strerror}",
            hint="give the path of a TOML file; configs/ has examples",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 (see byte {error.start})") from error
    try:
        tree = tomllib.loads(text)
    except RecursionError:
        raise nested(str(path)) from None
    except ValueError as error:  # TOMLDecodeError is one
        what = f"{path}: not valid TOML: {error}"
        if found := re.search(r"at line (\d+)", str(error)):
            what += f"\n  line {found[1]}: {mask_url(text.splitlines()[int(found[1]) - 1].strip())}"
        raise ConfigError(what) from error
    for override in overrides:
        assign(tree, override)
    require_plain(tree, str(path))
    search_in(path.parent)
    return tree


def _valid_sections(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a file that are valid alone; of the tasks, those that are."""
    found: dict[str, Any] = {"tasks": {}, "attached": {}}
    if isinstance(tasks := tree.get("tasks"), dict):
        complete = inherit_held_out(tasks)
        valid = _valid(TypeAdapter(TaskSection), complete)
        # what an evaluation takes from a task with a mistake is no mistake of its own
        wrong = complete.keys() - valid.keys()
        found["tasks"] = {name: task for name, task in valid.items() if task.eval_of not in wrong}
    for name, adapter in attached_types(Config.attaches).items():
        if name in tree:
            found["attached"] |= _valid(adapter, {name: tree[name]})
    for name, field in Config.model_fields.items():
        if name in tree and name != "tasks":
            found.update(_valid(_section(name), {name: tree[name]}))
        elif not field.is_required():
            found[name] = field.get_default()
    return found


@cache
def _section(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(Config.model_fields[name].rebuild_annotation())


def _valid(adapter: TypeAdapter[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    valid: dict[str, Any] = {}
    for name, value in values.items():
        with suppress(ValidationError):
            valid[name] = adapter.validate_json(to_strict_json(value), strict=True)
    return valid
