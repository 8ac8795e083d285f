"""What a damaged run should be: every key of its index, as a function of what is left of it.

    records, ends, manifests, checkpoint ─▶ groups, batches ─▶ queues, pools, indexes ─▶ counters

Nobody holds a role, and no worker is registered. Payloads are never changed; those that nothing
names any more are listed as garbage.
"""

from __future__ import annotations

import re

from buffer.control.control import Mode
from buffer.ledger.position import Position
from buffer.maintenance.repair.accounts import accounts, byte_count
from buffer.maintenance.repair.batches import LEDGERS, LedgerRepair, dissolve
from buffer.maintenance.repair.draws import close_what_cannot_return, lose_unusable, settle_ends
from buffer.maintenance.repair.garbage import garbage
from buffer.maintenance.repair.holds import holds, rest
from buffer.maintenance.repair.image import Hash, Image, Value
from buffer.maintenance.repair.queues import letters, pools, queues
from buffer.maintenance.repair.records import count, is_count
from buffer.maintenance.repair.state import Rebuilt
from buffer.model.ids import LANES
from buffer.model.limits import RunLimits
from buffer.redis.key_fields import are_settings
from buffer.redis.keys import TABLE
from buffer.rollouts.rollout import FIRST_WEIGHTS

_FORK = re.compile(r"[^:\s]+:\d+")
ROLE = re.compile(r"(trainer|producer)(_(seen_ms|name|turns|doing|doing_ms|closed))?|repaired")
"""Fields of `control` about the holders of roles, who are gone, and the mark of a repair."""

_MODES = ("operator_mode", "trainer_mode")
_STRICTNESS = (Mode.RUN, Mode.KEEP, Mode.DRAIN, Mode.ABORT, Mode.FINISH)
"""As in include/control_changes.lua: the stricter mode of operator and trainer applies."""


def rebuild(
    image: Image, limits: RunLimits, position: Position | None, now_ms: int
) -> tuple[Rebuilt, dict[str, Value]]:
    """Return what was decided, and the value of every key that the run should have."""
    state = Rebuilt.read(image, limits, position, now_ms)
    for ledger in LEDGERS:
        LedgerRepair(state, ledger).run()
    dissolve(state)
    settle_ends(state)
    lose_unusable(state)
    close_what_cannot_return(state)
    rest(state)
    values = settings(image) | others(image) | control(image)
    values |= queues(state) | pools(state) | letters(state) | holds(state)
    values |= accounts(state) | byte_count(state) | _batches(state) | _ends(state)
    values["lineages"] = Value("list", lineages(state))
    values["garbage"] = Value("set", garbage(state))
    values |= {f"group:{gid}": Value("hash", record) for gid, record in state.records.items()}
    return state, {name: value for name, value in values.items() if value.data}


def _batches(state: Rebuilt) -> dict[str, Value]:
    """Return ledgers and manifests; those that are archived and retained stay as they are."""
    found = {}
    for ledger in LEDGERS:
        fields = state.ledgers[ledger]
        if any(value != "0" for value in fields.values()) or ledger == "train":
            found[f"ledger:{ledger}"] = Value("hash", fields)
        for step, lines in (state.archived[ledger] | state.batches[ledger]).items():
            found[f"batch:{ledger}:{step}"] = Value("list", lines)
    return found


def _ends(state: Rebuilt) -> dict[str, Value]:
    found = {}
    for task, ends in state.ends.items():
        for end, draws in ends.items():
            name = f"ended:{task}:{end}"
            known = state.image.values.get(name)
            same = known and known.kind == "string" and state.image.bits(name) == draws
            found[name] = known if known and same else Value("string", _bitmap(draws))
    return found


def _bitmap(draws: set[int]) -> bytes:
    data = bytearray(max(draws, default=-1) // 8 + 1)
    for draw in draws:
        data[draw // 8] |= 0x80 >> draw % 8
    return bytes(data)


def settings(image: Image) -> dict[str, Value]:
    """Return the settings, twice: as they are, or as their copy where they cannot be read."""
    names = ("meta", "meta:copy")
    for fields in map(image.hash, names):
        if are_settings(fields):
            return {name: Value("hash", fields) for name in names}
    return {}


def others(image: Image) -> dict[str, Value]:
    """Return the keys that no group depends on, where they can be read."""
    values = {}
    for name in ("report", "events", "unpinned", "weights", "suspects", "audits", "snapshot_lock"):
        value = image.values.get(name)
        if value and value.kind == TABLE[name].type.lower():
            values[name] = value
    for kind, prefix in (("string", "weights:"), ("list", "bell:")):
        values |= {n: v for n, v in image.values.items() if n.startswith(prefix) and v.kind == kind}
    clock = image.hash("clock")
    values["clock"] = Value("hash", {n: v for n, v in clock.items() if is_count(v)})
    return values


def lineages(state: Rebuilt) -> list[str]:
    """Return the forks.

    One that cannot be read may have been at any step: all groups before it count as the oldest.
    """
    forks = state.image.lines("lineages")
    if not forks and (state.position or any(state.batches.values())):
        forks = [f"{state.position.lineage if state.position else ''}:0"]
    return [fork if _FORK.fullmatch(fork) else "unknown:0" for fork in forks]


def control(image: Image) -> dict[str, Value]:
    """Return the control state, with the modes that hold, and without holders of roles."""
    found = image.hash("control")
    fields: Hash = {name: value for name, value in found.items() if not ROLE.fullmatch(name)}
    for name in ("epoch", "changed_ms", "recovering"):
        if name in fields and not is_count(fields[name]):
            del fields[name]
    for name in _MODES:
        if fields.get(name) not in _STRICTNESS:
            fields[name] = Mode.RUN
        lanes = name.replace("mode", "lanes")
        if lanes in fields and not set(fields[lanes].split()) <= set(LANES):
            del fields[lanes]
    if not re.fullmatch(r"[^:\s]+:\d+", fields.get("weights", "")):
        # what every worker begins with; the trainer publishes newer ones when it opens the run
        fields |= {"weights": str(FIRST_WEIGHTS), "weights_path": "", "weights_checksum": ""}
    strictest = max(
        (fields[name] for name in _MODES), key=lambda mode: _STRICTNESS.index(Mode(mode))
    )
    open_lanes = [
        lane
        for lane in LANES
        if all(lane in fields.get(n.replace("mode", "lanes"), lane).split() for n in _MODES)
    ]
    lanes = fields.get("lanes", "")
    if set(lanes.split()) != set(open_lanes):
        lanes = " ".join(open_lanes)
    epoch = str(count(fields.get("epoch"), 1))
    return {
        "control": Value(
            "hash",
            fields | {"epoch": epoch, "mode": strictest, "lanes": lanes},
        )
    }
