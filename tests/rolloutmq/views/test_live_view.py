from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from buffer.errors import RunNotFound
from buffer.maintenance.remove_run import remove_run
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.run.run import Run
from rolloutmq.views.explain.diagnosis import diagnose
from rolloutmq.views.history import TRAINER, WORKERS, History
from rolloutmq.views.run_json import describe
from rolloutmq.views.run_view import RECENT_MS, RunView, read_run_view
from rolloutmq.views.screen import LiveNotes, live_screen, one_line, watch
from tests.rolloutmq.populate import Scene


def drawn(
    snap: RunView,
    history: History | None = None,
    notes: LiveNotes | None = None,
    **settings: object,
) -> str:
    screen = Console(file=io.StringIO(), width=80, highlight=False, markup=False, **settings)  # type: ignore[arg-type]
    screen.print(live_screen(snap, history or History(), notes or LiveNotes()))
    return screen.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_snapshot_costs_the_same_whatever_the_pools_hold(store: Store) -> None:
    scene = Scene(store, "demo")
    scene.enqueue(1)
    few = _commands_of(scene.run)
    scene.enqueue(1000)
    assert _commands_of(scene.run) == few


def test_a_deleted_run_is_not_a_damaged_one(store: Store) -> None:
    scene = Scene(store, "demo")
    remove_run(store, scene.run.keys)
    with pytest.raises(RunNotFound):
        read_run_view(scene.run)


def _commands_of(run: Run) -> int:
    before = int(run.store.client.info("stats")["total_commands_processed"])
    read_run_view(run)
    return int(run.store.client.info("stats")["total_commands_processed"]) - before


def test_history_says_who_waits(scene: Scene) -> None:
    history = History()
    first = read_run_view(scene.run)
    later = dataclasses.replace(first, now_ms=first.now_ms + 1000, taken=3)
    history.observe(dataclasses.replace(first, committed=2))
    assert history.waits == [TRAINER]
    history.observe(later)  # step 3 is taken and not committed: the trainer trains
    assert TRAINER not in history.waits


def test_history_counts_idle_workers(scene: Scene, store: Store) -> None:
    scene.claim("w1", 4)
    scene.join("w2")
    history = History()
    history.observe(read_run_view(scene.run))
    assert history.waits == [WORKERS]


def test_a_worker_that_was_lost_without_a_heartbeat_has_no_age(scene: Scene) -> None:
    scene.run.jobs.release("w0", scene.running, "failed", "its last one")
    for worker in ("w0", "w1"):
        assert scene.run.fleet.deregister(worker, scene.workers[worker])
    lost = {"event": "worker_lost", "worker": "w9"}
    scene.run.store.client.xadd(scene.run.keys.events, lost)
    rows = describe(read_run_view(scene.run))["ended_workers"]
    assert [row["id"] for row in rows if row["silent_ms"] is None] == ["w9"]
    assert len(rows) == 3


def test_watch_survives_a_server_that_goes_away(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        scene = Scene(Store(server.url, deadline_s=400.0), "demo")
        run = Run.open(Store(server.url, deadline_s=0.2), "demo")
        screen = Console(file=io.StringIO(), width=200)
        looks = iter(["kill", "", "start", ""])

        def is_over() -> bool:
            act = next(looks, None)
            if act:
                server.kill() if act == "kill" else server.start()
            return act is None

        watch(run, History(), LiveNotes(), screen, is_over, every_s=0.01)
        scene.run.store.close()
        run.store.close()
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 5
    assert "no server listens there" in lines[1]
    assert "step 0" in lines[-1]


TRACE = """\
  Traceback (most recent call last):
    File "/home/me/judge.py", line 3, in judge
  KeyError: 'solution'"""


def test_the_first_error_of_a_task_is_on_every_screen_at_once(store: Store) -> None:
    scene = Scene(store, "demo")
    scene.enqueue(3)
    scene.join("w0")
    for job in scene.claim("w0", 2):
        scene.run.jobs.release("w0", job, "failed", "KeyError: 'solution'\n" + TRACE)
    snap = read_run_view(scene.run)
    said = "math: 2 failed: KeyError: 'solution' (at judge.py:3)"
    assert said in one_line(snap, History(), LiveNotes())
    assert said in drawn(snap)
    assert describe(snap)["tasks"]["math"]["trouble"] == said.removeprefix("math: ")
    (stuck,) = [symptom for symptom in diagnose(snap) if "KeyError" in symptom.what]
    assert (stuck.level, stuck.since_ms is not None) == ("stuck", True)
    assert "every try so far" in stuck.what
    scene.submit("w0", scene.claim("w0", 1)[0])
    later = dataclasses.replace(read_run_view(scene.run), now_ms=snap.now_ms + RECENT_MS)
    assert later.troubles == []
    assert [symptom for symptom in diagnose(later) if "KeyError" in symptom.what] == []
