"""Estimate what a fleet asks of its Redis or Valkey server, and which part of that is full first.

The constants are those of `python -m benchmarks.sizing`, which measures them on any machine: the
embedded Valkey by TCP, every write on disk, one core of a Xeon at 2.8 GHz that others used as well.
A server runs all scripts in one thread, so that one core carries them.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP_S = 600e-6
"""processor time of the server for a group, from enqueue to commit, without its bytes"""
BYTE_S = 3e-9
"""processor time for each byte of a group: received, written to the file, sent to the trainer"""
HEARTBEAT_S = 150e-6
"""processor time for a heartbeat, each 2 s from a worker (`python -m benchmarks scale`)"""

TOKEN_BYTES = 4 + 4 + 1
"""of a response token: its id, its logprob and its mask"""
TEXT_BYTES = 4
"""of the text of a token, as English has it"""
PROMPT_BYTES = 4 + TEXT_BYTES
"""of a prompt token, which a group has once"""
ROLLOUT_BYTES = 120
"""of a rollout: reward, spans, sampling parameters, names of fields"""
INDEX_BYTES = 4_000
"""memory for a group beside its payload"""
CALL_BYTES = 1_200
"""received for a group beside its payload and its prompt"""
FILE_BYTES = 3_100
"""of the append-only file for a group beside its payload and its prompt"""
REWRITTEN = 2
"""times each byte is written: the file is rewritten when it has doubled"""
CALLS = 4
"""writing calls for a group; with `appendfsync always` each waits for the disk"""

HELD_BATCHES = 13
"""batches on the server, by the defaults of [trainer]: 10 since the older of two checkpoints that
are 5 steps apart, one that is trained, two that are ready or running
"""

CORE = 0.7
"""share of its core at which a server begins to answer late"""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the server's machine can do, in bytes and bytes per second."""

    memory: float
    network: float  # in each direction
    disk: float


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What `workers` ask of the server: shares of a core, bytes, and bytes and calls per second."""

    workers: int
    group_bytes: float
    groups_per_s: float
    cores: float
    memory: float
    received: float
    sent: float
    written: float
    calls: float

    def shares(self, machine: Machine) -> dict[str, float]:
        """Return how full each part is, 1 at its limit; the fullest first."""
        full = {
            "processor": self.cores / CORE,
            "network": max(self.received, self.sent) / machine.network,
            "disk": self.written / machine.disk,
        }
        return dict(sorted(full.items(), key=lambda item: -item[1]))

    def most_workers(self, machine: Machine) -> int:
        """Return how many such workers fill the processor, the network or the disk."""
        return int(self.workers / max(self.shares(machine).values()))


def group_bytes(samples: int, prompt: float, response: float) -> float:
    """Return the bytes of a group of `samples` responses, by tokens of prompt and response."""
    return prompt * PROMPT_BYTES + samples * (ROLLOUT_BYTES + response * (TOKEN_BYTES + TEXT_BYTES))


def server_load(
    *, workers: int, tokens_per_s: float, samples: int, prompt: float, response: float, batch: int
) -> ServerLoad:
    """Return what workers with `tokens_per_s` each ask; `batch`: groups of a train step."""
    size = group_bytes(samples, prompt, response)
    groups = workers * tokens_per_s / (samples * response)
    beats = workers / 2
    asked = prompt * PROMPT_BYTES  # sent to the worker, then in the group again
    return ServerLoad(
        workers=workers,
        group_bytes=size,
        groups_per_s=groups,
        cores=groups * (GROUP_S + BYTE_S * size) + beats * HEARTBEAT_S,
        memory=HELD_BATCHES * batch * (size + INDEX_BYTES),
        received=groups * (size + asked + CALL_BYTES),
        sent=groups * (size + asked),
        written=REWRITTEN * groups * (size + asked + FILE_BYTES),
        calls=CALLS * groups + beats,
    )
