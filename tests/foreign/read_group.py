"""A group of rolloutmq, read without rolloutmq: `python read_group.py FILE` prints its rollouts."""

import sys
from pathlib import Path

import msgpack
import numpy as np

group = msgpack.unpackb(Path(sys.argv[1]).read_bytes())


def column(name, dtype):
    offset, *shape = group["columns"][name]
    return np.frombuffer(group["data"], dtype, np.prod(shape), offset).reshape(shape)


statuses = ("init", "completed", "aborted", "expired", "failed", "filtered", "archived")
response_ids = column("response_ids", "<i4")
lengths = column("lengths", "<i4")
for n, (length, end) in enumerate(zip(lengths, lengths.cumsum(), strict=True)):
    reward = None
    if "rewards" in group:
        row = zip(group["rewards"], column("rewards", "<f8")[n].tolist(), strict=True)
        reward = {name: value for name, value in row if value == value} or None
    index = column("indices", "<i4")[n]
    status = statuses[column("statuses", "|u1")[n]]
    tokens = response_ids[end - length : end].tolist()
    sys.stdout.write(f"{index} {status} {reward} {tokens}\n")
