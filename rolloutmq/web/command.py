"""`rolloutmq web`: show a run in a browser."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from rolloutmq.command_list import command
from rolloutmq.console import console
from rolloutmq.http_endpoint import cannot_listen, read_token
from rolloutmq.options import RedisUrl, RunDir, RunName, open_target

EPILOG = """
\b
Example: rolloutmq web
         rolloutmq web --host 0.0.0.0 --name gpu1.example --token-file token
"""
PORT = 9465

Host = Annotated[
    str,
    typer.Option(help="Address to listen on."),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")]
Name = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST", help="Host name by which browsers reach it; repeatable."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="File with the token. Default: web.token in the run's folder."
    ),
]
ReadOnly = Annotated[
    bool,
    typer.Option("--read-only", help="Refuse all actions, even with the token."),
]


@command("Look", "web", epilog=EPILOG)
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
    contains a token, without which nobody can read the run; it also allows to pause, requeue and
    drop.
    """
    import uvicorn

    from rolloutmq.web.access import Access, token_of
    from rolloutmq.web.app import make_app

    with open_target(redis_url, run_dir, run) as target:
        token = read_token(token_file) if token_file else token_of(target.run_dir)
        hosts = [host, "localhost", "127.0.0.1", "[::1]", *(name or [])]
        app = make_app(
            target.run,
            run_dir=target.run_dir,
            access=Access(token, read_only=read_only),
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
        may = "read the run" if read_only else "read the run, pause it and change it"
        console().print(f"Only those who have this address can {may}.", style="dim")
        server.run(sockets=[listening])
