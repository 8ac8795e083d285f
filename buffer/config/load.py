"""Reads a config from TOML and `section.key=value` assignments into pydantic models.

An assignment replaces the value of the file, which replaces the default. Values are checked
strictly (a TOML string is not a number), and all mistakes are reported in one error, so that a run
need not be started five times to find five typos.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_json

from buffer.config.checks.agreement import disagreements
from buffer.config.checks.problems import describe_problems
from buffer.config.config import Config
from buffer.config.sections.run_settings import RunSection
from buffer.config.sections.task import TaskSection, inherit_held_out
from buffer.errors import ConfigError
from buffer.model.dotted_path import search_in
from buffer.redis.connection.url import mask_url

M = TypeVar("M", bound=BaseModel)

MOST_DEPTH = 64
"""Levels of tables and arrays in a config; parsers and checks recurse into them."""


def load_config(model: type[M], path: Path, overrides: Sequence[str] = ()) -> M:
    """Read a TOML file into `model`, with `overrides` like "lease.lease_ms=5000" applied on top.

    Modules that the config names are searched for in the folder of the file, too.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or does not fit; names every wrong key.

    Usage:

        config = load_config(Config, Path("configs/demo.toml"), ["run.name=mine"])
    """
    return validate_config(model, _read(path, overrides), str(path))


def inspect_config(path: Path, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """Return the config of a file that may have mistakes, and one line per mistake.

    Sections with a mistake have their defaults, and tasks with one are left out, so that everything
    else of the file can still be checked. Raises ConfigError where the file is no TOML.
    """
    tree = _read(path, overrides)
    try:
        return validate_config(Config, tree, str(path)), []
    except ConfigError as error:
        _, *problems = error.message.split("\n  ")
        valid = {"run": RunSection(name="unnamed"), **_valid_sections(tree)}
        return Config.model_construct(**valid), problems or [error.message]


def _read(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    tree = _read_toml(path)
    for override in overrides:
        _apply_override(tree, override)
    _require_plain(tree, str(path))
    search_in(path.parent)
    return tree


def parse_settings(model: type[M], assignments: Sequence[str]) -> M:
    """Return `model` made from assignments like "max_staleness=2".

    Raises ConfigError, which names every wrong assignment.
    """
    tree: dict[str, Any] = {}
    for assignment in assignments:
        _apply_override(tree, assignment)
    return validate_config(model, tree, "settings")


def validate_config(model: type[M], tree: dict[str, Any], where: str) -> M:
    """Return `model` made from `tree`, the values of a file or of assignments at `where`.

    Raises ConfigError, which names every wrong value.
    """
    _require_plain(tree, where)
    try:
        # through JSON, because only there pydantic's strict mode accepts paths and enums as text
        return model.model_validate_json(_to_json(tree), strict=True)
    except ValidationError as error:
        lines = describe_problems(model, tree, error)
        if issubclass(model, Config):
            # pydantic compares the sections only where all of them are valid
            between = (f"the file: {problem}" for problem in disagreements(_valid_sections(tree)))
            lines = list(dict.fromkeys([*lines, *between]))
        count = f"{len(lines)} problem{'s' * (len(lines) > 1)}"
        raise ConfigError("\n  ".join([f"{where}: {count}", *lines])) from None


def _valid_sections(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a file that are valid alone; of the tasks, those that are."""
    found = {"tasks": _valid_tasks(tree.get("tasks"))}
    for name, field in Config.model_fields.items():
        if name in tree and name != "tasks":
            found.update(_valid(_section(name), {name: tree[name]}))
        elif not field.is_required():
            found[name] = field.get_default()
    return found


@cache
def _section(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(Config.model_fields[name].rebuild_annotation())


_TASK = TypeAdapter(TaskSection)


def _valid_tasks(tasks: Any) -> dict[str, Any]:
    if not isinstance(tasks, dict):
        return {}
    complete = inherit_held_out(tasks)
    valid = _valid(_TASK, complete)
    # what an evaluation takes from a task with a mistake is no mistake of its own
    wrong = complete.keys() - valid.keys()
    return {name: task for name, task in valid.items() if task.eval_of not in wrong}


def _valid(adapter: TypeAdapter[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    valid: dict[str, Any] = {}
    for name, value in values.items():
        with suppress(ValidationError):
            valid[name] = adapter.validate_json(_to_json(value), strict=True)
    return valid


def _require_plain(tree: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a text with the character NUL, and for values that are nested deep."""
    left: list[tuple[Any, int]] = [(tree, 0)]
    while left:
        value, depth = left.pop()
        if depth > MOST_DEPTH:
            raise _nested(where)
        if isinstance(value, str) and "\0" in value:
            raise ConfigError(f"{where}: a text contains the character NUL", hint="remove \\u0000")
        parts = [part for pair in value.items() for part in pair] if isinstance(value, dict) else []
        parts += value if isinstance(value, list) else []
        left += [(part, depth + 1) for part in parts]


def _nested(where: str) -> ConfigError:
    return ConfigError(
        f"{where}: values are nested more than {MOST_DEPTH} deep", hint="remove them"
    )


def _to_json(value: Any) -> bytes:
    return to_json(value, inf_nan_mode="constants")


def _read_toml(path: Path) -> dict[str, Any]:
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
        return tomllib.loads(text)
    except RecursionError:
        raise _nested(str(path)) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path}: not valid TOML: {error}{_quote_line(text, str(error))}"
        ) from error


def _quote_line(text: str, message: str) -> str:
    found = re.search(r"at line (\d+)", message)
    if not found:
        return ""
    return f"\n  line {found[1]}: {mask_url(text.splitlines()[int(found[1]) - 1].strip())}"


def _apply_override(tree: dict[str, Any], override: str) -> None:
    try:
        override.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"--set {mask_url(override)!a}: not a text in UTF-8") from error
    *sections, key = key_path(override)
    node = tree
    for name in sections:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise ConfigError(
                f"--set {mask_url(override)}: `{name}` is a value, not a section, and has no keys"
            )
    node[key] = _parse_value(override.partition("=")[2].strip())


def key_path(override: str) -> list[str]:
    """Return the parts of the key of an assignment. Raises ConfigError where it is none."""
    key, equals, _ = override.partition("=")
    try:
        if not equals or "\n" in key:
            raise ValueError(key)
        node: Any = tomllib.loads(f"{key} = 0")
    except ValueError as error:  # TOMLDecodeError is one
        raise ConfigError(
            f"--set {mask_url(override)}: expected section.key=value, "
            "for example lease.lease_ms=5000"
        ) from error
    path = []
    while isinstance(node, dict):
        name, node = next(iter(node.items()))
        path.append(name)
    return path


def _parse_value(text: str) -> Any:
    """Return the TOML value of `text`, or `text` itself where it is none."""
    # a shell removes the quotes around a word, so a word without them is a string
    try:
        document = tomllib.loads(f"value = {text}")
    except RecursionError:
        raise _nested("--set") from None
    except tomllib.TOMLDecodeError:
        return text
    return document["value"] if len(document) == 1 else text
