"""Find the config that a command is given: a file, or one that comes with the package."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from buffer.errors import ConfigError
from buffer.readable import did_you_mean
from rolloutmq.config.config import Config
from rolloutmq.config.load import load_config

_PACKAGE = Path(__file__).parent
# in an installed package, and in a checkout
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")


def presets_folder() -> Path:
    return next(folder for folder in _FOLDERS if folder.is_dir())


def preset_names() -> list[str]:
    return sorted(path.stem for path in presets_folder().glob("*.toml"))


def find_config(path: Path) -> Path:
    """Return the file at `path`, else the preset of this name. Raises ConfigError."""
    if path.exists():
        return path
    name = path.name.removesuffix(".toml")
    names = preset_names()
    if name in names and str(path.parent) in (".", "configs"):
        return presets_folder() / f"{name}.toml"
    raise ConfigError(
        f"{path}: there is no such file, and no preset of that name",
        hint=did_you_mean(name, names)
        + f"give the path of a TOML file, or one of {', '.join(names)}",
    )


def config_of_run(command: Sequence[str]) -> Config:
    """Return the config of `rolloutmq run` with these arguments. Raises ConfigError."""
    path, *flags = command
    overrides = [value for flag, value in pairwise(flags) if flag == "--set"]
    return load_config(find_config(Path(path)), overrides)


def open_config(path: Path, overrides: Sequence[str] | None = None) -> Config:
    """Read the config of a run, and apply its [run] umask to this process. Raises ConfigError."""
    config = load_config(find_config(path), overrides or [])
    os.umask(config.run.mask)
    return config
