"""Any one key of a run may be deleted, renamed, given another type, or changed in one field.

`fsck` then says which. No command and no process ends in a traceback, and no group is trained
twice.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial

import pytest
import redis

from buffer.errors import RolloutMQError
from buffer.redis.store import Store
from buffer.run.run import Run
from rolloutmq.output import console
from rolloutmq.views.explain import diagnosis
from rolloutmq.views.explain.diagnosis import diagnose_run
from rolloutmq.views.run_view import read_run_view
from rolloutmq.views.screen import status_screen
from tests.buffer.busy_run import busy_run, moves
from tests.buffer.damage import Harm, every_harm
from tests.buffer.scene import Scene
from tests.buffer.time_machine import put_back, remember

HARMLESS = re.compile(
    # made anew, or only looked at
    "(bell:.*|clock|report|events|worker:.*|suspects) (?!of another).*"
    # an empty queue; a time; what waits to be freed, or died with its group
    "|jobs:.* deleted|(leases|workers|dead) member moved|payload:.*|garbage member .*|hold .*"
)
"""Damage that costs nothing, and need not be found."""

ONE_COPY = re.compile(
    "control (epoch|producer_name|weights_.*|.*_seen_ms) .*"
    "|ledger:train (committed|keep|slice|forgotten|freed) .*"
    "|progress:.* (target|consumed|causes|enqueue_.*|err.*|fail.*) .*"
    "|progress:.* (prod.*|raw.*|arrivals|filtered_in_row) .*"
    "|group:.* (aborts|tries|samples|tokens|reward|.*_ms|owner|released|token|lineage|aged) .*"
    "|group:.* (lane|entry|arrival) .*|group:.* (size|chunks) [+-]1"
    "|meta .* [+-]1|meta (limits_op|settings) .*|tokens:.* (deleted|renamed)"
)
"""Values without a second copy, at least in some stages: one that could be right is believed."""


OF_A_MOVE = {
    ("batch", "last junk"), ("bytes", "came junk"), ("control", "epoch junk"),
    ("control", "weights junk"), ("cursors", "math junk"), ("garbage", "member junk"),
    ("group", "chunks junk"), ("group", "made junk"), ("group", "payload deleted"), ("group", "stage junk"),
    ("group", "version junk"), ("jobs", "entry junk"), ("ledger", "taken junk"),
    ("lineages", "last junk"), ("meta", "tasks junk"), ("pool", "member junk"),
    ("progress", "consumed junk"), ("bad_submissions", "w0 junk"), ("tokens", "math junk"),
}  # fmt: skip
"""Changed fields that the processes read; the others are the same to them, or only counted."""

NAMED_BY_WHAT_IS_MISSING = re.compile(
    "garbage .*|batch:train:2 .*|meta schema .*|ledger:train .*|workers .*|group:.* made .*"
)
"""Keys that are not named themselves, but the payload, group or step that is missing for them, or
the account that does not add up."""


@pytest.fixture
def busy(store: Store) -> Scene:
    return busy_run(store, store.client, "demo")


def representative(scene: Scene) -> list[Harm]:
    chosen: dict[tuple[str, str], str] = {}
    harms: list[Harm] = []
    for harm in every_harm(scene.raw, scene.name):
        stage = scene.record(harm.name[6:]).get("stage", "") if harm.kind == "group" else ""
        if chosen.setdefault((harm.kind, stage), harm.key) == harm.key:
            harms.append(harm)
    return harms


@contextmanager
def harmed(scene: Scene, harm: Harm) -> Iterator[None]:
    """Damage one key for a while in which nothing else changes it."""
    whole = scene.raw.dump(harm.key)
    ttl_ms = max(0, scene.raw.pttl(harm.key))
    harm.do(scene.raw)
    yield
    scene.raw.delete(harm.key + "x")
    scene.raw.restore(harm.key, ttl_ms, whole, replace=True)


def fsck(scene: Scene) -> list[str]:
    try:
        found = Run.open(scene.store, scene.name).account.fsck()
    except RolloutMQError as error:
        return [error.message]
    return [f"{damage.key} {damage.text}" for damage in found.damage]


def test_fsck_finds_every_key_that_was_damaged(busy: Scene) -> None:
    unseen, unnamed = [], []
    for harm in representative(busy):
        if HARMLESS.fullmatch(str(harm)) or ONE_COPY.fullmatch(str(harm)):
            continue
        with harmed(busy, harm):
            found = fsck(busy)
        if not found:
            unseen.append(str(harm))
        names = (harm.key, harm.name.partition(":")[2])
        if found and not any(name and name in text for text in found for name in names):
            unnamed.append(str(harm))
    assert unseen == []
    assert [name for name in unnamed if not NAMED_BY_WHAT_IS_MISSING.fullmatch(name)] == []
    busy.check()


def faults_of(scene: Scene) -> list[str]:
    """What doctor says is wrong with the run."""
    _, found = diagnose_run(scene.store, scene.name)
    return [symptom.what for symptom in found if symptom.level == "fault"]


@pytest.mark.slow
def test_doctor_says_what_fsck_finds(busy: Scene) -> None:
    assert faults_of(busy) == []
    unseen = []
    for harm in representative(busy):
        if harm.how in ("deleted", "of another type"):
            with harmed(busy, harm):
                if bool(fsck(busy)) != bool(faults_of(busy)):
                    unseen.append(str(harm))
    assert unseen == []


def test_doctor_finds_a_lost_ledger_and_records_in_a_large_run_and_points_to_fsck(
    busy: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "FEW", 0)
    _, found = diagnose_run(busy.store, busy.name)
    assert any("rolloutmq fsck" in symptom.fix for symptom in found)
    assert faults_of(busy) == []
    dead = busy.raw.zrange(busy.keys.dead, 0, -1)  # their letters show where they are
    for harm in representative(busy):
        is_dead = harm.name.partition(":")[2].encode() in dead
        if harm.how == "deleted" and harm.kind in ("ledger", "group") and not is_dead:
            with harmed(busy, harm):
                assert faults_of(busy), harm


@pytest.mark.slow
def test_no_command_and_no_process_ends_in_a_traceback(busy: Scene) -> None:
    """Nor is a group trained twice, or lost without a word."""
    moment = remember(busy.raw, busy.name)
    for harm in representative(busy):
        is_field = " " in harm.how and harm.how != "of another type"
        if harm.how == "renamed" or (is_field and (harm.kind, harm.how) not in OF_A_MOVE):
            continue
        put_back(busy.raw, busy.name, moment)
        harm.do(busy.raw)
        steps: dict[str, Callable[[], object]] = {"look": partial(look, busy), **moves(busy)}
        for name, step in [*steps.items(), ("look again", steps["look"])]:
            try:
                step()
            except RolloutMQError:
                pass
            except Exception as error:  # what a user would see as a traceback
                raise AssertionError(f"{harm}: {name}") from error
        trained = [gid for step in range(3, 6) for gid in gids_of(busy, step)]
        assert len(trained) == len(set(trained)), harm


def look(scene: Scene) -> None:
    fsck(scene)
    diagnose_run(scene.store, scene.name)
    with redirect_stdout(io.StringIO()):
        console().print(status_screen(read_run_view(Run.open(scene.store, scene.name))))


def gids_of(scene: Scene, step: int) -> list[str]:
    """The groups of a batch, as far as its manifest can be read."""
    with suppress(redis.ResponseError):
        lines = scene.raw.lrange(scene.keys.batch("train", step), 1, -1)
        return [line.decode(errors="replace").partition(" ")[0] for line in lines]
    return []
