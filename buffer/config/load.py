"""Reads a config from TOML and `section.key=value` assignments into pydantic models.

An assignment replaces the value of the file, which replaces the default. Values are checked
strictly (a TOML string is not a number), and all mistakes are reported in one error, so that a run
need not be started five times to find five typos.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from buffer.config.problems import describe_problems
from buffer.errors import ConfigError
from buffer.model.dotted_path import search_in
from buffer.store.url import mask_url

M = TypeVar("M", bound=BaseModel)


def load_config(model: type[M], path: Path, overrides: Sequence[str] = ()) -> M:
    """Read a TOML file into `model`, with `overrides` like "lease.lease_ms=5000" applied on top.

    Modules that the config names are searched for in the folder of the file, too.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or does not fit; names every wrong key.

    Usage:

        config = load_config(Config, Path("configs/demo.toml"), ["run.name=mine"])
    """
    tree = _read_toml(path)
    for override in overrides:
        _apply_override(tree, override)
    search_in(path.parent)
    return _validated(model, tree, str(path))


def parse_settings(model: type[M], assignments: Sequence[str]) -> M:
    """Return `model` made from assignments like "max_staleness=2".

    Raises ConfigError, which names every wrong assignment.
    """
    tree: dict[str, Any] = {}
    for assignment in assignments:
        _apply_override(tree, assignment)
    return _validated(model, tree, "settings")


def _validated(model: type[M], tree: dict[str, Any], where: str) -> M:
    try:
        # through JSON, because only there pydantic's strict mode accepts paths and enums as text
        return model.model_validate_json(to_json(tree, inf_nan_mode="constants"), strict=True)
    except ValidationError as error:
        lines = describe_problems(model, tree, error)
        count = f"{len(lines)} problem{'s' * (len(lines) > 1)}"
        raise ConfigError("\n  ".join([f"{where}: {count}", *lines])) from None


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
    *sections, key = _key_path(override)
    node = tree
    for name in sections:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise ConfigError(
                f"--set {mask_url(override)}: `{name}` is a value, not a section, and has no keys"
            )
    node[key] = _parse_value(override.partition("=")[2].strip())


def _key_path(override: str) -> list[str]:
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
    except tomllib.TOMLDecodeError:
        return text
    return document["value"] if len(document) == 1 else text
