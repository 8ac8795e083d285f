"""Where every group is at the end, read key by key with a plain client: no code of the queue is
asked.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import redis

LANES, POOLS = ("eval", "resume", "fresh"), ("completed", "aborted", "expired")
ENDS = ("archived", "filtered", "dropped", "skipped")
COUNTED = (*ENDS, "dead", "running", "taken", "enqueued", "put", "imported", "cursor", "reentered")


def look(client: redis.Redis, run: str, tasks: list[str]) -> dict[str, Any]:
    """`stages` of every gid, `cursors` of the tasks, what is counted of each, the ledger. Nobody
    may work meanwhile.
    """
    raw: Any = client
    start = f"rmq:{{{run}}}:"
    stages = defaultdict(list)

    def found(stage: str, gids: list[bytes]) -> None:
        for gid in gids:
            stages[gid.decode()].append(stage)

    for task in tasks:
        for lane in LANES:
            found(
                "waiting", [entry[b"gid"] for _, entry in raw.xrange(f"{start}jobs:{task}:{lane}")]
            )
        for pool in POOLS:
            members = raw.zrange(f"{start}pool:{task}:{pool}", 0, -1)
            found(pool, [member.partition(b":")[2] for member in members])
        for end in ENDS:
            bits = raw.get(f"{start}ended:{task}:{end}") or b""
            found(end, [f"{task}-{draw:010d}".encode() for draw in _ones(bits)])
    for worker in raw.zrange(f"{start}leases", 0, -1):
        held = raw.hkeys(f"{start}leased:{worker.decode()}")
        found("running", [gid for gid in held if gid != b"digest"])
    found("dead", raw.zrange(f"{start}dead", 0, -1))
    ledger = {
        k.decode(): int(v) for k, v in raw.hgetall(f"{start}ledger:train").items() if v.isdigit()
    }
    for step in range(ledger.get("freed", 0) + 1, ledger.get("taken", 0) + 1):
        found(
            "taken", [line.split()[0] for line in raw.lrange(f"{start}batch:train:{step}", 1, -1)]
        )
    counters = {task: _counters(raw.hgetall(f"{start}progress:{task}")) for task in tasks}
    cursors = {task: counted["cursor"] for task, counted in counters.items()}
    return {"stages": dict(stages), "cursors": cursors, "ledger": ledger, "counters": counters}


def _counters(fields: dict[bytes, bytes]) -> dict[str, int]:
    return {name: int(fields.get(name.encode(), 0)) for name in COUNTED}


def _ones(bits: bytes) -> list[int]:
    """The numbers of the bits that are set, as SETBIT counts them."""
    return [
        8 * at + bit for at, byte in enumerate(bits) for bit in range(8) if byte >> (7 - bit) & 1
    ]
