"""The structures in which living groups stand, from their records: queues, pools, indexes."""

from __future__ import annotations

import math

import orjson

from buffer.ids import LANES, POOLS
from buffer.maintenance.repair.image import Entry, Hash, Value, ZSet
from buffer.maintenance.repair.records import count, is_count
from buffer.maintenance.repair.state import Rebuilt

LETTER = orjson.dumps({"reason": "the reason was lost"})
"""A dead letter whose reason is gone."""


def queues(state: Rebuilt) -> dict[str, Value]:
    """Return the streams of jobs, and set the entry of each waiting group."""
    found = {}
    for task in state.limits.tasks:
        for lane in LANES:
            name = f"jobs:{task}:{lane}"
            waiting = {
                gid: record
                for gid, record in state.records.items()
                if (record["stage"], record["task"], record.get("lane")) == ("waiting", task, lane)
            }
            found[name] = Value("stream", _stream(state.image.stream(name), waiting))
    return found


def _stream(entries: list[Entry], waiting: dict[str, Hash]) -> list[Entry]:
    """Keep the entries of waiting groups, in order, and add the groups that have none."""
    kept = []
    left = dict(waiting)
    for number, gid, _ in entries:
        record = left.get(gid)
        if record and record.get("entry") in (number, "", None):
            kept.append((number, gid, record["payload"]))
            record["entry"] = number
            del left[gid]
    ms, _, sequence = (kept[-1][0] if kept else "0-0").partition("-")
    for step, (gid, record) in enumerate(sorted(left.items()), 1):
        record["entry"] = f"{ms}-{int(sequence) + step}"
        kept.append((record["entry"], gid, record["payload"]))
    return kept


def pools(state: Rebuilt) -> dict[str, Value]:
    """Return the pools and the index of ages; an index of another order is filled by a take."""
    number_arrivals(state)
    found: dict[str, ZSet] = {}
    for task in state.limits.tasks:
        found |= {f"pool:{task}:{status}": {} for status in POOLS} | {f"age:{task}": {}}
    for gid, record in state.records.items():
        task = record["task"]
        if record["stage"] == "pool":
            name = f"pool:{task}:{record['status']}"
            member = f"{record['arrival']}:{gid}"
            found[name][member] = _score(state, name, member, record)
        elif record["stage"] == "waiting" and record["payload"] != "init" and record["version"]:
            found[f"age:{task}"][gid] = _older(state, f"age:{task}", gid, float(record["version"]))
            continue
        known = state.image.zset(f"age:{task}").get(gid)
        # its worker reports the age of a running group
        if record["stage"] == "running" and known is not None:
            found[f"age:{task}"][gid] = known
    for task in state.limits.tasks:
        index = f"order:{task}:completed"
        kept = state.image.zset(index)
        ready = found[f"pool:{task}:completed"]
        # a take fills it where groups are missing
        found[index] = {member: place for member, place in kept.items() if member in ready}
    return {name: Value("zset", members) for name, members in found.items()}


def number_arrivals(state: Rebuilt) -> None:
    """Give a number to each group of a pool or batch that has none, or that of another."""
    for task in state.limits.tasks:
        own = [record for record in state.records.values() if record["task"] == task]
        held = [record for record in own if record["stage"] in ("pool", "taken")]
        seen: set[str] = set()
        newest = max((count(record.get("arrival")) for record in held), default=0)
        newest = max(newest, count(state.image.hash(f"progress:{task}").get("arrivals")))
        for record in held:
            arrival = record.get("arrival", "")
            if not is_count(arrival) or len(arrival) != 10 or arrival in seen:
                newest += 1
                record["arrival"] = f"{newest:010d}"
            seen.add(record["arrival"])


def _score(state: Rebuilt, name: str, member: str, record: Hash) -> float:
    """Return the version from which a group is too old (include/staleness.lua)."""
    if record["version"] == "" or record["status"] == "expired":
        return math.inf
    version = _living(state, record.get("lineage", ""), int(record["version"]))
    lag = state.limits.token_lag(record["task"])
    last = record.get("last", "")
    if lag != "" and is_count(last):
        version = min(version, _living(state, record.get("last_lineage", ""), int(last)) - int(lag))
    return _older(state, name, member, float(version))


def _older(state: Rebuilt, name: str, member: str, score: float) -> float:
    """Return the score that a member has, unless it makes the group younger than it is."""
    found = state.image.zset(name).get(member)
    return found if found is not None and found < score and found >= 0 else score


def _living(state: Rebuilt, lineage: str, version: int) -> int:
    """Return the version that counts: at most every fork opened after its lineage (I8)."""
    for fork in reversed(state.image.lines("lineages")):
        name, _, step = fork.rpartition(":")
        if name == lineage:
            break
        version = min(version, count(step))
    return version


def letters(state: Rebuilt) -> dict[str, Value]:
    """Return the dead groups and their letters."""
    dead = [gid for gid, record in state.records.items() if record["stage"] == "dead"]
    times = state.image.zset("dead")
    found = {"dead": Value("zset", {gid: times.get(gid, float(state.now_ms)) for gid in dead})}
    for gid in dead:
        value = state.image.values.get(f"dead:{gid}")
        is_whole = value is not None and value.kind == "string" and _is_object(value.data)
        found[f"dead:{gid}"] = value if value and is_whole else Value("string", LETTER)
    return found


def _is_object(data: bytes) -> bool:
    try:
        return isinstance(orjson.loads(data), dict)
    except orjson.JSONDecodeError:
        return False
