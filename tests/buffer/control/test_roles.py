"""The hold of a process on a role: renewed, lost, given up (I7)."""

from __future__ import annotations

import threading
import time

import pytest

from buffer.control import control, roles
from buffer.control.control import Work
from buffer.control.roles import HeldRole
from buffer.control.worker_record import PAUSE_BOUNDS_S, Histogram
from buffer.errors import Fenced
from rolloutmq.views.run_view import read_run_view
from tests.buffer.scene import Scene


def open_role(scene: Scene) -> HeldRole:
    role = HeldRole(scene.run.control, "producer")
    scene.run.control.open_producer(role.nonce, take_over=True)
    return role


def test_a_role_is_renewed_in_the_background_until_it_is_lost(scene: Scene) -> None:
    role = open_role(scene)
    lost = threading.Event()
    role.renew_in_background(lambda: 0.01, lost.set)
    role.check()
    open_role(scene)
    assert lost.wait(400)
    with pytest.raises(Fenced):
        role.check()
    before = scene.run.control.holder("producer").nonce
    role.close()
    assert scene.run.control.holder("producer").nonce == before


def test_a_role_that_is_given_up_is_vacant_at_once(scene: Scene) -> None:
    role = open_role(scene)
    role.renew_in_background(lambda: 0.01, lambda: None)
    role.close()
    assert not scene.run.control.holder("producer").nonce
    assert role.wait_until_vacant(threading.Event())


def test_standing_by_ends_when_it_is_stopped(scene: Scene) -> None:
    role = open_role(scene)
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    assert not role.wait_until_vacant(stop)


def test_a_process_that_waits_for_days_keeps_its_role_and_says_what_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "SHORT_S", 0.0)
    monkeypatch.setattr(roles, "HUNG_S", 0.0)
    work = Work()
    role = HeldRole(scene.run.control, "trainer", nonce=scene.open_trainer(), work=work)
    work.wait_for(["math"])
    role.renew_in_background(lambda: 0.01, lambda: None)
    while scene.run.control.holder("trainer").waits_for != ["math"]:
        time.sleep(0.01)
    work.wait_for(())
    while scene.run.control.holder("trainer").waits_for:
        time.sleep(0.01)
    role.close()


def test_a_trainer_reports_its_waits_and_pauses(scene: Scene) -> None:
    pauses = Histogram(PAUSE_BOUNDS_S)
    pauses.add(0.02)
    pauses.add(400.0)
    role = HeldRole(scene.run.control, "trainer", waited_s=lambda: 12.5, pauses=pauses)
    role.nonce = scene.open_trainer()
    role.renew()
    snap = read_run_view(scene.run)
    assert snap.control["trainer_waited_ms"] == "12500"
    assert (snap.pauses.counts, snap.pauses.total_s) == (pauses.counts, 400.02)
