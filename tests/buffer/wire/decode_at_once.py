"""Threads of a fresh process that encode and decode their first group at the same moment.

usage: python -m tests.buffer.wire.decode_at_once
"""

from __future__ import annotations

import sys
import threading

import numpy as np

from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState

THREADS = 24


def main() -> None:
    sys.setswitchinterval(1e-6)  # as if the machine were busy
    together = threading.Barrier(THREADS)

    def work() -> None:
        state = RolloutState(prompt_ids=np.arange(4), messages=[{"role": "user", "content": "?"}])
        group = RolloutGroup("math-0000000001", "math", [state])
        together.wait()
        for _ in range(20):
            group_bytes.decode(group_bytes.encode(group))

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
