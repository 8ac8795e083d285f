"""`rolloutmq set max_staleness=2`: change settings of a run while it continues."""

from __future__ import annotations

from typing import Annotated

import typer

from buffer.config.load import parse_settings
from buffer.control.live_settings import LiveSettings, LiveTaskSettings
from buffer.monitoring.console import console
from rolloutmq.options import AsJson, RedisUrl, RunDir, RunName, open_target
from rolloutmq.output import emit

EPILOG = "Example: rolloutmq set max_staleness=2 tasks.math.weight=3"


def register(app: typer.Typer) -> None:
    app.command(name="set", epilog=EPILOG)(set_)


def _describe() -> str:
    own = [name for name in LiveSettings.model_fields if name != "tasks"]
    return ", ".join([*own, *(f"tasks.<name>.{name}" for name in LiveTaskSettings.model_fields)])


def set_(
    settings: Annotated[
        list[str],
        typer.Argument(metavar="NAME=VALUE...", help=f"Settings to change: {_describe()}."),
    ],
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Change settings of a run while it continues.

    Every process applies them at its next heartbeat, round or batch. They last until the run is
    restarted from its config file. New task weights apply from the first train step for which no
    group has been started.
    """
    wanted = parse_settings(LiveSettings, settings)
    with open_target(redis_url, run_dir, run) as target:
        changes = target.run.set(wanted)
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
        console().print(f"{name}: {before} -> {after}", highlight=False, markup=False)
