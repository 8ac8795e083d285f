from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from buffer.errors import Fenced, LostRun, RoleHeld, RunExists, RunNotFound
from buffer.ids import new_nonce
from buffer.ledger.position import Position
from buffer.limits import REGENERATING
from buffer.maintenance import regeneration
from buffer.maintenance.regeneration import Regeneration
from buffer.maintenance.remove_run import clear_keys
from buffer.run.run import Run
from buffer.wire.rollout import Status
from tests.buffer.damage import every_harm
from tests.buffer.keyspace import exact, run_keys
from tests.buffer.scene import FIRST, Scene, extend
from tests.buffer.story import DRAWS, Story
from tests.buffer.time_machine import put_back, remember

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def story(make_scene: Callable[..., Scene]) -> Story:
    return Story(make_scene(max_tries=1, stale_threshold=20))


def regenerate(story: Story, step: int = 3, **options: Any) -> Run:
    scene = story.scene
    position = story.trainer.checkpoints.get(step, Position()).model_copy(deep=True)
    limits = scene.run.limits
    again = Regeneration(position, **options)
    scene.run = Run.create(
        scene.store, scene.name, scene.run.nonce, limits, FIRST, "/weights/0", regeneration=again
    )
    return scene.run


def ends_well(story: Story) -> None:
    """It is trained to the end: nothing twice, and nothing was closed but rows without a prompt."""
    story.finish()
    trained = story.trainer.position.trained
    for task in ("math", "code"):
        progress = story.scene.run.progress(task)
        assert int(progress["archived"]) == trained.count(task)
        # a filtered group is judged again, and the row that no group can be made of is drawn again
        assert int(progress.get("dropped", 0)) == (int(progress["cursor"]) >= DRAWS)
        assert int(progress.get("filtered", 0)) == 0


@pytest.mark.slow
def test_every_key_deleted_retyped_or_renamed_leaves_a_clean_run(story: Story) -> None:
    """The whole table of keys, in every stage of a group; some of them are then trained on."""
    scene = story.scene
    moment = remember(scene.raw, scene.name)
    hows = ("deleted", "renamed", "of another type")
    harms = [harm for harm in every_harm(scene.raw, scene.name) if harm.how in hows]
    assert len(harms) > 100
    finished: set[str] = set()
    for harm in harms:
        put_back(scene.raw, scene.name, moment)
        story.leave()
        harm.do(scene.raw)
        regenerate(story)
        assert not [key for key in run_keys(scene.raw, scene.name) if "payload:" in key], harm
        if harm.kind in finished:
            story.trainer.open(story.trainer.checkpoints[3])
            assert scene.run.account.fsck().clean, harm
        else:
            ends_well(story)
        finished.add(harm.kind)


@pytest.mark.parametrize("seed", range(6))
def test_evicted_run_ends_with_a_clean_account(story: Story, seed: int) -> None:
    """Any part of the keys is gone, as after an eviction; then trainers die in the middle of it."""
    scene = story.scene
    chance = random.Random(seed)
    share = chance.uniform(0.1, 1.0)
    for key in run_keys(scene.raw, scene.name):
        if chance.random() < share:
            scene.raw.delete(key)
    regenerate(story)
    ends_well(story)


def test_foreign_keys_are_left_alone(story: Story) -> None:
    scene = story.scene
    near = [f"rmq:{{{scene.name}x}}:meta", f"rmq:{{x{scene.name}}}:meta", "rq:queue:default"]
    near += [f"rmq:{scene.name}:meta", f"{scene.keys.prefix[1:]}meta"]
    for key in near:
        scene.raw.set(key, "theirs")
    own = b"%s\xff\xfe" % scene.keys.prefix.encode()
    scene.raw.set(own, "no text")
    regenerate(story)
    assert [scene.raw.get(key) for key in near] == [b"theirs"] * len(near)
    assert not scene.raw.exists(own)
    for key in near:
        scene.raw.delete(key)


def test_run_of_another_folder_is_not_cleared(story: Story) -> None:
    scene = story.scene
    for _ in range(2):
        regenerate(story)
        before = exact(scene.raw, scene.name)
        with pytest.raises(RunExists):
            Run.create(
                scene.store, scene.name, new_nonce(), scene.run.limits, FIRST,
                regeneration=Regeneration(Position()),
            )  # fmt: skip
        assert exact(scene.raw, scene.name) == before


def test_processes_from_before_are_fenced_and_leave_nothing_behind(story: Story) -> None:
    """A trainer that is alive is asked for; workers and producers lose all that they held."""
    scene = story.scene
    trainer = scene.open_trainer(3, take_over=True)
    producer = scene.open_producer()
    scene.worker()
    before = exact(scene.raw, scene.name)
    with pytest.raises(RoleHeld):
        regenerate(story)
    assert exact(scene.raw, scene.name) == before
    (held,) = scene.claim(1)
    group = extend(scene.run.buffer.read(held.payload), Status.COMPLETED, FIRST)
    regenerate(story, take_over=True)
    with pytest.raises(LostRun):
        scene.run.control.renew_role("trainer", trainer)
    with pytest.raises((Fenced, LostRun)):
        scene.run.jobs.enqueue(producer, new_nonce(), "math", 0, [2], 1000)
    with pytest.raises(Fenced):
        scene.run.buffer.submit("w0", held, group, 4)
    late = [key for key in run_keys(scene.raw, scene.name) if "payload:" in key]
    assert late
    assert all(scene.raw.pttl(key) > 0 for key in late)
    story.leave()
    ends_well(story)


class Died(BaseException):
    """In place of SIGKILL."""


def test_a_command_that_dies_anywhere_is_repeated(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies after each round trip; meanwhile nobody can open the run, and the repetition ends it."""
    scene = story.scene
    moment = remember(scene.raw, scene.name)
    original = scene.store.retrying
    deaths = 0
    while True:
        put_back(scene.raw, scene.name, moment)
        left = deaths

        def retrying(*args: Any, **options: Any) -> Any:
            nonlocal left
            answer = original(*args, **options)
            # not in the thread of an earlier, dead attempt that still reads ahead
            if threading.current_thread() is not threading.main_thread():
                return answer
            if not left:
                raise Died
            left -= 1
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(type(scene.store), "retrying", lambda _, *a, **o: retrying(*a, **o))
            try:
                regenerate(story)
                break
            except Died:
                pass
        deaths += 1
        if scene.raw.hget(scene.keys.meta, "schema") == REGENERATING.encode():
            with pytest.raises(RunNotFound, match="made again"):
                Run.open(scene.store, scene.name)
            with pytest.raises(RunNotFound, match="made again"):
                Run.create(scene.store, scene.name, scene.run.nonce, scene.run.limits, FIRST)
        regenerate(story)
        story.trainer.open(story.trainer.checkpoints[3])
        assert scene.run.account.fsck().clean
    assert deaths > 3


def test_what_is_written_behind_the_walk_is_removed_as_well(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker submits while its pool is gone already and its record is not."""
    scene = story.scene
    late = scene.keys.pool("math", "completed")
    walks = 0

    def clear(store: Any, keys: Any, but: Any) -> int:
        nonlocal walks

        def advance(count: int) -> None:
            nonlocal walks
            walks += 1
            if walks < 3:
                scene.raw.zadd(late, {"0000000001:math-0000000001": 1})

        return clear_keys(store, keys, but, advance)

    monkeypatch.setattr(regeneration, "clear_keys", clear)
    regenerate(story)
    assert walks >= 3
    assert not scene.raw.exists(late)
    ends_well(story)


def test_settings_and_the_run_of_the_checkpoint_are_kept(story: Story) -> None:
    scene = story.scene
    position = story.trainer.checkpoints[3]
    position.run_nonce = new_nonce()
    with pytest.raises(LostRun):
        story.trainer.open(position)
    regenerate(story)
    story.trainer.open(position)
    assert scene.run.account.fsck().clean
    # a trainer that dies before its first checkpoint comes with the same position
    story.trainer.open(story.trainer.checkpoints[3])
    assert scene.run.account.fsck().clean
    ends_well(story)


def test_leftovers_are_counted_before_anything_is_changed(story: Story) -> None:
    scene = story.scene
    records = [key for key in run_keys(scene.raw, scene.name) if ":group:" in key]
    before = exact(scene.raw, scene.name)
    again = Regeneration(story.trainer.checkpoints[3])
    left = again.leftovers(scene.store, scene.name, ["math", "code"])
    assert (left.groups, left.steps, left.added_by_hand) == (len(records), 1, 0)
    scene.raw.delete(scene.keys.progress("math"))
    scene.raw.set(scene.keys.progress("math"), "junk")
    assert again.leftovers(scene.store, scene.name, ["math", "code"]).added_by_hand is None
    scene.raw.delete(scene.keys.progress("math"))
    assert before.keys() >= exact(scene.raw, scene.name).keys()


def test_without_a_checkpoint_the_run_starts_from_its_first_step(story: Story) -> None:
    regenerate(story, step=0)
    story.trainer.open(Position())
    assert story.scene.run.ledger.steps().taken == 0
    assert story.scene.run.account.fsck().clean
