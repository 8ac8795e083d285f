"""`rolloutmq metrics`: print runs in the format of Prometheus, or serve them."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rolloutmq.command_list import command
from rolloutmq.console import console
from rolloutmq.http_endpoint import read_token
from rolloutmq.options import AsJson, RedisUrl, RunDir, RunName, choose_run, open_server
from rolloutmq.output import emit

if TYPE_CHECKING:
    from rolloutmq.views.prometheus import RunCollector


EPILOG = """
\b
Examples: rolloutmq metrics            print them once
          rolloutmq metrics --json     print the workers wanted, by run
          rolloutmq metrics --serve    serve http://127.0.0.1:9464/metrics
          rolloutmq metrics --serve --host 0.0.0.0 --token-file token
"""
PORT = 9464

Serve = Annotated[
    bool,
    typer.Option("--serve", help="Serve /metrics and /workers_wanted until Ctrl-C or SIGTERM."),
]
Host = Annotated[str, typer.Option(help="Address to listen on; any but loopback needs a token.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="File with the token that requests must send: Authorization: Bearer …"
    ),
]


@command("Look", "metrics", epilog=EPILOG)
def metrics(
    serve: Serve = False,
    host: Host = "127.0.0.1",
    port: Port = PORT,
    token_file: TokenFile = None,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Show runs in the format of Prometheus.

    Shows all runs of the server, or one: groups by stage, staleness, rates, waiting times, workers,
    memory, and how many workers would keep the trainer busy (rolloutmq_workers_wanted; only --serve
    observes long enough to estimate it).
    """
    from prometheus_client import generate_latest

    from rolloutmq.views.prometheus import RunCollector

    with open_server(redis_url, run_dir) as (store, _):
        collector = RunCollector(store, choose_run(store, run) if run else None)
        if serve:
            _serve(collector, host, port, read_token(token_file) if token_file else "")
        elif as_json:
            emit({"workers_wanted": collector.read_workers_wanted()})
        else:
            typer.echo(generate_latest(collector.registry()).decode(), nl=False)


def _serve(collector: RunCollector, host: str, port: int, token: str) -> None:
    from rolloutmq.http_endpoint import MetricsEndpoint

    pages = {"/workers_wanted": collector.read_workers_wanted}
    endpoint = MetricsEndpoint(collector.registry(), pages, host=host, port=port, token=token)
    console().print(f"{endpoint.url}/metrics")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    endpoint.close()
