"""`python -m benchmarks.fan_out [WORKERS] [GB]`: seconds until all workers have loaded new weights.

An event model of networks that this machine does not have. Weights are chunks. A network card sends
one chunk at a time, at its bandwidth, in both directions at once; a host passes a chunk on as soon
as it has it. All cards are equal, the switch between them is no limit, and nothing fails. Workers
load from the memory of their host once it has all chunks.

    flat           each worker fetches all chunks from the server
    one per host   one worker of each host does (buffer/weights/host_folders.py)
    tree of N      each host fetches from a host above it, the first N from the server
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.figure import Figure
from benchmarks.report import print_table

WORKERS_PER_HOST = 8
CHUNK_GB = 0.064
LOAD_GB_S = 10.0
"""of one worker, from memory of its host to its device"""
LATENCY_S = 0.001
NETWORKS_GBIT_S = (10, 25, 100, 400)
TREES = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Spread:
    """Who fetches from the server: the number of receivers, of which each serves `children`."""

    receivers: int
    children: int

    def seconds(self, gigabytes: float, gbit_s: float) -> float:
        """Return the seconds until the last receiver has the last chunk."""
        chunks = max(1, round(gigabytes / CHUNK_GB))
        chunk_s = gigabytes / chunks * 8 / gbit_s
        arrived = {0: [0.0] * chunks}  # of each node that has children left; the server is 0
        last = 0.0
        for sender in range(self.receivers + 1):
            first = sender * self.children + 1
            below = range(first, min(first + self.children, self.receivers + 1))
            times = arrived.pop(sender)
            last = max(last, times[-1])
            arrived |= {node: [] for node in below}
            free = 0.0
            for time in times:
                for node in below:
                    free = max(free, time) + chunk_s
                    arrived[node].append(free + LATENCY_S)
        return last


def spreads(workers: int) -> dict[str, Spread]:
    """Return the ways that are compared."""
    hosts = -(-workers // WORKERS_PER_HOST)
    flat = {"flat": Spread(workers, workers), "one per host": Spread(hosts, hosts)}
    return flat | {f"tree of {count}": Spread(hosts, count) for count in TREES}


def _figures(workers: int, gigabytes: float) -> Iterator[Figure]:
    for gbit_s in NETWORKS_GBIT_S:
        section = f"{gigabytes:g} GB to {workers} workers, {gbit_s} Gbit/s"
        for name, spread in spreads(workers).items():
            seconds = spread.seconds(gigabytes, gbit_s) + gigabytes / LOAD_GB_S
            yield Figure(section, name, seconds, "s")


if __name__ == "__main__":
    workers = int((sys.argv[1:] or ["1000"])[0])
    print_table(list(_figures(workers, float((sys.argv[2:] or ["16"])[0]))))
