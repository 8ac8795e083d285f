"""The commands of the producing side: `worker`, `producer` and `judge`."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from buffer.errors import INTERRUPTED, ConfigError, RoleHeld
from producer_workers.config.sandbox import is_url
from producer_workers.follow_owner import follow_owner
from rolloutmq.command_list import command
from rolloutmq.config.sources import fetch
from rolloutmq.hang_up import stop_at_signals
from rolloutmq.options import ConfigPath, ConfigUrl, MetricsAddress, Overrides
from rolloutmq.presets import open_config
from rolloutmq.process_log import log_json

if TYPE_CHECKING:
    from buffer.run.run import Run
    from producer_workers.engines.base import Engine
    from producer_workers.worker.worker import Worker
    from rolloutmq.config.config import Config


log = logging.getLogger("rolloutmq.worker")

WorkerId = Annotated[
    str | None,
    Option("--id", help="Name of this process. Default: the host's and random characters."),
]
TakeOver = Annotated[bool, Option("--take-over", help="Fence a live process that has this --id.")]


@command("worker", epilog="Example: rolloutmq worker configs/demo.toml --id gpu7")
def worker(
    config: ConfigPath,
    overrides: Overrides = None,
    redis_url: ConfigUrl = None,
    worker_id: WorkerId = None,
    take_over: TakeOver = False,
    metrics: MetricsAddress = None,
) -> None:
    """Start one rollout worker.

    It runs an inference engine and claims jobs until the run is over. SIGTERM lets it finish its
    groups, and ends it with exit code 130; a second one stops it at once.
    """
    settings = open_config(config, overrides)
    asyncio.run(_serve("worker", settings, redis_url, worker_id, metrics, take_over))


@command("gateway", epilog="Example: rolloutmq gateway configs/live.toml")
def gateway(
    config: ConfigPath,
    overrides: Overrides = None,
    redis_url: ConfigUrl = None,
    worker_id: WorkerId = None,
    take_over: TakeOver = False,
    metrics: MetricsAddress = None,
) -> None:
    """Serve live sessions to programs that users start themselves.

    It is a worker of the tasks with agent_loop = "live". POST /sessions with the key in [gateway]
    key_file returns a key and URLs per rollout; POST /sessions/KEY/reward ends a session. If this
    process dies, another gateway goes on with the same keys.
    """
    settings = open_config(config, overrides)
    asyncio.run(_serve("gateway", settings, redis_url, worker_id, metrics, take_over))


@command("producer", epilog="Example: rolloutmq producer configs/demo.toml --take-over")
def producer(
    config: ConfigPath,
    overrides: Overrides = None,
    redis_url: ConfigUrl = None,
    take_over: Annotated[
        bool, Option("--take-over", help="Fence another producer that is still alive.")
    ] = False,
    metrics: MetricsAddress = None,
) -> None:
    """Start the producer.

    It draws prompts and keeps the queues filled as far as the staleness limit allows. One producer
    is active at a time. Whoever supervises it starts another when it dies.
    """
    settings = open_config(config, overrides)
    log_json("producer", settings.run.name)
    follow_owner()
    from producer_workers.build import make_producer
    from rolloutmq.config.fingerprint import origin_of
    from rolloutmq.observers import observed

    run, settings = _open(settings, redis_url, "producer", metrics)
    with observed(run, "producer", settings):
        member = make_producer(settings, run, origin_of(settings, settings.model_folder))
        # not earlier: before its run exists it has nothing to clean up, and a signal may end it
        stop = stop_at_signals()
        member.produce_loop(stop, take_over=take_over)
    if stop.is_set():
        raise typer.Exit(INTERRUPTED)


@command("judge", epilog="Example: rolloutmq judge configs/mine.toml --workers 8")
def judge(
    config: ConfigPath,
    overrides: Overrides = None,
    redis_url: ConfigUrl = None,
    workers: Annotated[
        int, Option(min=1, help="Number of processes; each judges one rollout at a time.")
    ] = 1,
) -> None:
    """Judge rollouts of tasks whose judging is of kind rq.

    Starts rq workers for the run's judge queue. Each forks a process for every rollout, with limits
    of time and memory. SIGTERM lets them finish their rollouts. `rq info rmq-judge:RUN` shows
    queue, workers and failures.
    """
    settings = open_config(config, overrides)
    log_json("judge", settings.run.name)
    follow_owner()
    from buffer.run.open import open_store, server_url
    from producer_workers.judges.rq_worker import judge_url, serve_judges

    judges: dict[str, str] = {}  # each with its sandbox
    for task in settings.tasks.values():
        for name in set(task.judges) - task.attached.keys() if task.judging.is_elsewhere else ():
            sandbox = task.judging.sandbox
            if not is_url(name) and judges.setdefault(name, sandbox) != sandbox:
                raise ConfigError(
                    f"tasks of kind rq give judge {name} different sandboxes",
                    hint="set the same [tasks.<name>.judging] sandbox in all of them",
                )
    if not judges:
        raise ConfigError(
            "no task has judging of kind rq", hint='[tasks.<name>.judging] kind = "rq"'
        )
    if not (url := settings.judges.redis_url):
        store = open_store(
            settings, server_url(settings, redis_url), name="rolloutmq-judge", patient=True
        )
        url = judge_url(None, store.servers)
        store.close()
    serve_judges(url, settings.run.name, judges, workers)


def _open(
    settings: Config, redis_url: str | None, name: str, metrics: str | None
) -> tuple[Run, Config]:
    """Return the run, and the config with the commits of the Hub that the run was made with."""
    from buffer.run.continuation import check_origin, read_origin
    from buffer.run.open import open_store, server_url, wait_for_run
    from rolloutmq.config.fingerprint import origin_of

    store = open_store(
        settings, server_url(settings, redis_url), name=f"rolloutmq-{name}", patient=True
    )
    if metrics is not None:
        from rolloutmq.views.prometheus import serve_process

        serve_process(name, store, metrics)
    run = wait_for_run(store, settings.run.name)
    origin = read_origin(run.store, run.keys)
    draws = name == "producer"
    settings = fetch(settings, origin, with_data=draws, with_judges=not draws)
    check_origin(run.store, run.keys, origin_of(settings, settings.model_folder))
    return run, settings


async def _serve(
    role: Literal["worker", "gateway"],
    settings: Config,
    redis_url: str | None,
    worker_id: str | None,
    metrics: str | None,
    take_over: bool,
) -> None:
    """Work until the run is over. Raises Exit if a signal has ended the work before."""
    host = socket.gethostname().split(".")[0]
    name = worker_id or f"{host}-{secrets.token_hex(3)}"
    log_json(role, settings.run.name, name)
    follow_owner()
    from producer_workers.build import make_worker, start_engine
    from producer_workers.engines import engine_restarts
    from producer_workers.user_functions import check_functions, named_functions
    from rolloutmq.observers import observed

    stopped = threading.Event()
    # before the engine, which takes long to load
    check_functions(named_functions(settings, for_judges=False))
    for section in settings.attached.values():
        section.check()

    async def start() -> Engine:
        # while it holds no groups, it has nothing to clean up; children of the engine end with it
        _on_signals(os._exit, INTERRUPTED)
        return await start_engine(settings, run)

    async def work(engine: Engine, restarts: int) -> None:
        member = make_worker(settings, run, engine, name, restarts=restarts, command=role)
        _on_signals(_drain, member, stopped)
        await member.run()

    _on_signals(os._exit, INTERRUPTED)
    run, settings = await asyncio.to_thread(_open, settings, redis_url, name, metrics)
    if not take_over:
        await asyncio.to_thread(_await_silence, run, name)
    with observed(run, name, settings):
        await engine_restarts.serve(start, work, settings.engine.restarts)
    if stopped.is_set():
        raise typer.Exit(INTERRUPTED)


def _await_silence(run: Run, worker: str) -> None:
    """Wait until no live worker has this id: its process may have just died. Raises RoleHeld."""
    first_ms = None
    while record := next((found for found in run.fleet.workers() if found.id == worker), None):
        if not record.is_live(run.limits.lease_ms):
            return
        first_ms = record.seen_ms if first_ms is None else first_ms
        if record.seen_ms != first_ms:
            raise RoleHeld(
                f"a worker {worker!r} is alive",
                hint="choose another --id, or replace that worker with --take-over",
            )
        time.sleep(run.limits.heartbeat_ms / 4000)


def _on_signals(do: Callable[..., object], *args: object) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, do, *args)


def _drain(member: Worker, stopped: threading.Event) -> None:
    """Drain the worker at the first signal; exit at the second."""
    log.info("stopping: finishing the groups that are held")
    _on_signals(os._exit, INTERRUPTED)
    stopped.set()
    member.stop()
