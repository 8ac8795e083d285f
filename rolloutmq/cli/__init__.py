"""Define the `rolloutmq` command: call one of `command_list`, and print errors as one message.

Exit codes are those of `buffer.errors`. ROLLOUTMQ_DEBUG=1 adds the traceback of known errors.
"""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import sys
import traceback
from typing import Annotated, Any, NoReturn, cast

import typer
from typer import Option

from buffer.errors import INTERRUPTED, ConfigError, RolloutMQError
from buffer.imports import missing_extra
from buffer.readable import visible
from rolloutmq.command_list import SETTINGS, LazyGroup
from rolloutmq.hang_up import follow_terminal

EPILOG = """
\b
Examples:
  rolloutmq run configs/demo.toml          start a whole run on this machine
  rolloutmq run configs/demo.toml -d       the same in the background
  rolloutmq stop                           stop it; the same run continues it
  rolloutmq logs -f trainer                follow the log of a process
  rolloutmq logs -f events                 follow the events of the queue
  rolloutmq status                         show its state
  rolloutmq status --follow                watch it live
  rolloutmq ls --task math --stage pool    list groups that are ready
  rolloutmq show math-0000000042           show texts, rewards, versions
  rolloutmq dead                           list what failed, and why
  rolloutmq pause --mode drain --wait      finish what runs, claim nothing
  rolloutmq resume                         end the pause
  rolloutmq set max_staleness=2            change a setting while it runs
  rolloutmq fsck                           check that nothing is lost

\b
Exit codes:
    0  success
    1  failure
    2  a flag, a config or a data set is wrong
    3  the server is unreachable, refuses, or could lose data
    4  a model, an engine or weights cannot be loaded
    5  the run cannot be opened in this way
    6  the account of groups does not add up
  130  interrupted by Ctrl-C or SIGTERM

\b
Environment:
  REDIS_URL          the server, unless --redis-url is given
  NO_COLOR=1         print without colours
  ROLLOUTMQ_DEBUG=1  print a traceback with every error
"""


app = typer.Typer(
    name="rolloutmq",
    help="A Redis-backed message queue between LLM rollout workers and an RL trainer.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    cls=LazyGroup,
    context_settings=SETTINGS,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        # here, because importlib.metadata would add a fifth to the time of --help
        from rolloutmq.versions import own_version

        typer.echo(f"rolloutmq {own_version()}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, Option("--version", callback=_show_version, help="Show the version.")
    ] = False,
) -> None:
    pass


# the base of typer's usage errors, which has no public name
UsageError = cast(
    type[Any],
    next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"),
)


def _set_up_process() -> None:
    # imports make objects that stay: collections would take a sixth of the import of torch
    gc.set_threshold(10_000, 10, 10)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # `?` for what a terminal in ASCII cannot show
            stream.reconfigure(errors="replace")
    # new files hold prompts, responses and weights. Only a umask also reaches files that libraries
    # and children write; [run] umask may relax it
    if sys.argv[1:2] != ["init"]:
        os.umask(0o077)
    follow_terminal()


def main() -> None:
    as_json = "--json" in sys.argv
    _set_up_process()
    try:
        try:
            # without --json, typer reports usage errors itself, and prints the usage
            sys.exit(app(prog_name="rolloutmq", standalone_mode=not as_json))
        finally:
            sys.stdout.flush()
    except UsageError as error:
        usage: Any = error
        _exit(ConfigError(usage.format_message(), hint="see --help of the command"), as_json=True)
    except RolloutMQError as error:
        _exit(error, as_json=as_json)
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        _exit(missing, as_json=as_json)
    except ValueError as error:
        if "null byte" not in str(error) and "null character" not in str(error):
            raise
        _exit(ConfigError("a path or a name contains the character NUL"), as_json=as_json)
    except OSError as error:
        known = _describe_file_error(error)
        _drop_output()
        _exit(known, as_json=as_json)
    except KeyboardInterrupt:
        # outside of a command; typer exits with 130 for one inside
        sys.exit(INTERRUPTED)


def _describe_file_error(error: OSError) -> RolloutMQError:
    """Return the error for a file, a folder or an output; raise any other again."""
    if isinstance(error, BrokenPipeError):
        # the reader closed the pipe: not an error
        _drop_output()
        sys.exit(1)
    if error.filename is None and error.errno != errno.ENOSPC:
        raise error
    where = error.filename or "the output, or a file"
    hint = "check the path, its permissions and the space on its disk"
    return RolloutMQError(f"{where}: {error.strerror}", hint=hint)


def _drop_output() -> None:
    """Discard buffered output: Python would fail to write it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit(error: RolloutMQError, *, as_json: bool) -> NoReturn:
    from buffer.redis.url import (
        mask_url,  # here, because it imports redis, which takes 0.1 s
    )

    if os.environ.get("ROLLOUTMQ_DEBUG"):
        typer.echo(mask_url(traceback.format_exc()), err=True)
    message, hint = mask_url(error.message), mask_url(error.command_hint)
    said = f"error: {message}" + (f"\nhint:  {hint}" if hint else "")
    if as_json:
        document = {"error": message, "hint": hint, "kind": type(error).__name__}
        said = json.dumps(document | {"exit_code": error.exit_code}, ensure_ascii=False)
    typer.echo(visible(said), err=True)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
