"""`rolloutmq web` and `metrics`: serve a run to browsers and to Prometheus."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from buffer.errors import StoreUnavailable
from rolloutmq.command_list import command
from rolloutmq.hang_up import stop_at_signals
from rolloutmq.http_endpoint import cannot_listen, read_token
from rolloutmq.options import (
    AsJson,
    RedisUrl,
    RunDir,
    RunName,
    choose_run,
    folder_without_server,
    open_server,
    open_target,
)
from rolloutmq.output import console, emit

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from rolloutmq.web.access import Access

WEB_EPILOG = """
\b
Example: rolloutmq web
         rolloutmq web --host 0.0.0.0 --name gpu1.example --token-file token
"""
METRICS_EPILOG = """
\b
Examples: rolloutmq metrics            print them once
          rolloutmq metrics --json     print the workers wanted, by run
          rolloutmq metrics --serve    serve http://127.0.0.1:9464/metrics
          rolloutmq metrics --serve --host 0.0.0.0 --token-file token
"""

Host = Annotated[str, Option(help="Address to listen on.")]
Port = Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0: any free port.")]
TokenFile = Annotated[
    Path | None, Option(metavar="FILE", help="File with the token that requests must send.")
]


@command("web", epilog=WEB_EPILOG)
def web(
    host: Host = "127.0.0.1",
    port: Port = 9465,
    name: Annotated[
        list[str] | None,
        Option(metavar="HOST", help="Host name by which browsers reach it; repeatable."),
    ] = None,
    token_file: TokenFile = None,
    read_only: Annotated[
        bool, Option("--read-only", help="Refuse all actions, even with the token.")
    ] = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
) -> None:
    """Show a run in a browser, until Ctrl-C.

    Charts, groups, rollouts with their tokens, workers, dead letters, events. The printed address
    contains a token, which every request needs. With the token, a browser can read the run, pause
    it, and requeue or drop groups. By default it is that of web.token in the run's folder. Of a run
    whose server is lost, it shows what the run's folder has.
    """
    from rolloutmq.web.access import Access, token_of
    from rolloutmq.web.app import make_app, make_folder_app

    hosts = [host, "localhost", "127.0.0.1", "[::1]", *(name or [])]
    shown_host = (name or [host])[0]

    def access(folder: Path | None) -> Access:
        token = read_token(token_file) if token_file else token_of(folder)
        return Access(token, read_only=read_only)

    try:
        with open_target(redis_url, run_dir, run) as target:
            may = access(target.run_dir)
            make = partial(make_app, target.run, run_dir=target.run_dir, access=may, hosts=hosts)
            _serve_page(make, may, host, port, shown_host)
    except StoreUnavailable as error:
        folder = folder_without_server(redis_url, run_dir, run)
        if folder is None:
            raise
        console(stderr=True).print(
            f"only the folder {folder} is read: {error.message}", soft_wrap=True
        )
        may = replace(access(folder), read_only=True)
        make = partial(make_folder_app, folder, error.message, access=may, hosts=hosts)
        _serve_page(make, may, host, port, shown_host)


def _serve_page(
    make: Callable[..., Starlette], access: Access, host: str, port: int, shown_host: str
) -> None:
    """Listen, print the address, and serve the application that `make` returns until Ctrl-C."""
    import uvicorn

    app = make(is_over=lambda: server.should_exit)
    server: uvicorn.Server = uvicorn.Server(
        uvicorn.Config(app, host=host, port=port, log_level="warning")
    )
    try:
        # listens before the address is printed, so that a request that comes at once is queued
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    # the token follows the #: browsers do not send that part, so servers do not log it
    address = f"{shown_host}:{listening.getsockname()[1]}"
    console().print(f"http://{address}/#token={access.token}", soft_wrap=True)
    may = "read the run" if access.read_only else "read the run, pause it and change it"
    console().print(f"Only those who have this address can {may}.", style="dim")
    server.run(sockets=[listening])


@command("metrics", epilog=METRICS_EPILOG)
def metrics(
    serve: Annotated[
        bool, Option("--serve", help="Serve /metrics and /workers_wanted until Ctrl-C or SIGTERM.")
    ] = False,
    host: Host = "127.0.0.1",
    port: Port = 9464,
    token_file: TokenFile = None,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Show runs in the format of Prometheus.

    Shows all runs of the server, or one: groups by stage, staleness, rates, waiting times, workers,
    memory, and how many workers would keep the trainer busy (rolloutmq_workers_wanted; only --serve
    observes long enough to estimate it). Any address but loopback needs a token, which requests
    send as Authorization: Bearer TOKEN.
    """
    from prometheus_client import generate_latest

    from rolloutmq.views.prometheus import RunCollector

    with open_server(redis_url, run_dir) as (store, _):
        collector = RunCollector(store, choose_run(store, run) if run else None)
        if serve:
            from rolloutmq.http_endpoint import MetricsEndpoint

            token = read_token(token_file) if token_file else ""
            pages = {"/workers_wanted": collector.read_workers_wanted}
            endpoint = MetricsEndpoint(
                collector.registry(), pages, host=host, port=port, token=token
            )
            console().print(f"{endpoint.url}/metrics")
            stop_at_signals().wait()
            endpoint.close()
        elif as_json:
            emit({"workers_wanted": collector.read_workers_wanted()})
        else:
            typer.echo(generate_latest(collector.registry()).decode(), nl=False)
