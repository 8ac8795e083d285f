"""`rolloutmq key`: the keys with which workers sign what they submit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from buffer.errors import ConfigError
from buffer.redis.signing import Key, read_keys, write_keys
from rolloutmq.console import console, plain

EPILOG = "Example: rolloutmq key gpu7 --keys workers.keys --out gpu7.key"


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command(epilog=EPILOG)(key)


def key(
    worker: Annotated[
        str, typer.Argument(metavar="WORKER", help="--id of the worker, or `producer`.")
    ],
    keys_file: Annotated[
        Path,
        typer.Option("--keys", metavar="FILE", help="Keys of all workers: [trainer] keys_file."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the new key: [worker] key_file."),
    ] = None,
    revoke: Annotated[
        bool, typer.Option("--revoke", help="Remove all earlier keys of the worker.")
    ] = False,
) -> None:
    """Create the key with which a worker signs what it submits.

    Copy --out to the worker's machine, and keep --keys where the trainer is; only their owner may
    read them. A running trainer reads --keys again when it changes. A worker that has a key
    already gets another one, and both are valid: start it again with the new key, then remove the
    older line from --keys. With --revoke, earlier keys are removed at once, and groups that they
    signed are not trained any more. --revoke without --out removes the worker.

    The name `producer` is that of the producer ([producer] key_file). Once --keys has it, groups
    are only trained if their prompts are signed, too.
    """
    new = Key.new(worker)
    if not (out or revoke):
        raise ConfigError("no file for the key", hint=f"add --out {worker}.key")
    keys = read_keys(keys_file) if keys_file.exists() else {}
    if revoke and not keys.pop(worker, None):
        raise ConfigError(f"{keys_file} has no key of {worker}", hint="leave --revoke out")
    if out:
        _require_own(out, keys_file, worker)
        keys[worker] = [*keys.get(worker, ()), new.secret]
    write_keys(keys_file, keys)
    if out:
        write_keys(out, {worker: [new.secret]})
    console().print(
        f"{plain(str(out))} has the new key of {worker}" if out else f"{worker} has no key any more"
    )


def _require_own(out: Path, keys_file: Path, worker: str) -> None:
    """Raise ConfigError if the file to write exists and has anything but keys of this worker."""
    is_all = out.resolve() == keys_file.resolve()
    if is_all or (out.exists() and set(read_keys(out)) - {worker}):
        raise ConfigError(
            f"{out} has keys of others", hint=f"name a file for {worker} alone: --out {worker}.key"
        )
