"""A repair finds nothing to do in a run in which every script ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from buffer.maintenance.repair.repair import Repair
from tests.buffer.scene import Scene
from tests.buffer.whole_story import tell_a_whole_story
from tests.servers import on_both


@on_both
def test_repair_knows_every_key_that_scripts_write(
    make_scene: Callable[..., Scene], tmp_path: Path
) -> None:
    scene = make_scene(max_tries=2, tail_batch_trigger_size=0, order="length_fair")
    tell_a_whole_story(scene, tmp_path)
    run = scene.run
    plan = Repair(run.store, run.keys, run.limits, run.nonce).plan()
    assert (plan.damaged, plan.payloads, plan.lost, plan.closed) == ([], [], [], [])
