"""Decide which server and which run a command works on.

The server: `--redis-url`, else the embedded server of `--run-dir`, else REDIS_URL, else the
embedded server of the run under ./runs that was used last (running ones first). An embedded server
that does not run is started for the command. The run: `--run`, else the only one on the server.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import orjson
import redis
from typer import Argument, Option

from buffer.errors import ConfigError, QueryError, RunNotFound, StoreError, StoreUnavailable
from buffer.ids import valid_name
from buffer.readable import did_you_mean
from buffer.redis.errors import describe_connection_error
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.redis.url import Servers, mask_url
from buffer.run.run import Run
from consumer.handle.sample_log import SampleLog
from rolloutmq.hang_up import interrupted_by_sigterm
from rolloutmq.output import console, emit
from rolloutmq.run_owner import folders_below, is_owned, known_folders, last_change

RUNS = Path("runs")

_OF_FOLDERS = "`rolloutmq status`, `web`, `report`, `dead`, `show`, `batch` and `logs`"
_HOW = (
    "pass --redis-url URL or --run-dir FOLDER, set REDIS_URL, "
    "or change to the folder in which the run was started"
)

RedisUrl = Annotated[
    str | None,
    Option(
        "--redis-url",
        metavar="URL",
        help="URL of the server: redis://, rediss://, unix:// or redis+sentinel://. "
        "Default: REDIS_URL, else the embedded server of --run-dir.",
    ),
]
RunDir = Annotated[
    Path | None,
    Option(
        "--run-dir",
        metavar="FOLDER",
        help="Folder of the run. Default: the newest one under ./runs.",
    ),
]
RunName = Annotated[
    str | None,
    Option("--run", metavar="NAME", help="Name of the run. Default: the only one on the server."),
]
ConfigPath = Annotated[
    Path,
    Argument(
        metavar="CONFIG",
        help="TOML file of the run, or the name of a preset: demo, qwen3_0.6b_gsm8k, …",
    ),
]
Overrides = Annotated[
    list[str] | None,
    Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the config; repeatable."),
]
ConfigUrl = Annotated[
    str | None,
    Option(
        "--redis-url",
        metavar="URL",
        help="URL of the server. Default: the config's, REDIS_URL, or the run's own server.",
    ),
]
MetricsAddress = Annotated[
    str | None,
    Option(
        metavar="[HOST:]PORT",
        help="Serve metrics of this process there; any host but loopback needs "
        "ROLLOUTMQ_METRICS_TOKEN.",
    ),
]
GroupId = Annotated[
    str, Argument(metavar="GID", help="Id of a group, for example math-0000000042.")
]
OneTask = Annotated[str | None, Option("--task", help="Only groups of this task.")]
Limit = Annotated[int, Option("--limit", min=1, max=1_000_000, help="The highest number of rows.")]
Yes = Annotated[bool, Option("--yes", help="Execute; without it, only print what would be done.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]


def set_flags(overrides: Sequence[str]) -> list[str]:
    """Return the arguments that give a command these values of `Overrides`."""
    return [part for override in overrides for part in ("--set", override)]


def server_flags(url: str | None, folder: Path) -> str:
    """Return how a command finds a run; without `url`, the server of its folder."""
    return f"--redis-url {mask_url(url)}" if url else f"--run-dir {folder}"


@dataclass(frozen=True, slots=True)
class Address:
    """The URL of a server, the run's folder if it is known, and its server if that is embedded."""

    url: str
    run_dir: Path | None = None
    server: EmbeddedServer | None = None

    def __str__(self) -> str:
        return mask_url(self.url)


@dataclass(frozen=True, slots=True)
class Target:
    """An open run, and its folder if it is known."""

    run: Run
    run_dir: Path | None

    @property
    def samples(self) -> SampleLog | None:
        return SampleLog(self.run_dir) if self.run_dir else None


def _belongs(folder: Path, run: Run) -> bool:
    """Compare the nonce in the folder's run.json: another run may have the same name."""
    note = folder / "run.json"
    return note.is_file() and run.nonce.encode() in note.read_bytes()


def folder_of(run: Run, named: Path | None) -> Path | None:
    """Return the folder of a run: the named one, or one under ./runs; None if it is another's."""
    if named is not None:
        return named if not (named / "run.json").is_file() or _belongs(named, run) else None
    return next((folder for folder in folders_below(RUNS) if _belongs(folder, run)), None)


def find_server(redis_url: str | None, run_dir: Path | None) -> Address:
    """Return the server that the options, environment or folder select. Raises StoreUnavailable."""
    if redis_url:
        return Address(redis_url, run_dir)
    if run_dir is not None and (server := embedded_server(run_dir)):
        return Address(server.url, run_dir, server)
    if from_environment := os.environ.get("REDIS_URL"):
        return Address(from_environment, run_dir)
    if run_dir is None and (newest := newest_server()):
        server, folder = newest
        return Address(server.url, folder, server)
    what = "no server found: no --redis-url, no REDIS_URL, and no embedded server under ./runs"
    if run_dir is not None:
        what = f"{run_dir} has no embedded server, and no URL is given"
    raise StoreUnavailable(what, hint=_HOW)


def embedded_server(run_dir: Path) -> EmbeddedServer | None:
    """Return the server, running or not, whose data is in a folder or directly below it."""
    for folder in (run_dir, *folders_below(run_dir)):
        if (folder / "valkey.lock").exists():
            settings = folder / "valkey.conf"
            text = settings.read_text(encoding="utf-8") if settings.exists() else ""
            found = re.search(r"^port (\d+)", text, re.MULTILINE)
            return EmbeddedServer(folder, port=int(found[1]) or None if found else None)
    return None


def newest_server() -> tuple[EmbeddedServer, Path] | None:
    """Return a server under ./runs and its run's folder: a running one, else of the last use."""
    servers = [
        (server, folder) for folder in folders_below(RUNS) if (server := embedded_server(folder))
    ]
    return max(servers, key=lambda pair: (pair[0].is_running, last_change(pair[1])), default=None)


@contextmanager
def open_server(redis_url: str | None, run_dir: Path | None) -> Iterator[tuple[Store, Address]]:
    """Open the server, after one check that it answers. Raises StoreError and ConfigError.

    An embedded server runs as long as the block: it is started if it does not run yet.
    """
    address = find_server(redis_url, run_dir)
    with ExitStack() as stack:
        if address.server:
            stack.enter_context(interrupted_by_sigterm())
            _keep_running(address.server, address.run_dir, stack)
        try:
            with closing(Servers(address.url, "rolloutmq-cli", timeout_s=5.0)) as servers:
                # a client of a cluster has connected to a node already
                if not servers.is_cluster:
                    servers.client().ping()
        except redis.RedisError as error:
            raise describe_connection_error(address.url, error) from error
        store = Store(address.url, name="rolloutmq-cli", deadline_s=5.0)
        stack.callback(store.close)
        yield store, address


def _keep_running(server: EmbeddedServer, run_dir: Path | None, stack: ExitStack) -> None:
    try:
        if not server.is_running:
            if not server.has_data:
                raise StoreUnavailable(f"the data of the server in {server.folder} are gone")
            if not os.access(server.folder, os.W_OK):
                raise StoreUnavailable(f"the server of {run_dir} needs to write to its folder")
            what = f"the server of {run_dir} does not run: it is started for this command only"
            console(stderr=True).print(what, style="dim", soft_wrap=True)
        stack.enter_context(server.reading())
    except OSError as error:
        what = f"the server of {run_dir} cannot be started: {error.filename}: {error.strerror}"
        raise StoreUnavailable(what) from error
    except StoreError as error:  # of another version, or damaged
        raise StoreUnavailable(error.message, hint=error.hint) from error


@contextmanager
def open_target(redis_url: str | None, run_dir: Path | None, run: str | None) -> Iterator[Target]:
    """Open the run that the options select. Raises RunNotFound and ConfigError."""
    with open_server(redis_url, run_dir) as (store, address):
        opened = Run.open(store, choose_run(store, run))
        yield Target(opened, folder_of(opened, address.run_dir))


class Output(NamedTuple):
    """What a command prints: `document` with --json, else `shown` (text or renderables)."""

    document: Any
    shown: Any = ()

    def print(self, *, as_json: bool) -> None:
        if as_json:
            emit(self.document)
            return
        for part in self.shown if isinstance(self.shown, (list, tuple)) else [self.shown]:
            console().print(part)


_OF_RUN = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
    for name, default, kind in (
        ("redis_url", None, RedisUrl),
        ("run_dir", None, RunDir),
        ("run", None, RunName),
        ("as_json", False, AsJson),
    )
]


def on_run(
    function: Callable[..., Output | None], read_folder: Callable[..., Output] | None = None
) -> Callable[..., None]:
    """Give a command the options that select a run, and --json.

    The command gets the open run as its first argument, and `as_json` if it has that parameter.
    What it returns is printed. Where the run's server cannot be reached, `read_folder` gets its
    folder and the error in place of the open run.
    """
    own = inspect.signature(function, eval_str=True)
    _, *asked = own.parameters.values()
    takes_json = "as_json" in own.parameters

    @wraps(function)
    def call(
        *, redis_url: RedisUrl, run_dir: RunDir, run: RunName, as_json: AsJson, **given: Any
    ) -> None:
        given |= {"as_json": as_json} if takes_json else {}
        try:
            with open_target(redis_url, run_dir, run) as target:
                answer = function(target, **given)
        except StoreUnavailable as error:
            folder = folder_without_server(redis_url, run_dir, run)
            if folder is None:
                raise
            if read_folder is None:
                hint = f"{_OF_FOLDERS} read what {folder} has"
                raise StoreUnavailable(error.message, hint=hint) from error
            answer = read_folder(folder, error, **given)
        if answer is not None:
            answer.print(as_json=as_json)

    options = [each.replace(kind=each.KEYWORD_ONLY) for each in asked if each.name != "as_json"]
    options += _OF_RUN
    call.__dict__["__signature__"] = own.replace(parameters=options, return_annotation=None)
    call.__annotations__ = {each.name: each.annotation for each in options}
    return call


def or_folder(read_folder: Callable[..., Output]) -> partial[Callable[..., None]]:
    """Return `on_run` for a command that can also read the run's folder without its server."""
    return partial(on_run, read_folder=read_folder)


def folder_without_server(
    redis_url: str | None, run_dir: Path | None, run: str | None
) -> Path | None:
    """Return the selected run's folder, to be read in place of its server; None if unknown.

    None, too, for a run in progress: its server is only unreachable for a while.
    """
    if run_dir is None and not (redis_url or run or os.environ.get("REDIS_URL")):
        newest = newest_server()
        run_dir = newest[1] if newest else next(iter(known_folders(RUNS)), None)
    return run_dir if run_dir and last_change(run_dir) and not is_owned(run_dir) else None


def choose_run(store: Store, run: str | None) -> str:
    """Return `run` if it exists, or the only run on the server if `run` is None."""
    if run is not None:
        valid_name("run", run)
    names = Run.names(store, damaged=True)
    if run in names or (run is None and len(names) == 1):
        return run or names[0]
    if not names:
        raise RunNotFound(
            f"there is no run on {mask_url(store.url)}", hint="`rolloutmq run CONFIG` starts one"
        )
    if run is None:
        raise ConfigError(
            f"there are {len(names)} runs on this server: {', '.join(names)}",
            hint="choose one with --run NAME",
        )
    raise RunNotFound(
        f"there is no run {run!r} on this server",
        hint=f"{did_you_mean(run, names)}its runs: {', '.join(names)}",
    )


def require_yes(yes: bool, plan: str) -> None:
    """Raise ConfigError without --yes; `plan`: what the command would do."""
    if not yes:
        raise ConfigError(f"this would {plan}; nothing was changed", hint="pass --yes to do it")


def require_known(kind: str, name: str | None, known: Collection[str]) -> None:
    """Raise ConfigError for a name that is not among `known`; None is accepted."""
    if name is not None and name not in known:
        hint = f"{did_you_mean(name, known)}one of {', '.join(known) or 'none'}"
        raise ConfigError(f"there is no {kind} {name!r}", hint=hint)


def read_where(text: str | None) -> Any:
    if not text:
        return {}
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        hint = """quote it for the shell, for example --where '{"status": "completed"}'"""
        raise QueryError(f"--where is not valid JSON: {error}", hint=hint) from error
