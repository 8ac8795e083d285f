"""`rolloutmq web`: show a run in a browser."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import Annotated

import typer

from buffer.monitoring.console import console
from buffer.monitoring.http_endpoint import cannot_listen, is_loopback, read_token
from rolloutmq.options import RedisUrl, RunDir, RunName, open_target

EPILOG = """
\b
Example: rolloutmq web
         rolloutmq web --host 0.0.0.0 --name gpu1.example --token-file token
"""
PORT = 9465

Host = Annotated[
    str,
    typer.Option(help="Address to listen on; on any but loopback, reading needs the token, too."),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")]
Name = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST", help="Host name by which browsers reach it; repeatable."),
]
TokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File with the token. Default: a new token.")
]
ReadOnly = Annotated[
    bool,
    typer.Option("--read-only", help="Refuse all actions, even with the token."),
]


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(web)


def web(
    host: Host = "127.0.0.1",
    port: Port = PORT,
    name: Name = None,
    token_file: TokenFile = None,
    read_only: ReadOnly = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
) -> None:
    """Show a run in a browser, until Ctrl-C.

    Charts, groups, rollouts with their tokens, workers, dead letters, events. The printed address
    contains a token, which also allows to pause, requeue and drop; without it, the page is
    read-only.
    """
    import uvicorn

    from rolloutmq.web.access import Access
    from rolloutmq.web.app import make_app

    is_public = not is_loopback(host)
    token = read_token(token_file) if token_file else secrets.token_urlsafe(24)
    with open_target(redis_url, run_dir, run) as target:
        hosts = [host, "localhost", "127.0.0.1", "[::1]", *(name or [])]
        app = make_app(
            target.run,
            run_dir=target.run_dir,
            access=Access(token, read_needs_token=is_public, read_only=read_only),
            hosts=hosts,
            is_over=lambda: server.should_exit,
        )
        settings = uvicorn.Config(app, host=host, port=port, log_level="warning")
        server = uvicorn.Server(settings)
        try:
            # listens before the address is printed, so that a request that comes at once is queued
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, port), family=family)
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        shown = (name or [host])[0]
        # the token follows the #: browsers do not send that part, so servers do not log it
        console().print(
            f"http://{shown}:{listening.getsockname()[1]}/#token={token}", soft_wrap=True
        )
        server.run(sockets=[listening])
