"""Imported groups have their turn in every order policy, and can be moved by hand like others."""

from __future__ import annotations

from pathlib import Path

import pytest

from buffer.errors import ConfigError
from buffer.ids import IMPORTED_FROM, group_id
from buffer.wire.rollout import Status
from tests.buffer.curation.test_curation import line, write
from tests.buffer.snapshot.test_snapshot_of_order import (
    CUSTOM,
    ORDERS,
    Make,
    again,
    longest_first,
    ready,
)


def rows(*lengths: int) -> list[dict[str, object]]:
    return [
        line(f"g{i}", response_ids=[1] * n, logprobs=[-0.5] * n, spans=[[0, n, 0, "l0"]])
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_imported_groups_are_taken_in_the_order_of_the_policy(
    make_scene: Make, tmp_path: Path, order: str
) -> None:
    scene = make_scene(order=order)
    scene.run.buffer.order_function = longest_first
    scene.open_trainer(lineage="l0")
    short, long = ready(scene, 2, 40)
    # a warm index: filling it at the next take would put in front what is not in it
    assert scene.take(1).entries
    late = ready(scene, 2)[0]
    scene.run.import_groups(write(tmp_path / "f.jsonl", *rows(100, 2)))
    far, near = (group_id("math", IMPORTED_FROM + i) for i in (0, 1))
    if order not in ("staleness", "freshest"):
        assert (
            scene.raw.zcard(scene.keys.order("math"))
            == scene.raw.zcard(scene.keys.pool("math", "completed"))
            == 4
        )
    expected = {
        "staleness": [long, late, far, near],
        "fifo": [long, late, far, near],
        "freshest": [near, far, late, short],
        "length_fair": [long, late, far, near],
        CUSTOM: [far, short, late, near],
    }
    assert scene.take(2, math=4).gids == expected[order]
    scene.check()


@pytest.mark.parametrize("order", ORDERS)
def test_imported_groups_keep_their_turn_in_a_snapshot(
    make_scene: Make, tmp_path: Path, order: str
) -> None:
    scene = make_scene(order=order)
    scene.run.buffer.order_function = longest_first
    scene.open_trainer(lineage="l0")
    ready(scene, 2, 40)
    scene.run.import_groups(write(tmp_path / "f.jsonl", *rows(100, 2)))
    other = again(scene, tmp_path / "s")
    other.open_trainer(lineage="l1")
    assert other.take(1, math=4).gids == scene.take(1, math=4).gids
    other.check()


def test_import_without_the_function_of_the_policy_imports_nothing(
    make_scene: Make, tmp_path: Path
) -> None:
    scene = make_scene(order=CUSTOM)
    file = write(tmp_path / "f.jsonl", *rows(2, 4))
    with pytest.raises(ConfigError, match="not loaded"):
        scene.run.import_groups(file)
    scene.run.buffer.order_function = lambda group: float("nan") if group.longest == 4 else 0.0
    with pytest.raises(ConfigError, match="returned nan"):
        scene.run.import_groups(file)
    assert scene.counters() == {}
    scene.check()


def test_imported_group_can_be_moved_by_hand(make_scene: Make, tmp_path: Path) -> None:
    scene = make_scene(order="length_fair")
    scene.open_trainer(lineage="l0")
    scene.run.import_groups(write(tmp_path / "f.jsonl", *rows(2, 4, 2)))
    first, second, third = (group_id("math", IMPORTED_FROM + i) for i in range(3))
    assert scene.run.jobs.requeue(first) == "completed"
    assert scene.run.jobs.drop(second) == "completed"
    (job,) = scene.claim()
    assert (job.gid, scene.run.buffer.read(job.payload).status) == (first, Status.INIT)
    (entry,) = scene.take(1).entries
    assert entry.gid == third
    scene.submit(job)
    assert scene.run.ledger.quarantine(scene.trainer, 1, entry, "bad").gids == [first]
    assert scene.run.jobs.drop(third) == "dead"
    assert scene.bit("dropped", IMPORTED_FROM + 1) == 1
    scene.check()
