"""Memory is bounded in bytes (I12).

What a group costs, that every byte is counted, and who waits for room.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import pytest

from buffer.errors import MemoryFull
from buffer.groups.claim import Claim
from buffer.ids import group_id, new_nonce
from buffer.manifest import NotReady
from buffer.run.run import Run
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status, VersionSpan
from tests.buffer.scene import FIRST, Scene, prompt

GROUPS = 64
SAMPLES = 8
PROMPT = 512
RESPONSE = 1_268
"""A group of 165,888 bytes and some header."""


def large_group(gid: str, seed: int) -> RolloutGroup:
    random = np.random.default_rng(seed)
    prompt_ids = random.integers(0, 150_000, PROMPT).astype("<i4")
    states = []
    for index in range(SAMPLES):
        state = RolloutState(
            index=index, prompt_ids=prompt_ids, messages=[{"role": "user", "content": gid}]
        )
        ids = random.integers(0, 150_000, RESPONSE).astype("<i4")
        state.append(
            ids, random.normal(size=RESPONSE).astype("<f4"), [VersionSpan(0, RESPONSE, 0, "l0")]
        )
        state.response = "word" * (2 * RESPONSE)
        state.status = Status.COMPLETED
        state.finish_reason = "stop"
        state.reward = {"score": 1.0}
        states.append(state)
    return RolloutGroup(gid, "math", states)


@pytest.mark.without("memory", reason="it counts no bytes")
def test_group_of_165_kb_costs_less_than_a_tenth_more_than_its_bytes(scene: Scene) -> None:
    before = scene.raw.info("memory")["used_memory"]
    scene.enqueue(GROUPS)
    jobs = scene.claim(GROUPS)
    payload_bytes = GROUPS * len(prompt(jobs[0].gid))
    for seed, job in enumerate(jobs):
        group = large_group(job.gid, seed)
        payload_bytes += len(group_bytes.encode(group))
        scene.run.buffer.submit("w0", job, group, 4)
    cost = scene.raw.info("memory")["used_memory"] - before
    assert cost < 1.1 * payload_bytes


# -- the count ---------------------------------------------------------------------------


# -- the marks ---------------------------------------------------------------------------


@pytest.fixture
def bounded(make_scene: Callable[..., Scene]) -> Callable[[int, int], Scene]:
    """Return a run with ready, waiting (fresh and resume) and aborted groups.

    Its marks are that many bytes from what it holds.
    """

    def make(low: int, high: int) -> Scene:
        scene = make_scene()
        scene.open_trainer()
        scene.ready(0)
        scene.enqueue(3)
        held, aborted = scene.claim(2)
        scene.run.jobs.release("w0", held, "handback")
        scene.submit(aborted, status=Status.ABORTED)
        now = scene.run.memory.count().held
        limits = scene.run.limits.model_copy(
            update={"low_bytes": now + low, "high_bytes": now + high}
        )
        scene.run = Run.create(
            scene.store, scene.name, scene.run.nonce, limits, FIRST, "/weights/0"
        )
        return scene

    return make


def lanes(claim: Claim) -> list[str]:
    return [job.lane for job in claim.jobs]


def claim_all(scene: Scene) -> Claim:
    return scene.run.jobs.claim("w0", scene.worker(), new_nonce(), FIRST, 9)


def test_who_was_refused_is_rung_when_bytes_are_freed(bounded: Callable[[int, int], Scene]) -> None:
    scene = bounded(0, 10_000)
    scene.take(1)
    for bell in ("producer", "workers"):
        scene.raw.unlink(scene.keys.wake_up(bell))
    scene.run.ledger.commit(scene.trainer, 1, 1)
    assert scene.raw.llen(scene.keys.wake_up("producer")) == 1
    assert scene.raw.llen(scene.keys.wake_up("workers")) > 0
    assert scene.enqueue(1).count == 1


def test_import_stops_at_the_high_mark_and_reports_where(
    bounded: Callable[[int, int], Scene], tmp_path: Path
) -> None:
    scene = bounded(0, 10_000)
    file = tmp_path / "groups.jsonl"
    line = {"response_ids": [1, 2], "logprobs": [-0.5, -0.25], "reward": {"score": 1.0}}
    file.write_bytes(b"\n".join(orjson.dumps(line | {"gid": f"g{i}"}) for i in range(100)))
    with pytest.raises(MemoryFull, match=r"groups .* were imported") as caught:
        scene.run.import_groups(file, task="math")
    assert "from_line=" in caught.value.hint
    assert 0 < int(scene.counters()["imported"]) < 100
    scene.check()


# -- batches that only a checkpoint frees ------------------------------------------------


@pytest.fixture
def taken(make_scene: Callable[..., Scene]) -> Scene:
    """Return a run whose bytes are those of one taken batch; `limit(scene, …)` sets its marks."""
    scene = make_scene()
    scene.open_trainer()
    scene.ready(0)
    scene.take(1)
    return scene


def limit(scene: Scene, low: int, high: int) -> None:
    """Set the marks to a distance from what the run holds now."""
    held = scene.run.memory.count().held
    scene.run.limits.adopt(
        scene.run.limits.model_copy(update={"low_bytes": held + low, "high_bytes": held + high})
    )


def test_take_asks_for_a_checkpoint_where_only_that_can_make_room(taken: Scene) -> None:
    limit(taken, 0, 10_000)
    answer = taken.try_take(2)
    assert answer == NotReady({"math": (0, 1)}, checkpoint_now=True)
    assert "not committed" in str(answer)
    assert taken.try_take(2, strict=False).checkpoint_now
    taken.run.ledger.commit(taken.trainer, 1, 0)
    assert taken.try_take(2).checkpoint_now, (
        "an older checkpoint is kept: the batch is not freed yet"
    )
    taken.run.ledger.commit(taken.trainer, 1, 1)
    assert not taken.try_take(2).checkpoint_now
    taken.ready(1)
    assert taken.take(2).gids


# -- never for ever ----------------------------------------------------------------------


def test_prompts_that_fill_the_memory_by_themselves_are_claimed_one_by_one(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene()
    scene.open_trainer()
    scene.enqueue(5)
    limit(scene, -1, 0)
    for _ in range(3):
        (job,) = claim_all(scene).jobs
        assert claim_all(scene).refusal == "FULL"
        scene.submit(job)
    assert scene.enqueue(1).refusal == "FULL"
    scene.take(1, math=3)
    assert claim_all(scene).refusal == "FULL", "the batch will be freed"
    scene.run.ledger.commit(scene.trainer, 1, 1)
    assert len(claim_all(scene).jobs) == 2
    scene.check()


def test_what_fills_the_memory_for_good_slows_a_run_and_does_not_stop_it(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(max_tries=1)
    scene.open_trainer()
    scene.enqueue(1)
    (dead,) = scene.claim()
    scene.run.jobs.release("w0", dead, "failed", "too large")
    limit(scene, 0, 0)
    for step in (1, 2):
        assert scene.enqueue(3).count == 1, "one at a time"
        assert scene.enqueue(1).refusal == "FULL"
        (job,) = scene.claim(3)
        scene.submit(job)
        scene.take(step)
        scene.run.ledger.commit(scene.trainer, step, step)
    scene.check()


def test_one_call_starts_no_more_prompts_than_fit_below_the_mark(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene()
    size = len(prompt(group_id("math", 0)))
    limit(scene, 3 * size, 9 * size)
    assert scene.enqueue(9).count == 3
    assert scene.run.memory.use().refuses_fresh


# -- compression -------------------------------------------------------------------------


def test_run_with_zstd_stores_less_and_gives_the_same(
    make_scene: Callable[..., Scene], tmp_path: Path
) -> None:
    scene = make_scene(compression="zstd")
    scene.open_trainer()
    scene.enqueue(2)
    first, second = scene.claim(2)
    group = large_group(first.gid, 1)
    scene.run.buffer.submit("w0", first, group, 4)
    stored = scene.payload(first.gid)
    assert stored.size < 0.9 * len(group_bytes.encode(group))
    assert scene.run.memory.count().held == stored.size + sum(
        job.payload.size for job in (first, second)
    )
    # a run that changes its mind reads what it has
    limits = scene.run.limits.model_copy(update={"compression": "none"})
    plain = Run.create(scene.store, scene.name, scene.run.nonce, limits, FIRST, "/weights/0")
    plain.buffer.submit("w0", second, large_group(second.gid, 2), 4)
    manifest = scene.take(1, math=2)
    for seed, found in enumerate(plain.buffer.load(manifest), start=1):
        assert group_bytes.encode(found) == group_bytes.encode(large_group(found.gid, seed))
    scene.check()
