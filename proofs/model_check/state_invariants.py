"""What must hold in every state of the key space, whatever happened before.

It is read from the structures themselves, by no code of the product.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from buffer.limits import RunLimits
from proofs.model_check.operations import TASK
from proofs.model_check.server_image import Image

P = b"rmq:{run}:"
T = TASK.encode()
LANES = (b"eval", b"resume", b"fresh")
Stages = dict[bytes, list[str]]


def check_state(image: Image, limits: RunLimits) -> None:
    stages = find_stages(image)
    _one_stage(image, stages)
    _one_owner(image)
    _records(image, stages, limits)
    _batches(image)
    _bytes(image, stages)
    _counters(image, stages)
    _pauses(image)


def plain(image: Image, name: bytes, otherwise: Any) -> Any:
    """Return the value of a key of the run."""
    return image[P + name][1] if P + name in image else otherwise


def control(image: Image) -> dict[bytes, bytes]:
    return dict(plain(image, b"control", {}))


def record(image: Image, gid: bytes) -> dict[bytes, bytes]:
    return dict(plain(image, b"group:" + gid, {}))


def stream(image: Image, lane: bytes) -> list[tuple[bytes, bytes]]:
    """Return (id, gid) of each entry."""
    found = plain(image, b"jobs:" + T + b":" + lane, None)
    return [(b"%d-%d" % entry, fields[1]) for entry, fields in found.entries] if found else []


def held(image: Image) -> dict[bytes, dict[bytes, bytes]]:
    holders = {
        key.removeprefix(P + b"leased:"): value[1]
        for key, value in image.items()
        if key.startswith(P + b"leased:")
    }
    return {
        worker: {gid: token for gid, token in fields.items() if gid != b"digest"}
        for worker, fields in holders.items()
    }


def batches(image: Image) -> dict[int, tuple[bytes, ...]]:
    """Return the lines of each manifest that is still there."""
    prefix = P + b"batch:train:"
    return {
        int(key.removeprefix(prefix)): value[1]
        for key, value in image.items()
        if key.startswith(prefix)
    }


def ledger(image: Image, field: bytes) -> int:
    return int(plain(image, b"ledger:train", {}).get(field, b"0"))


def bit(image: Image, stage: bytes, draw: int) -> bool:
    bits = plain(image, b"ended:" + T + b":" + stage, b"")
    byte, offset = divmod(draw, 8)
    return byte < len(bits) and bool(bits[byte] & 0x80 >> offset)


def find_stages(image: Image) -> Stages:
    cursor = int(plain(image, b"cursors", {}).get(T, b"0"))
    draws = {draw: b"%s-%010d" % (T, draw) for draw in range(cursor)}
    stages: Stages = {gid: [] for gid in draws.values()}
    ended = [
        (gid, stage)
        for draw, gid in draws.items()
        for stage in ("archived", "filtered", "dropped", "skipped")
        if bit(image, stage.encode(), draw)
    ]
    for gid, stage in [*_structures(image), *ended]:
        stages.setdefault(gid, []).append(stage)
    return stages


def _structures(image: Image) -> Iterator[tuple[bytes, str]]:
    """Return (gid, stage) of each group in a queue, lease, pool or batch, and of each dead one."""
    for lane in LANES:
        yield from ((gid, "waiting") for _, gid in stream(image, lane))
    for fields in held(image).values():
        yield from ((gid, "running") for gid in fields)
    for status in (b"completed", b"aborted", b"expired"):
        for member in plain(image, b"pool:" + T + b":" + status, {}):
            yield member.partition(b":")[2], "pool"
    freed = ledger(image, b"freed")
    for step, lines in batches(image).items():
        if step > freed:
            yield from ((line.split(b" ")[0], "taken") for line in lines[1:])
    yield from ((gid, "dead") for gid in plain(image, b"dead", {}))


def _one_stage(image: Image, stages: Stages) -> None:
    wrong = {gid: found for gid, found in stages.items() if len(found) != 1}
    assert not wrong, f"I1: {wrong}"


def _one_owner(image: Image) -> None:
    leases = plain(image, b"leases", {})
    for worker, fields in held(image).items():
        marks = sum(
            int(hashlib.sha1(gid + b" " + token).hexdigest()[:10], 16)
            for gid, token in fields.items()
        )
        digest = int(plain(image, b"leased:" + worker, {})[b"digest"])
        assert digest == marks, (
            f"I2: the digest of {worker!r} is {digest}, that of its groups {marks}"
        )
        assert not fields or worker in leases, f"I2: {worker!r} holds groups without a deadline"
        for gid, token in fields.items():
            known = record(image, gid)
            owner = (known.get(b"owner"), known.get(b"token"))
            assert owner == (worker, token), (
                f"I2: {gid!r} is held by {worker!r}, its record has {owner}"
            )
    for worker in leases:
        assert worker in held(image), f"I2: a deadline for {worker!r}, which holds nothing"


def _records(image: Image, stages: Stages, limits: RunLimits) -> None:
    for key in image:
        if not key.startswith(P + b"group:"):
            continue
        gid = key.removeprefix(P + b"group:")
        known = record(image, gid)
        (stage,) = stages.get(gid, ["nowhere"])
        assert known[b"stage"].decode() == stage, (
            f"I1: {gid!r} is {stage}, its record {known[b'stage']!r}"
        )
        assert 0 <= int(known[b"tries"]) <= limits.max_tries, (
            f"I11: {gid!r}: {known[b'tries']!r} tries"
        )
        payload = P + b"payload:" + gid + b":" + known[b"payload"]
        assert payload in image, (
            f"I12: {gid!r} is {stage}, the bytes of {known[b'payload']!r} are gone"
        )
        listed = b"%s %s %s" % (gid, known[b"payload"], known[b"chunks"])
        assert listed not in plain(image, b"garbage", frozenset()), (
            f"I12: {listed!r} is listed as garbage"
        )
        assert image[payload][2] is None, f"I12: the bytes of {gid!r} will expire"
        if stage == "dead":
            assert P + b"dead:" + gid in image, f"I11: {gid!r} is dead for no reason"
        if stage == "pool":
            _in_its_pool(image, gid, known)
        if stage == "waiting":
            entries = [e for lane in LANES for e, other in stream(image, lane) if other == gid]
            assert entries == [known[b"entry"]], (
                f"I1: {gid!r} waits as {entries}, its record has {known[b'entry']!r}"
            )


def _in_its_pool(image: Image, gid: bytes, known: dict[bytes, bytes]) -> None:
    pool = plain(image, b"pool:" + T + b":" + known[b"status"], {})
    score = pool.get(known[b"arrival"] + b":" + gid)
    assert score is not None, f"I1: {gid!r} is not in the pool {known[b'status']!r}"
    if known[b"status"] == b"completed":
        assert score == float(known[b"version"] or b"inf"), f"I9: {gid!r} has score {score}"


def _batches(image: Image) -> None:
    taken, committed, freed = (ledger(image, name) for name in (b"taken", b"committed", b"freed"))
    keep = max(ledger(image, b"keep"), freed)
    assert freed <= committed <= max(taken, committed), f"I6: freed {freed}, committed {committed}"
    found = batches(image)
    missing = [step for step in range(keep + 1, taken + 1) if step not in found]
    assert not missing, f"I6: the batches {missing} may be asked for again and are gone"
    assert all(step <= taken for step in found), f"I5: batch {max(found)} of {taken} steps"


def _bytes(image: Image, stages: Stages) -> None:
    counted = plain(image, b"bytes", {})
    count = int(counted.get(b"came", 0)) - int(counted.get(b"went", 0))
    stored = 0
    for gid, (stage,) in stages.items():
        if stage not in ("archived", "filtered", "dropped", "skipped"):
            known = record(image, gid)
            # the prompt, and the newest result
            stored += int(known[b"prompt"]) + (
                int(known[b"size"]) if known[b"payload"] != b"init" else 0
            )
    assert count == stored + _archived_bytes(image), (
        f"I12: {count} bytes are counted, {stored} are there"
    )


def _archived_bytes(image: Image) -> int:
    """Archived batches keep their results until they are forgotten, and groups of slices, too."""
    freed, done = ledger(image, b"freed"), ledger(image, b"slice")
    total = 0
    for step, lines in batches(image).items():
        if step <= freed:
            total += sum(int(line.split(b" ")[3]) for line in lines[1:])
        elif step == freed + 1:
            total += sum(int(line.split(b" ")[3]) for line in lines[1 : 1 + done])
    return total


def _counters(image: Image, stages: Stages) -> None:
    progress = plain(image, b"progress:" + T, {})
    count = Counter(stage for (stage,) in stages.values())
    for name in ("running", "taken", "archived", "dead", "filtered", "dropped", "skipped"):
        noted = int(progress.get(name.encode(), b"0"))
        assert noted == count[name], f"I1: {count[name]} groups are {name}, {noted} are counted"
    consumed = count["taken"] + count["archived"]
    assert int(progress.get(b"consumed", b"0")) == consumed, f"I4: {consumed} groups, {progress}"
    entered = sum(count.values())
    assert int(progress.get(b"enqueued", b"0")) == entered, f"I3: {entered} groups, {progress}"


def _pauses(image: Image) -> None:
    state = control(image)
    modes = [b"run", b"keep", b"drain", b"abort", b"finish"]
    wanted = [state.get(who + b"_mode", b"run") for who in (b"operator", b"trainer")]
    assert state[b"mode"] == max(wanted, key=modes.index), f"I10: {state}"
    for worker in (key for key in image if key.startswith(P + b"worker:")):
        ack = int(image[worker][1].get(b"ack", b"0"))
        assert ack <= int(state[b"epoch"]), f"I10: {worker!r} has carried out {ack}, not yet asked"
        if ack == int(state[b"epoch"]) and state[b"mode"] in (b"drain", b"abort", b"finish"):
            name = worker.removeprefix(P + b"worker:")
            lanes = {record(image, gid)[b"lane"] for gid in held(image).get(name, {})}
            open_lanes = set(state[b"lanes"].split())
            assert lanes <= open_lanes, f"I10: {worker!r} holds groups, and has a receipt"
