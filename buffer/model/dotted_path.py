"""Loads what a user names in a configuration as "module:name"."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from buffer.errors import ConfigError
from buffer.model.extras import missing_extra


def is_dotted_path(text: str) -> bool:
    """Whether it reads package.module:name."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), name])


def load_object(spec: str, *, kind: str, built_in: Iterable[str] = ()) -> Any:
    """The object at `spec`, "package.module:name". Raises ConfigError with what is known instead.

    The current folder is searched last, so that a file there is found and hides nothing.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        known = ", ".join(sorted(built_in))
        raise ConfigError(
            f"there is no {kind} {spec!r}", hint=f'known: {known}; or give "module:name"'
        )
    search_in(Path.cwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        if missing := missing_extra(error):
            raise missing from error
        message = f"{kind} {spec!r}: module {module_name!r} cannot be imported: {error}"
        raise ConfigError(
            message, hint="put its folder on PYTHONPATH, or the file beside the config"
        ) from error
    if not hasattr(module, name):
        raise ConfigError(
            f"{kind} {spec!r}: module {module_name!r} has no {name!r}",
            hint=f"it is {module.__file__}",
        )
    return getattr(module, name)


def search_in(folder: Path) -> None:
    """Look for modules in this folder, too, after all others."""
    name = str(folder.resolve())
    if name not in sys.path:
        sys.path.append(name)
