"""Whether the account of tokens closes, and agrees with what the engines say that they sampled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import redis

from proofs.chaos.history import Event

NO_ROW = ("sampled", "prompt", "again")


def read_account(client: redis.Redis, run: str, tasks: list[str]) -> dict[str, dict[str, int]]:
    """Read key by key what each task's counters, records and workers have, in tokens."""
    raw: Any = client
    start = f"rmq:{{{run}}}:"
    found = {}
    for task in tasks:
        counters = {
            name.decode().removeprefix("tokens_"): int(value)
            for name, value in raw.hgetall(f"{start}progress:{task}").items()
            if name.startswith(b"tokens_")
        }
        records = raw.scan_iter(f"{start}group:{task}-*", count=1000)
        made = sum(int(raw.hget(record, "made") or 0) for record in records)
        running = 0
        for worker in raw.zrange(f"{start}workers", 0, -1):
            totals = raw.hget(f"{start}tokens:{worker.decode()}", task) or b"0 0"
            heard, accounted = map(int, totals.split())
            running += heard - accounted
        rows = sum(number for name, number in counters.items() if name not in NO_ROW)
        found[task] = {**counters, "rows": rows, "records": made, "running": running}
    return found


def faults(
    final: Mapping[str, Mapping[str, int]],
    by_op: Mapping[str, Sequence[Event]],
    *,
    lost_data: bool,
) -> Iterator[str]:
    """Yield where sampled tokens are not rows and groups, or not those of the engines.

    What processes that were killed had sampled since they were last heard of is unknown: only what
    those have that left in order is the least. A server that lost data may have lost the last
    words of one that has left.
    """
    broken = {event["pid"] for event in by_op["exit"] if event["code"]}
    most, least = defaultdict[str, int](int), defaultdict[str, int](int)
    for event in by_op["sampled"]:
        task = event["gid"].rpartition("-")[0]
        most[task] += event["tokens"]
        least[task] += event["tokens"] if event["pid"] not in broken and not lost_data else 0
    for task, found in final.items():
        sampled = found.get("sampled", 0)
        if sampled != found["rows"] + found["records"]:
            yield (
                f"{task}: {sampled} tokens sampled, {found['rows']} in rows, "
                f"{found['records']} in groups"
            )
        total = sampled + found["running"]
        if not least[task] <= total <= most[task]:
            yield f"{task}: {total} tokens counted, engines sampled {least[task]} to {most[task]}"
