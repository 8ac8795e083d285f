"""`rolloutmq set max_staleness=2`: change settings of a run while it continues, or list them."""

from __future__ import annotations

import getpass
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from buffer.control.kept_settings import KeptSettings
from buffer.control.live_settings import LiveSettings, LiveTaskSettings
from buffer.control.setting_change import parse_change
from buffer.errors import ConfigError
from buffer.model.settings_record import SettingsRecord
from rolloutmq.console import console, plain
from rolloutmq.options import AsJson, RedisUrl, RunDir, RunName, Target, open_target
from rolloutmq.output import emit, table

EPILOG = """
\b
Examples: rolloutmq set max_staleness=2 tasks.math.weight=3
          rolloutmq set max_staleness=config    as the config says
          rolloutmq set --list                  what differs from the config
"""


def register(app: typer.Typer) -> None:
    app.command(name="set", epilog=EPILOG)(set_)


def _describe() -> str:
    own = [name for name in LiveSettings.model_fields if name != "tasks"]
    return ", ".join([*own, *(f"tasks.<name>.{name}" for name in LiveTaskSettings.model_fields)])


def set_(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE...", help=f"Settings to change: {_describe()}."),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List what differs from the config, and since when.")
    ] = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Change settings of a run while it continues.

    Every process applies them at its next heartbeat, round or batch. They belong to the run, and
    survive the end of every process and of the server. A setting holds until it is set again, or
    until the run is started with a config in which its value has changed. NAME=config sets the
    value of the config. New task weights apply from the first train step for which no group has
    been started.
    """
    if bool(settings) == listed:
        raise ConfigError(
            "pass NAME=VALUE, or --list", hint="`rolloutmq set max_staleness=2` sets one"
        )
    wanted, restored = parse_change(settings or [])
    with open_target(redis_url, run_dir, run) as target:
        if listed:
            _list(target.run.settings, as_json)
            return
        changes = target.run.set(wanted, restored=restored, by=_who())
        keep_settings(target)
    if as_json:
        emit(
            {
                "changed": {
                    name: {"before": before, "after": after}
                    for name, (before, after) in changes.items()
                }
            }
        )
    elif not changes:
        console().print("nothing to change: the run has these settings already")
    for name, (before, after) in ({} if as_json else changes).items():
        line = f"{name}: {_word(name, before)} -> {_word(name, after)}"
        console().print(line, highlight=False, markup=False)


def keep_settings(target: Target) -> None:
    """Write what was set into the run's folder, if it is known here."""
    if target.run_dir and (target.run_dir / "run.json").is_file():
        KeptSettings(target.run_dir, target.run.nonce).keep(target.run.settings)


def override_lines(record: SettingsRecord) -> Iterator[str]:
    """Yield a line for people on every setting that differs from the config."""
    for each in _overrides(record):
        name = each["name"]
        config = _word(name, each["config"])
        yield f"{name} = {each['value']} since {_when(each['set_ms'])} (config: {config})"


def _list(record: SettingsRecord, as_json: bool) -> None:
    found = list(_overrides(record))
    if as_json:
        emit({"settings": found})
        return
    if not found:
        console().print("every setting is as in the config")
        return
    grid = table("setting", "config", "now", "since", "by")
    for each in found:
        name, config = each["name"], _word(each["name"], each["config"])
        row = (name, config, str(each["value"]), _when(each["set_ms"]), each["by"] or "-")
        grid.add_row(*map(plain, row))
    console().print(grid)


def _overrides(record: SettingsRecord) -> Iterator[Mapping[str, Any]]:
    for name, override in sorted(record.overrides.items()):
        yield {"name": name, "config": record.configured.get(name), **override.model_dump()}


def _word(name: str, value: object) -> str:
    if value is None:
        return "the run's" if name.startswith("tasks.") else "not set"
    return str(value)


def _when(set_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(set_ms / 1000))


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a user id without a name, as in containers
        return socket.gethostname()
