"""XTuner v1 on a run: XTuner's own tests of its buffer, and its trainer killed at every stage.

Real: `RolloutState`, buffer, policies, sampler, strategy and manager of XTuner, and Ray's objects.
Its data sets are stubbed, as in its own tests.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from buffer.redis.store import Store
from buffer.run.run import Run
from tests.extensions.trainers.sources import source_of
from tests.extensions.trainers.xtuner_sources import COMMIT, URL
from tests.servers import Server

pytest.importorskip("mmengine", reason="run by make test-trainers")
source_of("XTUNER", URL, COMMIT)  # or skip

on_valkey = pytest.mark.parametrize("server", ["valkey"], indirect=True)

# XTuner takes half a minute to import: once for all processes
_context = get_context("forkserver")
_context.set_forkserver_preload(["tests.extensions.trainers.xtuner_loop"])


def exit_code_of(program: str, *arguments: Any) -> int | None:
    process = _context.Process(target=_run, args=(program, *arguments))
    process.start()
    process.join()
    return process.exitcode


def _run(program: str, *arguments: Any) -> None:
    from tests.extensions.trainers import xtuner_loop

    called: Callable[..., None] = getattr(xtuner_loop, program)
    called(*arguments)


def test_every_field_of_a_rollout_survives() -> None:
    assert exit_code_of("check_that_every_field_survives") == 0


@on_valkey
def test_xtuners_own_tests_of_its_buffer_pass(server: Server, tmp_path: Path) -> None:
    report = tmp_path / "report"
    assert exit_code_of("run_own_tests", server.url, report) == 0, report.read_text()


@on_valkey
def test_a_trainer_that_was_replaced_adds_nothing(server: Server) -> None:
    assert exit_code_of("check_that_a_replaced_trainer_adds_nothing", server.url) == 0


@on_valkey
def test_a_killed_trainer_of_xtuner_keeps_its_groups_and_trains_each_once(
    server: Server, tmp_path: Path
) -> None:
    # before a checkpoint, in a step, and between the two halves of a checkpoint
    for death in (("made", 5), ("trained", 3), ("buffer", 2), ("made", 8)):
        assert exit_code_of("run_trainer", server.url, tmp_path, 10, death) == -signal.SIGKILL
    assert exit_code_of("run_trainer", server.url, tmp_path, 10) == 0
    trained = json.loads((tmp_path / "10" / "weights.json").read_text())
    groups = [group for group, _ in trained]
    assert len(groups) == 30
    assert len(set(groups)) == len(groups)
    events = map(json.loads, (tmp_path / "events").read_text().splitlines())
    completed = [event for event in events if event.get("status") == "completed"]
    times = Counter(event["group"] for event in completed)
    again = {group for group, count in times.items() if count > 1}
    assert len(again) <= 4 * 6, "at most what was being put at each death"
    made = {(event["group"], *event["ids"]) for event in completed}
    assert {(group, *ids) for group, ids in trained} <= made
    run = Run.open(Store(server.url), "xtuner")
    assert int(run.progress("math_a")["archived"]) == 24  # as of the checkpoint before the last
    left = run.export(tmp_path / "left.jsonl")
    assert left.groups
    assert not left.unreadable
