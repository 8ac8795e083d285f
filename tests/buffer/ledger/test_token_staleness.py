"""Token-level staleness (I5, I8).

Old tokens are masked, and a rollout without newer ones expires its group.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer.config.assignments import parse_settings
from buffer.errors import ConfigError
from buffer.limits import TaskLimits
from buffer.manifest import NotReady
from buffer.run.run import Run
from buffer.run.settings import LiveSettings
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, RolloutState, Status, VersionSpan
from buffer.wire.staleness import living_version
from tests.buffer.checkpointing import Trainer
from tests.buffer.invariants.batches import swap_out_and_forget_it
from tests.buffer.scene import Scene

Make = Callable[..., Scene]
Spans = list[tuple[int, int, int, str]]


def state(
    index: int, spans: Spans, mask: list[int] | None = None, status: Status = Status.COMPLETED
) -> RolloutState:
    """Four tokens."""
    return RolloutState(
        index=index,
        prompt_ids=[1],
        response_ids=[5, 6, 7, 8],
        logprobs=[0.0] * 4,
        spans=[VersionSpan(*span) for span in spans],
        response_mask=mask,
        status=status,
        reward={"score": 1.0},
    )


def old_and_new(old: int, new: int, lineage: str = "l1") -> list[RolloutState]:
    """Return a rollout of two weights, and one of the newer weights only."""
    return [
        state(0, [(0, 2, old, lineage), (2, 2, new, lineage)]),
        state(1, [(0, 4, new, lineage)]),
    ]


@pytest.fixture
def scene(make_scene: Make) -> Scene:
    """Return a run whose groups expire at staleness 3, and whose tokens expire at 1."""
    scene = make_scene(stale_threshold=3, token_threshold=1, on_straggler="retry")
    scene.open_trainer()
    return scene


def pass_steps(scene: Scene, taken: int) -> None:
    scene.raw.hset(scene.keys.ledger("train"), "taken", taken)


def masks(groups: list[RolloutGroup]) -> list[list[int]]:
    return [group.mask.tolist() for group in groups]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([[(0, 2, 3, "a"), (2, 2, 5, "a")], [(0, 4, 4, "a")]], {"a": 4}),
        ([[(0, 2, 9, "a"), (2, 2, 5, "b")], [(0, 4, 7, "b")]], {"b": 5}),
        ([[(0, 4, 3, "a")], [(0, 4, 2, "b")]], {"a": 3, "b": 2}),
        ([[(0, 2, 3, "a")]], {}),  # two trained tokens that do not age
        ([[]], {}),
    ],
)
def test_rollout_runs_out_with_its_last_weights(
    members: list[Spans], expected: dict[str, int]
) -> None:
    group = RolloutGroup("g-0000000000", "g", [state(i, spans) for i, spans in enumerate(members)])
    assert group.last_by_lineage() == expected


@pytest.mark.parametrize(
    ("mask", "expected"), [([1, 1, 0, 0], {"a": 3}), ([0, 0, 0, 1], {"a": 5}), ([0] * 4, {})]
)
def test_only_trained_tokens_count(mask: list[int], expected: dict[str, int]) -> None:
    group = RolloutGroup("g-0000000000", "g", [state(0, [(0, 2, 3, "a"), (2, 2, 5, "a")], mask)])
    assert group.last_by_lineage() == expected


def test_versions_count_no_later_than_any_fork_after_their_lineage() -> None:
    forks = [("a", 0), ("b", 4), ("c", 2)]
    assert [living_version(forks, name, 9) for name in ("a", "b", "c", "unknown")] == [2, 2, 9, 0]
    assert living_version(forks, "a", 1) == 1
    assert living_version([], "a", 7) == 7


def test_old_tokens_are_masked_in_the_batch_and_stay_so_whenever_it_is_delivered(
    scene: Scene,
) -> None:
    buffer = scene.run.buffer
    pass_steps(scene, 1)
    buffer.put("math", [old_and_new(0, 1)])
    taken = scene.run.take_batch(scene.trainer, 2, {"math": 1})
    assert isinstance(taken, dict)
    assert masks(taken["math"]) == [[0, 0, 1, 1, 1, 1, 1, 1]]
    assert taken["math"][0].states[0].response_mask is not None
    # a fork at step 0 makes version 1 of this lineage count as 0, but not in a batch that is
    # recorded
    scene.open_trainer(step=0, lineage="l2", take_over=True)
    again = buffer.load(scene.take(2))
    assert masks(again) == masks(taken["math"])
    assert masks([buffer.read(scene.payload(again[0].gid))]) == [[1] * 8]


def test_evaluations_are_not_masked(scene: Scene) -> None:
    (gid,) = scene.ready(0, task="quiz")
    pass_steps(scene, 9)
    assert scene.pool("completed", "quiz") == [(gid, 0.0)]
    batch = scene.run.evaluations.take(scene.trainer, 1, {"quiz": 1})
    assert masks(scene.run.buffer.load(batch)) == [[1, 1, 1, 1]]  # type: ignore[arg-type]


TASKS = {"math": TaskLimits(), "code": TaskLimits(stale_threshold=4)}


def change(run: Run, *assignments: str) -> None:
    run.set(parse_settings(LiveSettings, assignments))


def test_a_batch_and_its_substitutes_keep_to_the_limit_of_their_task(make_scene: Make) -> None:
    scene = make_scene(stale_threshold=1, tasks=TASKS, on_straggler="retry")
    scene.open_trainer()
    scene.ready(0)
    scene.take(1)
    scene.ready(0, 0, 0)
    (old, spare) = scene.ready(0, 0, task="code")
    assert scene.try_take(2, math=1, code=1).missing == {"math": (0, 1), "code": (2, 1)}
    (fresh,) = scene.ready(1, lineage="l1")
    manifest = scene.take(2, math=1, code=1)
    assert manifest.gids == [fresh, old]
    assert " cut=math=1,code=-2 " in manifest.header
    # a substitute is as young as the batch required of its task
    assert scene.run.ledger.quarantine(scene.trainer, 2, manifest.entries[0], "bad").gids == [old]
    manifest = scene.run.ledger.quarantine(scene.trainer, 2, manifest.entries[1], "bad")
    assert manifest.gids == [spare]
    scene.ready(0)
    assert scene.run.ledger.refill(scene.trainer, 2) == NotReady({"math": (0, 1)})
    assert scene.run.buffer.refresh_staleness() == {"math": 4, "code": 0}
    scene.check()


def test_a_change_of_a_task_survives_a_change_of_the_run(make_scene: Make) -> None:
    scene = make_scene(stale_threshold=1, tasks=TASKS)
    scene.open_trainer()
    scene.ready(0)
    scene.take(1)
    scene.ready(0)
    scene.ready(0, task="code")
    other = Run.open(scene.store, scene.name)
    assert [sizes.stale for sizes in other.buffer.count_statuses().values()] == [1, 0]
    change(scene.run, "tasks.code.max_staleness=0")
    change(scene.run, "max_staleness=3")
    other.refresh_limits()
    assert [other.limits.threshold(task) for task in ("math", "code")] == [4, 1]
    assert [sizes.stale for sizes in other.buffer.count_statuses().values()] == [0, 1]
    assert other.buffer.refresh_staleness() == {"math": 0, "code": 1}


def test_the_ages_of_tokens_follow_the_limit_of_their_task_through_a_fork(make_scene: Make) -> None:
    scene = make_scene(stale_threshold=3, token_threshold=2, tasks=TASKS)
    scene.open_producer()
    trainer = Trainer(scene)
    weights = PolicyVersion(scene.trainer[:8], 3)
    for task in ("code", "math"):
        scene.ready(weights.version, task=task, lineage=weights.lineage)
    trainer.open()
    assert scene.pool("completed", "code")[0][1] == -2
    assert scene.pool("completed", "math")[0][1] == -1
    with pytest.raises(ConfigError, match="max_token_staleness"):
        change(scene.run, "tasks.math.max_staleness=4")


def test_a_dissolved_batch_returns_to_the_ages_of_its_task(make_scene: Make) -> None:
    tasks = {"math": TaskLimits(stale_threshold=5), "code": TaskLimits()}
    scene = make_scene(stale_threshold=3, token_threshold=2, tasks=tasks)
    scene.open_producer()
    trainer = Trainer(scene)
    bad, _ = scene.ready(3, 3, lineage=scene.trainer[:8])
    scene.take(1)
    trainer.open()
    swap_out_and_forget_it(scene, trainer)
    assert scene.pool("completed") == [(bad, -3)]
    scene.check()


def test_a_refresh_expires_the_statuses_that_it_is_asked_for(make_scene: Make) -> None:
    scene = make_scene(stale_threshold=1, tasks=TASKS, tail_batch_trigger_size=0)
    scene.open_trainer()
    scene.ready(0, 1, lineage="l1")
    scene.raw.hset(scene.keys.ledger("train"), "taken", 1)
    refresh = scene.run.buffer.refresh_staleness
    assert refresh(statuses=[Status.ABORTED]) == {"math": 0, "code": 0}
    assert refresh("code", statuses=["completed"]) == {"code": 0}
    assert refresh("math", statuses=[Status.COMPLETED]) == {"math": 1}
    for wrong in ([Status.EXPIRED], "completed"):
        with pytest.raises(ConfigError, match="statuses: completed, aborted"):
            refresh(statuses=wrong)
