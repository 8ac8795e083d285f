"""What one call of the server may change, by the state before it and after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from buffer.limits import RunLimits
from proofs.model_check.canonical import LEASE_MS
from proofs.model_check.operations import Called
from proofs.model_check.server_image import Image
from proofs.model_check.state_invariants import (
    LANES,
    P,
    T,
    batches,
    control,
    find_stages,
    held,
    ledger,
    plain,
    record,
    stream,
)

ROLE_OF = {
    "enqueue": b"producer", "pass_over": b"producer", "reissue": b"producer", "halt": b"producer",
    "take_batch": b"trainer", "rescore": b"trainer", "publish_weights": b"trainer",
    "commit": b"trainer", "quarantine": b"trainer", "refill": b"trainer", "set_target": b"trainer",
    "control": b"trainer",
}  # fmt: skip
"""Scripts for the holder of a role, whose nonce is the first argument of the operation."""

FREE = ("forget", "commit")  # state_invariants.py knows which batches they may free

OPENS = {"producer_open": b"producer", "trainer_open": b"trainer"}

STALE = 2
"""Stale threshold of every history, in train steps."""


def check_call(what: str, before: Image, after: Image, reply: Any) -> None:
    _batches_are_records(what, before, after)
    _cursor_moves_forward(what, before, after)
    _payloads_are_written_once(what, before, after)
    rule = RULES.get(what)
    if rule is not None and reply:
        rule(before, after, reply)


def check_caller(
    called: Called,
    args: tuple[Any, ...],
    before: Image,
    after: Image,
    now_ms: int,
    limits: RunLimits,
) -> None:
    """Check what a call changed by who made it; `args` are those of its operation."""
    what = called.what
    role = ROLE_OF.get(what)
    holder = control(before).get(role, b"") if role else b""
    if role and holder != args[0].encode():
        _unchanged(f"I7: {what} of a process that was replaced", before, after)
    if what == "beat" and control(before).get(args[1].encode()) != args[0].encode():
        _unchanged("I7: a heartbeat of a process that was replaced", before, after)
    opened = OPENS.get(what)
    if opened and not args[1] and control(before).get(opened, b"") not in (b"", args[0].encode()):
        silent_ms = now_ms - int(control(before)[opened + b"_seen_ms"])
        if abs(silent_ms) < limits.role_timeout_ms:
            _unchanged(f"I7: {what} beside a living {opened.decode()}", before, after)
    if what in ("claim", "enqueue") and _is_full(before, limits):
        queues = [{gid for _, gid in stream(image, b"fresh")} for image in (before, after)]
        assert queues[0] == queues[1], f"I12: {what} starts groups above the low mark"
    if what == "reap":
        _check_times(before, after, now_ms)
    if what == "release" and args[2] == "handback" and before.numbers != after.numbers:
        gid = args[1].gid.encode()
        tries = [int(record(image, gid)[b"tries"]) for image in (before, after)]
        assert tries[1] == tries[0] - 1, f"I11: {gid!r} was given back, and counts as tried"
    if what in ("claim", "heartbeat", "reconcile"):
        _check_worker(what, args, before, after, now_ms)
    if what == "reconcile" and called.reply[0] == "OK":
        mine = held(before).get(args[0].encode(), {})
        tokens = [mine.get(job.gid.encode()) == job.token.encode() for job in args[4]]
        lost = [n for n, is_mine in enumerate(tokens, 1) if not is_mine]
        replied = [int(n) for n in called.reply[1:]]
        assert replied == lost, f"I2: {args[0]} learns of {replied}, not of {lost}"


def _is_full(image: Image, limits: RunLimits) -> bool:
    """Return whether the payloads of a run exceed its low mark, and running work will free some."""
    counted = plain(image, b"bytes", {})
    stored = int(counted.get(b"came", 0)) - int(counted.get(b"went", 0))
    will_free = plain(image, b"leases", {}) or ledger(image, b"taken") > ledger(image, b"freed")
    return 0 < limits.low_bytes <= stored and bool(will_free)


def _check_times(before: Image, after: Image, now_ms: int) -> None:
    """I11: nobody loses a lease to an outage, or keeps one because the clock was set back."""
    clock = plain(before, b"clock", {})
    seen_ms, grace_ms = (int(clock.get(name, b"0")) for name in (b"seen_ms", b"grace_until_ms"))
    was_out = bool(seen_ms) and not 0 <= now_ms - seen_ms <= LEASE_MS / 2
    for worker, fields in held(before).items() if was_out or now_ms < grace_ms else ():
        lost = fields.keys() - held(after).get(worker, {}).keys()
        assert not lost, f"I11: {worker!r} loses {lost} to an outage"
    for worker, deadline_ms in plain(after, b"leases", {}).items():
        assert deadline_ms <= now_ms + LEASE_MS, f"I11: a lease of {worker!r} far ahead"


def _check_worker(
    what: str, args: tuple[Any, ...], before: Image, after: Image, now_ms: int
) -> None:
    worker = args[0].encode()
    registered = plain(before, b"worker:" + worker, {}).get(b"nonce")
    if what == "claim" and registered != args[1].encode():
        _unchanged("I2: a claim of another registration", before, after)
    old = held(before).get(worker, {})
    if what == "claim" and args[3] and str(args[3]).encode() != control(before)[b"weights"]:
        assert held(before) == held(after), f"I10: {worker!r} claims with the weights {args[3]}"
    acks = [plain(image, b"worker:" + worker, {}).get(b"ack") for image in (before, after)]
    if acks[0] != acks[1]:
        assert acks[1] == control(before)[b"epoch"], f"I10: a receipt for {acks[1]!r}"
    if what == "heartbeat" and {(job.gid, job.token) for job in args[4]} != {
        (gid.decode(), token.decode()) for gid, token in old.items()
    }:
        times = [plain(image, b"leases", {}).get(worker) for image in (before, after)]
        assert times[0] == times[1], f"I2: {worker!r} renews other groups than it holds"
    for gid in old.keys() - held(after).get(worker, {}).keys() if what == "reconcile" else ():
        age_ms = abs(now_ms - int(record(before, gid)[b"claimed_ms"]))
        assert age_ms > LEASE_MS, f"I2: {gid!r}, claimed {age_ms} ms ago, is taken back"


def _unchanged(what: str, before: Image, after: Image) -> None:
    changed = [key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)]
    assert not changed, f"{what} changed {changed}"


def _batches_are_records(what: str, before: Image, after: Image) -> None:
    old, new = batches(before), batches(after)
    for step in old.keys() & new.keys():
        if what not in ("quarantine", "refill"):
            # `forget`, which `commit` takes along, removes lines from the end
            left = len(new[step]) if what in FREE else len(old[step])
            changed = f"I5: {what} changed batch {step}: {old[step]}, {new[step]}"
            assert new[step][1:] == old[step][1:left], changed
    gone = old.keys() - new.keys()
    assert what in FREE or not gone, f"I6: {what} freed the batches {gone}"
    assert what == "take_batch" or not new.keys() - old.keys(), f"I5: {what} made a batch"


def _cursor_moves_forward(what: str, before: Image, after: Image) -> None:
    old, new = (int(plain(image, b"cursors", {}).get(T, b"0")) for image in (before, after))
    assert old <= new, f"I3: {what} moved the cursor from {old} to {new}"
    assert old == new or what == "enqueue", f"I3: {what} moved the cursor"


def _payloads_are_written_once(what: str, before: Image, after: Image) -> None:
    for key in before.keys() & after.keys():
        if b":payload:" in key:
            assert before[key][1] == after[key][1], f"I14: {what} changed {key!r}"


def _claimed(before: Image, after: Image, reply: list[Any]) -> None:
    if reply[0] != "OK" or held(before) == held(after):
        return
    state = control(before)
    assert reply[4] == state[b"weights"].decode(), f"I10: the reply has {reply}, not {state}"
    for lane in LANES:
        gone = {gid for _, gid in stream(before, lane)} - {gid for _, gid in stream(after, lane)}
        is_open = lane in state[b"lanes"].split()
        assert is_open or not gone, f"I10: {gone} claimed while {state}"
    for worker, fields in held(after).items():
        for gid in fields.keys() - held(before).get(worker, {}).keys():
            was = record(before, gid)
            assert was[b"stage"] == b"waiting", f"I2: {gid!r} was {was} when it was claimed"
            assert int(record(after, gid)[b"tries"]) == int(was[b"tries"]) + 1, (
                "I11: no try counted"
            )


def _submitted(before: Image, after: Image, replies: list[Any]) -> None:
    for key, (_, fields, _) in after.items():
        if b":group:" not in key or key not in before:
            continue
        old = before[key][1]
        if fields[b"payload"] != old[b"payload"]:
            owner = (old[b"stage"], old.get(b"token"))
            assert owner == (b"running", fields[b"payload"]), (
                f"I2: a result of another token: {old}"
            )
            assert fields[b"tries"] == b"0", "I11: a result with new tokens gives all tries back"


def _turns_kept(before: Image, after: Image, replies: list[Any]) -> None:
    assert find_stages(before) == find_stages(after), "I1: kept turns moved a group"
    for key in before.keys() & after.keys():
        if b":group:" in key:
            old, new = before[key][1], after[key][1]
            owner = (b"running", new[b"payload"].rpartition(b"-turns")[0])
            is_own = (old[b"stage"], old.get(b"token")) == owner
            assert is_own or new[b"payload"] == old[b"payload"], f"I2: turns of another: {old}"


def _taken(before: Image, after: Image, reply: list[Any]) -> None:
    step = ledger(after, b"taken")
    if reply[0] != "OK" or step == ledger(before, b"taken"):
        return
    assert step == ledger(before, b"taken") + 1, "I5: a step was left out"
    assert b"recovering" not in control(before), "I8: taken before the pools were clamped"
    _is_fresh(step, batches(after)[step])


def _is_fresh(step: int, lines: tuple[bytes, ...]) -> None:
    for line in lines[1:]:
        version = line.split(b" ")[6]
        fresh = version == b"-" or step - int(version) - 1 < STALE
        assert fresh, f"I8: {line!r} in step {step}"


def _enqueued(before: Image, after: Image, reply: list[Any]) -> None:
    new = {gid for _, gid in stream(after, b"fresh")} - {gid for _, gid in stream(before, b"fresh")}
    if not new:
        return
    state = control(before)
    assert b"fresh" in state[b"lanes"].split(), f"I10: {new} enqueued while {state}"
    stages = [stage for (stage,) in find_stages(after).values()]
    under_way = sum(stage in ("waiting", "running", "taken", "archived") for stage in stages)
    target = int(plain(after, b"progress:" + T, {})[b"target"])
    assert under_way <= target, f"I3: {under_way} groups for a target of {target}"


def _quarantined(before: Image, after: Image, reply: list[Any]) -> None:
    _positions_are_kept(before, after)
    for gid in plain(after, b"dead", {}).keys() - plain(before, b"dead", {}).keys():
        name = P + b"worker:" + record(after, gid)[b"owner"]
        if name in before:
            counts = [int(image[name][1].get(b"quarantined", 0)) for image in (before, after)]
            assert counts[1] == counts[0] + 1, f"I11: {name!r} is not blamed for {gid!r}"


def _positions_are_kept(before: Image, after: Image, reply: Any = None) -> None:
    old, new = batches(before), batches(after)
    for step in old.keys() & new.keys():
        sizes = [len(lines) - 1 + _open_positions(lines[0]) for lines in (old[step], new[step])]
        assert sizes[0] == sizes[1], f"I5: batch {step} of {sizes[0]} groups has now {sizes[1]}"
        _is_fresh(step, new[step])
        gids = [line.split(b" ")[0] for line in new[step][1:]]
        assert len(set(gids)) == len(gids), f"I5: {gids} in step {step}"


def _open_positions(header: bytes) -> int:
    notes = header.partition(b" quarantined=")[2].split(b" ")[0]
    return sum(note.endswith(b":-") for note in notes.split(b","))


def _reaped(before: Image, after: Image, reply: list[Any]) -> None:
    for worker, fields in held(before).items():
        lost = fields.keys() - held(after).get(worker, {}).keys()
        is_registered = b"nonce" in plain(after, b"worker:" + worker, {})
        assert not (lost and is_registered), f"I2: {worker!r} may still claim, and lost {lost}"


def _mode_changed(before: Image, after: Image, reply: list[Any]) -> None:
    old, new = control(before), control(after)
    if old[b"mode"] != new[b"mode"] or old[b"lanes"] != new[b"lanes"]:
        assert int(new[b"epoch"]) > int(old[b"epoch"]), f"I10: no new epoch for {new}"


def _published(before: Image, after: Image, reply: list[Any]) -> None:
    old, new = (control(image)[b"weights"].rpartition(b":") for image in (before, after))
    assert old[0] != new[0] or int(old[2]) <= int(new[2]), f"I9: {old} became {new}"


RULES: dict[str, Callable[[Image, Image, list[Any]], None]] = {
    "claim": _claimed, "submit": _submitted, "keep_turns": _turns_kept, "take_batch": _taken,
    "enqueue": _enqueued, "reap": _reaped, "quarantine": _quarantined,
    "refill": _positions_are_kept, "control": _mode_changed, "publish_weights": _published,
}  # fmt: skip
