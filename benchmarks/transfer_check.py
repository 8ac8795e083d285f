"""Check the transfer of weights between two processes, bit by bit, also after one was killed.

    python -m benchmarks.transfer_check check --backend nccl  on a machine with two GPUs
    python -m benchmarks.transfer_check check                    gloo, anywhere

The trainer is this process, on the first GPU; each engine's process is another one, on the second.
Exit code 0: all came, and the killed one held up nobody.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from safetensors.numpy import save_file

from buffer.weights.transport import Announcement
from consumer.senders.tensor_server import MemorySnapshot, TensorServer
from producer_workers.engines.tensor_receiver import TensorReceiver

app = typer.Typer(add_completion=False)
LIMIT_S = 300.0


@app.command()
def check(
    backend: Annotated[str, typer.Option(help="gloo or nccl")] = "gloo",
    megabytes: Annotated[int, typer.Option(help="size of the weights", min=1)] = 1000,
) -> None:
    """Whole, killed at a random moment, whole again."""
    server = TensorServer("127.0.0.1", backend)
    with closing(server):
        snapshot = MemorySnapshot.take(
            "check:1", lambda folder: _save(folder, megabytes), "rolloutmq-check-"
        )
        facts = snapshot.facts()
        shapes = snapshot.shapes()
        met = ("check:1", backend, "127.0.0.1", server.port, server.token, "", snapshot.checksum)
        server.offer(snapshot)
        announced = Announcement(*met, facts, shapes)
        for what, kill in (
            ("whole", False),
            ("killed in the middle", True),
            ("whole again", False),
        ):
            typer.echo(f"{what}: {_transfer(announced, kill=kill)}")


@app.command(hidden=True)
def receive() -> None:
    """Run an engine's process, which receives the announcement on stdin."""
    if torch.cuda.device_count() > 1:
        torch.cuda.set_device(1)
    announced = Announcement.parse(sys.stdin.readline())
    typer.echo("ready")
    began = time.perf_counter()
    receiver = TensorReceiver(announced, limit_s=LIMIT_S)
    while not receiver.is_done():
        time.sleep(0.001)
    typer.echo(
        f"{1000 * (time.perf_counter() - began):.0f} ms for "
        f"{sum(f.bytes for f in announced.files.values())} B"
    )


def _transfer(announced: Announcement, *, kill: bool) -> str:
    command = [sys.executable, "-m", "benchmarks.transfer_check", "receive"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(announced.to_json().decode() + "\n")
        process.stdin.flush()
        process.stdout.readline()
        if kill:
            time.sleep(0.05)
            process.kill()
            return "SIGKILL"
        said = process.stdout.readline()
    if process.returncode:
        raise typer.Exit(1)
    return said.strip()


def _save(folder: Path, megabytes: int) -> None:
    chance = np.random.default_rng(0)
    save_file(
        {f"w{n}": chance.random(250_000, np.float32) for n in range(megabytes)},
        folder / "w.safetensors",
    )


if __name__ == "__main__":
    app()
