"""One end of a transport of weights, as a process that stops in the middle to be killed.

    python -m tests.pipeline.weights_process sender TRANSPORT WHOLE_EVERY URL RUN FOLDER
    python -m tests.pipeline.weights_process receiver TRANSPORT WHOLE_EVERY URL RUN ADDRESS CHECKSUM

The sender prints the address and checksum of version 1, then "middle" in the middle of version 2;
the receiver "middle" in the middle of the version that it is given.
"""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.weights import checksums, delta
from buffer.weights.checksums import RawTensor, WrittenFiles, write_tensors
from buffer.weights.transport import PublishedWeights, Save, TransportName
from buffer.weights.transports import WeightsReceiver, open_sender
from buffer.wire.rollout import PolicyVersion

LINEAGE = "l1"
WORDS = 100_000

MIDDLES: dict[tuple[str, str, bool], tuple[Any, str, int]] = {
    ("sender", "folder", False): (checksums, "write_at", 1),
    ("sender", "redis", False): (Store, "send", 6),
    ("sender", "redis", True): (delta, "_pack", 1),
    ("receiver", "folder", False): (checksums, "_hash_part", 1),
    ("receiver", "redis", False): (Store, "send", 3),
    ("receiver", "redis", True): (delta, "_unpack", 1),
}
"""By end, transport and whether it is changes: which call, and how many of them, are made."""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def words(version: int) -> NDArray[np.uint16]:
    """Return the weights of a version: each changes a hundredth of those before."""
    found = np.arange(WORDS, dtype=np.uint16)
    for number in range(version):
        found[number::100] += 1
    return found


def save(version: int) -> Save:
    def write(folder: Path) -> WrittenFiles:
        (folder / "config.json").write_text("{}", encoding="utf-8")
        tensors = {"w": RawTensor("I16", (WORDS,), words(version).data.cast("B"))}
        file = folder / "model.safetensors"
        return WrittenFiles({file.name: write_tensors(file, tensors, {})})

    return write


def stop_after(owner: Any, name: str, count: int) -> None:
    """Let `count` calls end, report "middle", and do nothing more."""
    call = getattr(owner, name)
    calls = itertools.count(1)

    def counted(*args: Any, **kwargs: Any) -> Any:
        done = call(*args, **kwargs)
        if next(calls) == count:
            say("middle")
            threading.Event().wait()
        return done

    setattr(owner, name, counted)


def send(run: Run, folder: Path, transport: TransportName, delta_base_every: int) -> None:
    sender = open_sender(
        transport, run.store, run.keys, folder, keep=3, delta_base_every=delta_base_every
    )
    published = sender.write(PolicyVersion(LINEAGE, 1), save(1))
    say(f"{published.address} {published.checksum}")
    stop_after(*MIDDLES["sender", transport, delta_base_every > 1])
    sender.write(PolicyVersion(LINEAGE, 2), save(2))


def receive(run: Run, published: PublishedWeights, transport: str, delta_base_every: int) -> None:
    stop_after(*MIDDLES["receiver", transport, delta_base_every > 1])
    WeightsReceiver(run.store, run.keys).fetch(published)


def main(end: str, transport: Any, delta_base_every: str, url: str, name: str, *rest: str) -> None:
    run = Run.open(Store(url, deadline_s=400.0), name)
    if end == "sender":
        send(run, Path(rest[0]), transport, int(delta_base_every))
    else:
        receive(run, PublishedWeights(*rest), transport, int(delta_base_every))


if __name__ == "__main__":
    main(*sys.argv[1:])
