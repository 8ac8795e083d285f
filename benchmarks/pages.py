"""Measure what open pages of `rolloutmq web` cost the server per second, by number of pages.

    python -m benchmarks.pages

The run has 64 workers, and holds 1,000 ready groups. One look a second is shared by all pages, so a
second page should cost nothing; the server's own second (its clock, expiry) is measured first and
taken off.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import sample
from benchmarks.bench_run import BenchRun
from benchmarks.server import BenchServer, durable_server
from buffer.ids import new_nonce

PAGES = (0, 1, 8, 64)
WORKERS = 64
READY = 1000
SECONDS = 15.0
WORKER_MS = 0.45
"""Of a core, per second: what one worker with 32 groups costs (`scale.py`)."""


def main() -> None:
    with durable_server() as server:
        bench = BenchRun(server)
        for number in range(WORKERS):
            bench.run.fleet.register(
                f"worker-{number}", new_nonce(), {"engine": "none", "host": "here"}
            )
        bench.make_ready(READY, sample.SMALL)
        idle_commands, idle_ms = spent(server)
        print("pages  commands/s  ms of a core/s  workers that cost as much")
        for pages in PAGES:
            with looking(server, pages):
                commands, cpu_ms = spent(server)
            more = commands - idle_commands
            more_ms = cpu_ms - idle_ms
            print(
                f"{pages:5}  {more:10.1f}  {more_ms:14.2f}  {more_ms / WORKER_MS:25.1f}", flush=True
            )


def spent(server: BenchServer) -> tuple[float, float]:
    """(commands, milliseconds of processor time) per second, over SECONDS."""

    def look() -> tuple[int, float]:
        told = server.raw.info()
        return told["total_commands_processed"], 1000 * (
            told["used_cpu_user"] + told["used_cpu_sys"]
        )

    began, (commands, cpu_ms) = time.monotonic(), look()
    time.sleep(SECONDS)
    seconds, (later, later_ms) = time.monotonic() - began, look()
    return (later - commands) / seconds, (later_ms - cpu_ms) / seconds


@contextmanager
def looking(server: BenchServer, pages: int) -> Iterator[None]:
    """`rolloutmq web` with so many pages that listen, as browsers do."""
    command = [
        sys.executable,
        "-m",
        "rolloutmq",
        "web",
        "--port",
        "0",
        "--redis-url",
        server.store.url,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "200"}
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().split("/#")[0].rpartition(":")[2])
        streams = [http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(pages)]
        try:
            answers = []
            for stream in streams:
                stream.request("GET", "/api/stream")
                answers.append(stream.getresponse())
            for answer in answers:
                assert answer.readline().startswith(b"data: "), answer.status
            yield
        finally:
            for stream in streams:
                stream.close()
            process.send_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
