"""One end of a bucket, as a process: it does each thing after a line of its input.

    python -m tests.extensions.bucket.bucket_process sender URL FOLDER
    python -m tests.extensions.bucket.bucket_process receiver REDIS RUN ADDRESS CHECKSUM

The sender prints address and checksum of versions 1 and 2, the receiver the folder of its version.
"""

from __future__ import annotations

import sys
from pathlib import Path

from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.weights.copies import CopySender
from buffer.weights.transport import PublishedWeights
from buffer.weights.transports import WeightsReceiver, open_versions
from buffer.wire.rollout import PolicyVersion
from tests.extensions.bucket.versions import LINEAGE, save


def say(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201


def main(end: str, *rest: str) -> None:
    if end == "sender":
        sender = CopySender(open_versions(rest[0]), Path(rest[1]))
        for version in (1, 2):
            sys.stdin.readline()
            say(*sender.write(PolicyVersion(LINEAGE, version), save(version)))
    else:
        store, url = Store(rest[0], deadline_s=400.0), rest[2].rpartition("/")[0]
        receiver = WeightsReceiver(store, Keys(rest[1]), url)
        sys.stdin.readline()
        say(receiver.fetch(PublishedWeights(*rest[2:])))


if __name__ == "__main__":
    main(*sys.argv[1:])
