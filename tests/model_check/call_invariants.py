"""What one call of the server may change, by the state before it and after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.model_check.server_image import Image
from tests.model_check.state_invariants import T, batches, held, ledger, plain, record

ROLE_OF = {
    "enqueue": b"producer",
    "pass_over": b"producer",
    "reissue": b"producer",
    "take_batch": b"trainer",
    "rescore": b"trainer",
    "publish_weights": b"trainer",
    "commit": b"trainer",
}
"""Scripts for the holder of a role, whose nonce is the first argument of the operation."""

STALE = 2
"""Stale threshold of every history, in train steps."""


def check_call(what: str, before: Image, after: Image, reply: Any) -> None:
    _batches_are_records(what, before, after)
    _cursor_moves_forward(what, before, after)
    _payloads_are_written_once(what, before, after)
    rule = RULES.get(what)
    if rule is not None and reply:
        rule(before, after, reply)


def check_role(what: str, nonce: str, before: Image, after: Image) -> None:
    """I7: a script that a process calls after another one took its role changes nothing."""
    role = ROLE_OF.get(what)
    if role is None or plain(before, b"control", {}).get(role) == nonce.encode():
        return
    changed = [key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)]
    assert not changed, f"I7: {what} of a process that was replaced changed {changed}"


def _batches_are_records(what: str, before: Image, after: Image) -> None:
    old, new = batches(before), batches(after)
    for step in old.keys() & new.keys():
        if what not in ("quarantine", "refill"):
            # `forget` removes lines from the end
            left = len(new[step]) if what == "forget" else len(old[step])
            changed = f"I5: {what} changed batch {step}: {old[step]}, {new[step]}"
            assert new[step][1:] == old[step][1:left], changed
    gone = old.keys() - new.keys()
    assert what == "forget" or not gone, f"I6: {what} freed the batches {gone}"
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
    control = plain(before, b"control", {})
    assert control[b"lanes"], f"I10: claimed while {control}"
    assert reply[4] == control[b"weights"].decode(), f"I10: the reply has {reply}, not {control}"
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
            assert int(fields[b"tries"]) == int(old[b"tries"]) - 1, (
                "I11: a result gives the try back"
            )


def _taken(before: Image, after: Image, reply: list[Any]) -> None:
    step = ledger(after, b"taken")
    if reply[0] != "OK" or step == ledger(before, b"taken"):
        return
    assert step == ledger(before, b"taken") + 1, "I5: a step was left out"
    control = plain(before, b"control", {})
    assert b"recovering" not in control, "I8: taken before the pools were clamped"
    for line in batches(after)[step][1:]:
        version = line.split(b" ")[6]
        fresh = version == b"-" or step - int(version) - 1 < STALE
        assert fresh, f"I8: {line!r} in step {step}"


RULES: dict[str, Callable[[Image, Image, list[Any]], None]] = {
    "claim": _claimed,
    "submit": _submitted,
    "take_batch": _taken,
}
