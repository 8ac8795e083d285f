"""A worker as a process of its own that submits garbage as fast as it can, whatever it is answered.

usage: python -m tests.consumer.handle.flood URL RUN NAME SEED
"""

from __future__ import annotations

import random
import sys
import time

from buffer.errors import Fenced
from buffer.groups.submit import Submission
from buffer.ids import new_nonce
from buffer.job import Job, Result
from buffer.redis.store import Store
from buffer.run import Run
from buffer.wire.rollout import Status
from tests.buffer.scene import extend


def garbage(dice: random.Random, good: bytes) -> bytes:
    return dice.choice(
        [b"", good[: dice.randrange(len(good))], dice.randbytes(200), b"\x91" * 5000, good + b"x"]
    )


def submit(run: Run, worker: str, job: Job, data: bytes) -> None:
    """Submit the description of a good group, with other bytes as its payload."""
    group = extend(run.buffer.read(job.prompt), Status.COMPLETED, run.control.state().weights)
    ref, commands = run.payloads.commands(job.gid, job.token, [data])
    run.store.write("payload write", commands)
    submission = Submission(run.store, run.keys, run.limits, run.payloads, None)
    run.store.call("submit", *submission.call(worker, Result(job, group, 4), ref))


def main(url: str, name: str, worker: str, seed: str) -> None:
    run = Run.open(Store(url), name)
    nonce = new_nonce()
    dice = random.Random(seed)
    run.fleet.register(worker, nonce, {"engine": "none"})
    while True:
        claim = run.jobs.claim(worker, nonce, new_nonce(), run.control.state().weights, 16)
        if claim.refusal == "UNKNOWN":
            run.fleet.register(worker, nonce, {"engine": "none"})
        for job in claim.jobs:
            try:
                submit(run, worker, job, garbage(dice, bytes(run.payloads.read(job.prompt))))
            except Fenced:
                continue
        if not claim.jobs:
            time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
