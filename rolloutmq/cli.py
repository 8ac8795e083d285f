"""The `rolloutmq` command: finds its sub-commands, turns errors into one clear message.

Exit codes are those of `buffer.errors`. An error that we know is told without a traceback;
ROLLOUTMQ_DEBUG=1 shows it. `--help` loads no torch, vllm or transformers: a sub-command imports
them when it runs.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, NoReturn, cast

import typer

from buffer.errors import ConfigError, RolloutMQError
from buffer.model.extras import missing_extra
from buffer.monitoring.console import plain
from buffer.store.url import mask_url
from rolloutmq.commands import (
    batch,
    curate,
    doctor,
    fsck,
    groups,
    metrics,
    pause,
    produce,
    runs,
    scripts,
    server,
    settings,
    show,
    simulate,
    snapshot,
    status,
    tail,
    web,
    workers,
)
from rolloutmq.launch import commands as launch
from rolloutmq.top import top

EPILOG = """
\b
Examples:
  rolloutmq run configs/demo.toml          a whole run on this machine
  rolloutmq status                         where it is; finds server and run
  rolloutmq top                            the live view
  rolloutmq ls --task math --stage pool    groups that are ready
  rolloutmq show math-0000000042           texts, rewards, policy versions
  rolloutmq dead                           what failed, and why
  rolloutmq pause --mode drain --wait      finish what runs, claim nothing
  rolloutmq continue                       and go on
  rolloutmq set max_staleness=2            change it while it runs
  rolloutmq fsck                           nothing lost, nothing trained twice

\b
Exit codes:
    0  done
    1  failed
    2  a flag, a config or a data set is wrong
    3  the server: not reachable, refused, or it would lose data
    4  a model, an engine or weights cannot be loaded
    5  this run cannot be opened like that
    6  the account of groups does not add up
  130  interrupted by Ctrl-C

\b
Environment:
  REDIS_URL          the server, where no --redis-url is given
  NO_COLOR=1         no colours
  ROLLOUTMQ_DEBUG=1  a traceback for every error
"""

app = typer.Typer(
    name="rolloutmq",
    help="A Redis-backed message queue between LLM rollout workers and an RL trainer.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"rolloutmq {version('rolloutmq')}")
        except PackageNotFoundError:
            typer.echo("rolloutmq (not installed)")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


_LAUNCHING = (launch, produce, simulate)
_LOOKING = (status, runs, top, groups, show, batch, tail, workers, web, metrics)
_STEERING = (pause, settings, snapshot, curate)
for module in (*_LAUNCHING, *_LOOKING, *_STEERING, server, fsck, doctor, scripts):
    module.register(app)


WrongUse = cast(
    type[Any],
    next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"),
)
"""Of every flag, argument or command that cannot be understood. typer has it within itself, under
no public name.
"""


def main() -> None:
    """Run the command and exit with its code."""
    as_json = "--json" in sys.argv
    try:
        # people are told of a wrong flag by typer, with the usage
        sys.exit(app(prog_name="rolloutmq", standalone_mode=not as_json))
    except WrongUse as error:
        wrong: Any = error
        _leave(ConfigError(wrong.format_message(), hint="see --help of the command"), as_json=True)
    except RolloutMQError as error:
        _leave(error, as_json=as_json)
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        _leave(missing, as_json=as_json)
    except KeyboardInterrupt:
        # typer turns the ones inside of a command into 130 itself
        sys.exit(130)


def _leave(error: RolloutMQError, *, as_json: bool) -> NoReturn:
    if os.environ.get("ROLLOUTMQ_DEBUG"):
        typer.echo(mask_url(traceback.format_exc()), err=True)
    typer.echo(_told(error, as_json=as_json), err=True)
    sys.exit(error.exit_code)


def _told(error: RolloutMQError, *, as_json: bool) -> str:
    message = mask_url(error.message)
    hint = mask_url(error.hint)
    if as_json:
        told = {
            "error": message,
            "hint": hint,
            "kind": type(error).__name__,
            "exit_code": error.exit_code,
        }
        return json.dumps(told, ensure_ascii=False)
    return plain(f"error: {message}" + (f"\nhint:  {hint}" if hint else ""))


if __name__ == "__main__":
    main()
