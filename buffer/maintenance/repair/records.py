"""The records of groups: which are usable, and what is missing in them that something else says."""

from __future__ import annotations

import re

from buffer.errors import ConfigError
from buffer.ids import LANES, POOLS, split_group_id
from buffer.maintenance.repair.image import Hash, Payloads
from buffer.model.limits import RunLimits

STAGES = ("waiting", "running", "pool", "taken", "dead")

_TOKEN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NUMBERS = ("submitted_ms", "tokens", "reward", "newest", "cut", "last", "claimed_ms")
"""Fields that a record may lack."""


def is_count(text: str | None) -> bool:
    """Return whether a text is a whole number as Redis writes it."""
    return bool(text) and text is not None and text.isascii() and text.isdecimal()


def count(text: str | None, default: int = 0) -> int:
    """Return a whole number, or `default` for any other text."""
    return int(text) if text is not None and is_count(text) else default


def is_number(text: str) -> bool:
    """Return whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_group(gid: str, limits: RunLimits) -> bool:
    """Return whether this is the id of a group that the run can have."""
    try:
        task, _ = split_group_id(gid)
    except ConfigError:
        return False
    return task in limits.tasks


def usable(gid: str, found: Hash, limits: RunLimits, payloads: Payloads) -> Hash | None:
    """Return the record of a group with its small faults corrected; None if it is of no use.

    What only the record says cannot be corrected: where the newest bytes are, and how old.
    """
    ages = found.get("version") is None or not (
        found["version"] == "" or is_count(found["version"])
    )
    numbers = ("chunks", "size", "samples")
    if ages or not all(is_count(found.get(name)) for name in numbers):
        return None
    if not _TOKEN.fullmatch(found.get("payload", "")):
        return None
    task, draw = split_group_id(gid)
    record = found | {"task": task, "draw": str(draw)}
    for name in ("tries", "aborts"):
        record[name] = str(count(found.get(name)))
    prompt = payloads.get((gid, "init"))
    # an archived prompt of a taken group may be gone: then its record is believed
    if not is_count(found.get("prompt")) or (prompt and str(prompt.size) != found["prompt"]):
        record["prompt"] = str(prompt.size if prompt else 0)
    if not re.fullmatch("[0-9a-f]*", record.get("crc", "?")):
        record["crc"] = ""  # not checked then; decoding is
    if record["version"]:
        # without one, every fork counts
        record.setdefault("lineage", "")
    for name in _NUMBERS:
        is_unset = name == "last" and record.get(name) == ""
        if name in record and not is_unset and not is_number(record[name]):
            del record[name]
    return _staged(record, limits)


def _staged(record: Hash, limits: RunLimits) -> Hash:
    """Correct the stage and what belongs to it."""
    if record.get("stage") not in STAGES:
        record["stage"] = "waiting" if record["payload"] == "init" else "pool"
    if record["stage"] == "pool" and record.get("status") not in POOLS:
        record["status"] = "aborted"
    if record["stage"] == "waiting" and record.get("lane") not in LANES:
        record["lane"] = queue_of(record, limits)
    return record


def queue_of(record: Hash, limits: RunLimits) -> str:
    """Return the lane in which a begun group waits."""
    return "eval" if limits.tasks[record["task"]].eval_of is not None else "resume"


def has_bytes(gid: str, record: Hash, payloads: Payloads) -> bool:
    """Return whether the prompt and the newest bytes of a group exist, as long as recorded."""
    prompt = payloads.get((gid, "init"))
    if prompt is None or str(prompt.size) != record["prompt"]:
        return False
    if record["payload"] == "init":
        return record["chunks"] == "1" and record["size"] == record["prompt"]
    return is_stored(gid, record["payload"], record["chunks"], record["size"], payloads)


def is_stored(gid: str, token: str, chunks: str, size: str, payloads: Payloads) -> bool:
    """Return whether all chunks of a payload exist, with as many bytes."""
    found = payloads.get((gid, token))
    return found is not None and (str(found.chunks), str(found.size)) == (chunks, size)
