"""`python -m benchmarks.call_limit`: 64 workers under one limit, against a server that counts.

Two runs share 600 requests a minute: 48 workers and 16, each with more calls than it may make.
Processes with eight workers are killed (SIGKILL) and started again. Then the server refuses calls
for a moment. What is counted is what arrives at the server.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import aiohttp
import typer
from aiohttp import web

from benchmarks.machine import machine_facts
from buffer.control.call_limit import CallLimit
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from producer_workers.call_turns import Turns
from producer_workers.http_client import ask

RUNS = {"a": 6, "b": 2}
"""Processes of each run; each has eight workers."""
WORKERS = 8
CALLS = 4  # that each worker has open at once
REFUSAL_S = 5.0
MINUTE_S = 60.0


class Arrival(NamedTuple):
    at_s: float
    run: str
    process: str
    is_refused: bool


class Counting:
    """The server: it answers after 50 ms, and refuses calls while `refuses_until_s` is ahead."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.refuses_until_s = 0.0
        self.open = self.most_open = 0

    @contextmanager
    def _opened(self) -> Iterator[None]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            yield
        finally:
            self.open -= 1

    async def _answer(self, request: web.Request) -> web.Response:
        query, now_s = request.query, time.monotonic()
        left_s = self.refuses_until_s - now_s
        self.arrivals.append(Arrival(now_s, query["run"], query["process"], left_s > 0))
        if left_s > 0:
            return web.Response(status=429, headers={"Retry-After": f"{ceil(10 * left_s) / 10}"})
        with self._opened():
            await asyncio.sleep(0.05)
        return web.json_response(1.0)

    async def serve(self) -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.router.add_post("/", self._answer)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/"


async def work(store_url: str, service: str, run: str, limit: CallLimit, lease_ms: int) -> None:
    """Call the service again and again, as several workers of one process."""

    async def call(turns: Turns, client: aiohttp.ClientSession) -> None:
        while True:
            async with turns.turn() as turn:
                answer = await ask(
                    client, "POST", f"{service}?run={run}&process={os.getpid()}", b"{}", limit_s=60
                )
                if answer.status == 429:
                    turn.refused(answer.retry_after_s, answer.problem)

    with closing(Store(store_url)) as store:
        async with aiohttp.ClientSession() as client, asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                turns = Turns(store, limit, f"{run} judge", lease_ms)
                for _ in range(CALLS):
                    group.create_task(call(turns, client))


def start(
    store_url: str, service: str, run: str, limit: CallLimit, lease_ms: int
) -> subprocess.Popen[bytes]:
    code = (
        "import asyncio, sys; from benchmarks.call_limit import CallLimit, work; a = sys.argv;"
        "limit = CallLimit(a[4], *map(int, a[5:8]));"
        "asyncio.run(work(a[1], a[2], a[3], limit, int(a[8])))"
    )
    numbers = (limit.requests_per_minute, limit.tokens_per_minute, limit.at_once, lease_ms)
    words = [store_url, service, run, limit.name, *map(str, numbers)]
    return subprocess.Popen([sys.executable, "-c", code, *words])


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


async def measure(
    limit: CallLimit, steady_s: float, kills: int, recovery_s: float
) -> tuple[Counting, float, float]:
    """Return the server, when steady operation began, and when it began to refuse."""
    server = Counting()
    runner, service = await server.serve()
    with TemporaryDirectory() as folder, EmbeddedServer(Path(folder)) as embedded:
        args = (limit, 10_000)
        fleet = [
            start(embedded.url, service, run, *args) for run, n in RUNS.items() for _ in range(n)
        ]
        try:
            while len({each.process for each in server.arrivals}) < len(fleet):
                await asyncio.sleep(0.1)
            began_s = time.monotonic()
            for number in range(kills):
                await asyncio.sleep(steady_s / (kills + 1))
                victim = 3 * number % len(fleet)
                await asyncio.to_thread(end, fleet[victim])
                run = "a" if victim < RUNS["a"] else "b"
                fleet[victim] = start(embedded.url, service, run, *args)
            await asyncio.sleep(began_s + steady_s - time.monotonic())
            refused_s = time.monotonic()
            server.refuses_until_s = refused_s + REFUSAL_S
            await asyncio.sleep(recovery_s)
        finally:
            for process in fleet:
                with suppress(ProcessLookupError):
                    end(process)
            await runner.cleanup()
    return server, began_s, refused_s


def most_in(times: list[float], window_s: float) -> int:
    """Return the largest number of times within any window of that length."""
    most = first = 0
    for last, at_s in enumerate(times):
        while times[first] <= at_s - window_s:
            first += 1
        most = max(most, last - first + 1)
    return most


def draw(times: list[float], began_s: float, refused_s: float, limit: int, file: Path) -> None:
    from matplotlib.figure import Figure as Canvas  # not in every worker

    canvas = Canvas(figsize=(9, 3.4), layout="constrained")
    axes = canvas.add_subplot()
    counts = Counter(int((at_s - began_s) // 5) for at_s in times)
    seconds = range(min(counts), max(counts))  # the last one is not whole
    axes.step([5 * n for n in seconds], [12 * counts[n] for n in seconds], where="post")
    axes.axhline(limit, color="tab:red", linestyle="--", label="the limit")
    axes.axvspan(refused_s - began_s, refused_s - began_s + REFUSAL_S, alpha=0.3, label="429")
    axes.set(xlabel="seconds", ylabel="requests a minute, in 5 s", ylim=(0, limit * 1.15))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    canvas.savefig(file, dpi=110)


def main(
    per_minute: Annotated[int, typer.Option(help="the limit")] = 600,
    steady_s: Annotated[float, typer.Option(help="time with kills, which is counted")] = 60.0,
    kills: Annotated[int, typer.Option(help="processes killed in that time, evenly")] = 1,
    recovery_s: Annotated[float, typer.Option(help="time after a refusal")] = 76.0,
    plot: Annotated[Path | None, typer.Option(help="file for a picture")] = None,
) -> None:
    """Print what arrived: most in any minute, share of the limit, shares of the two runs."""
    limit = CallLimit("bench", requests_per_minute=per_minute)
    server, began_s, refused_s = asyncio.run(measure(limit, steady_s, kills, recovery_s))
    times = [each.at_s for each in server.arrivals]
    steady = [each for each in server.arrivals if began_s <= each.at_s < refused_s]
    shares = Counter(each.run for each in steady)
    refused = [each for each in server.arrivals if each.is_refused]
    again_s = refused_s + REFUSAL_S
    rates = {
        s: most_in([t for t in times if again_s + s - 10 <= t < again_s + s], 10.0) * 6
        for s in (10, 70)
    }
    used = len(steady) * MINUTE_S / (refused_s - began_s) / per_minute
    for name, value in {
        "most requests in any minute": most_in(times, MINUTE_S),
        "share of the limit used, with kills": round(used, 3),
        "processes killed": kills,
        "share of run b, with a quarter of the workers": round(shares["b"] / len(steady), 3),
        "refused calls": len(refused),
        "requests a minute, 0 to 10 s after the refusal": rates[10],
        "requests a minute, 60 to 70 s after it": rates[70],
    }.items():
        typer.echo(f"{name}: {value}")
    typer.echo(str(machine_facts()))
    if plot:
        draw(times, began_s, refused_s, per_minute, plot)


if __name__ == "__main__":
    typer.run(main)
