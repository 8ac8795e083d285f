"""Config files: TOML into frozen pydantic sections, and every mistake in one readable error.

Defaults < file < `--set section.key=value`. Values are checked strictly (a TOML string is not a
number), an unknown key is an error with the closest known one, and all mistakes of a file are
reported at once: nobody should have to start a run five times to find five typos.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_json

from buffer.config.errors import describe_problems
from buffer.errors import ConfigError
from buffer.model.dotted_path import search_in
from buffer.store.url import mask_url

M = TypeVar("M", bound=BaseModel)


class Section(BaseModel):
    """Base of every part of a config: frozen, unknown keys refused, defaults checked like given
    values.

    The string under a field is its description, in `--help`, in the docs and in the JSON schema.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


def load_config(model: type[M], path: Path, overrides: Sequence[str] = ()) -> M:
    """Read a TOML file into `model`, with `overrides` like `lease.lease_ms=5000` applied on top.

    Modules that it names are found beside it.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or does not fit; names every wrong key.
    """
    tree = _read_toml(path)
    for override in overrides:
        _apply_override(tree, override)
    search_in(path.parent)
    return _validated(model, tree, str(path))


def _validated(model: type[M], tree: dict[str, Any], where: str) -> M:
    try:
        # Through JSON, because pydantic's strict mode takes paths and enums as text only there.
        return model.model_validate_json(to_json(tree, inf_nan_mode="constants"), strict=True)
    except ValidationError as error:
        lines = describe_problems(model, tree, error)
        count = f"{len(lines)} problem{'s' * (len(lines) > 1)}"
        raise ConfigError("\n  ".join([f"{where}: {count}", *lines])) from None


def parse_settings(model: type[M], assignments: Sequence[str]) -> M:
    """`model` from assignments like `max_staleness=2` alone. Raises ConfigError with every wrong
    one.
    """
    tree: dict[str, Any] = {}
    for assignment in assignments:
        _apply_override(tree, assignment)
    return _validated(model, tree, "settings")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read the config: {error.strerror}", hint="see configs/ for examples"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 (byte {error.start})") from error
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
            raise ConfigError(f"--set {mask_url(override)}: `{name}` is a value, not a section")
    node[key] = _parse_value(override.partition("=")[2].strip())


def _key_path(override: str) -> list[str]:
    key, equals, _ = override.partition("=")
    try:
        if not equals or "\n" in key:
            raise ValueError(key)
        node: Any = tomllib.loads(f"{key} = 0")
    except ValueError as error:  # TOMLDecodeError is one
        raise ConfigError(
            f"--set {mask_url(override)}: expected section.key=value, for example lease.lease_ms=5000"
        ) from error
    path = []
    while isinstance(node, dict):
        name, node = next(iter(node.items()))
        path.append(name)
    return path


def _parse_value(text: str) -> Any:
    """A TOML value, or the text itself: quotes around a word on a command line are easily lost."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return document["value"] if len(document) == 1 else text
