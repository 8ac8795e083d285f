"""`python -m benchmarks.peers.stream_crash …/pipelinerl/streams.py`: that stream after a kill.

PipelineRL's writer and reader run in processes of their own, with a server as its launcher starts
one. A process gets SIGKILL in the middle of 2,000 entries, and is started again.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import redis
import typer

from buffer.redis.server.embedded import valkey_binary

ENTRIES, MIDDLE = 2000, 500

CLIENT = """
import importlib.util, itertools, pathlib, sys, time
path, port, role = sys.argv[1:]
spec = importlib.util.spec_from_file_location("streams", path)
streams = importlib.util.module_from_spec(spec)
spec.loader.exec_module(streams)
streams.set_streams_backend("redis", host="127.0.0.1", port=int(port))
place = streams.SingleStreamSpec(exp_path=pathlib.Path("."), topic="actor")
if role == "writer":
    with streams.write_to_streams(place) as stream:
        for number in itertools.count():
            stream.write({"number": number})
            print(number, flush=True)
            time.sleep(0.0005)
with streams.read_stream(place) as stream:
    for entry in stream.read():
        print(entry["number"], flush=True)
"""


class Client:
    """A process that writes or reads; it prints the number of each entry."""

    def __init__(self, file: Path, port: int, role: str) -> None:
        command = [sys.executable, "-c", CLIENT, str(file), str(port), role]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def numbers(self, count: int) -> list[int]:
        """Return the next numbers that it prints; fewer if it ends."""
        assert self.process.stdout
        return [int(line) for line, _ in zip(self.process.stdout, range(count), strict=False)]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def error(self) -> str:
        """Return the last line of its error, or that it goes on after 10 s."""
        try:
            _, said = self.process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            return "goes on"
        return said.strip().rpartition("\n")[2]


@contextmanager
def server(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server as `run_redis` of pipelinerl/launch.py does, but on loopback only."""
    command = [str(valkey_binary()), "--bind", "127.0.0.1", "--port", str(port)]
    command += ["--dir", str(folder), "--save", "3600 1", "--logfile", "redis.log"]
    process = subprocess.Popen(command)
    try:
        with closing(redis.Redis(port=port)) as client:
            while not _answers(client):
                time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def main(file: Annotated[Path, typer.Argument(help="streams.py of PipelineRL")]) -> None:
    """Print what is read twice and what is lost after the end of reader, writer and server."""
    with socket.socket() as probe, TemporaryDirectory() as place:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        with server(Path(place), port):
            writer, trainer = Client(file, port, "writer"), Client(file, port, "reader")
            writer.numbers(ENTRIES)
            trained = trainer.numbers(MIDDLE)
            trainer.kill()
            trainer = Client(file, port, "reader")
            again = {*trainer.numbers(MIDDLE)} & {*trained}
            typer.echo(f"reader killed behind {len(trained)} entries: {len(again)} are read again")
            trainer.numbers(ENTRIES - MIDDLE)
        with server(Path(place), port):
            with closing(redis.Redis(port=port)) as client:
                left = client.xlen("actor/0/0")
            typer.echo(f"server killed behind {ENTRIES} entries: it has {left} of them")
            typer.echo(f"its writer: {writer.error()}")
            typer.echo(f"its reader: {trainer.error()}")
            for client_process in (writer, trainer):
                client_process.kill()


if __name__ == "__main__":
    typer.run(main)
