"""What the reference (XTuner v1) promises of producing; docstrings say where ours differs.

Shares by weight, should_continue_fn, several tasks: test_agent_loop_manager.py. Raw rewards before
filtering: test_task_runner.py. Its state machine: test_disaggregated.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from buffer.config.assignments import parse_settings
from buffer.control.control import Mode
from buffer.control.task_status import ProduceBatchStatus
from buffer.job import Job
from buffer.limits import TaskLimits
from buffer.run.settings import LiveSettings
from buffer.wire.rollout import Status
from tests.buffer.scene import rollout
from tests.pipeline.mixture import Mixture

Make = Callable[..., Mixture]
STATUS = ProduceBatchStatus


def one_task(**changes: object) -> dict[str, object]:
    """Return the settings of a run of one task with 4 groups a batch."""
    own = {name: changes.pop(name) for name in ("strategy", "max_in_flight") if name in changes}
    return {"tasks": {"math": TaskLimits(**own)}, "batch_size": 4, "steps": 50, **changes}


def put(mixture: Mixture, *statuses: Status) -> list[str]:
    """Put groups of the newest weights into the pools."""
    weights = mixture.run.control.state().weights
    return list(mixture.run.buffer.put("math", [[rollout(status, weights)] for status in statuses]))


def complete(mixture: Mixture, jobs: Iterable[Job]) -> None:
    for job in jobs:
        mixture.scene.submit(job, mixture.run.control.state().weights)


DONE = Status.COMPLETED
CUT = Status.ABORTED
OLD = Status.EXPIRED


# -- progress ----------------------------------------------------------------


def test_what_is_available_does_not_fall_when_a_batch_is_taken_in_the_middle(
    make_mixture: Make,
) -> None:
    """Agree with the reference: targets are absolute.

    A batch that is consumed while producing is not produced twice.
    """
    mixture = make_mixture(one_task(stale_threshold=2))
    with mixture.manager.opened():
        mixture.round()
        jobs = mixture.claim()
        complete(mixture, jobs[:5])
        mixture.take(1)
        assert mixture.round() == 0
        complete(mixture, jobs[5:])
        assert mixture.round() == 0
    assert mixture.stages() == {"completed": 4, "taken": 4}
    mixture.scene.check()


TAIL_BATCH = {"over_sample_threshold": 1.0, "on_straggler": "retry", "tail_batch_trigger_size": 3}

# -- strategies --------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "pools", "started", "resumed"),
    [
        # the reference's first launch ignores what the buffer holds; ours works with a
        # disaggregated trainer, too
        ({"strategy": "sync"}, [DONE, DONE, DONE], 1, 0),
        # aborted groups of a synchronous run start again (there they are stored, and never sampled);
        # expired ones are dropped in both
        ({"strategy": "sync", "on_straggler": "retry"}, [CUT, OLD], 4, 1),
        # over-sampling is a share of the batch, and not of what is missing
        ({"over_sample_threshold": 1.0}, [DONE, DONE, DONE], 5, 0),
        # expired groups are retried at once, with over-sampling
        ({"over_sample_threshold": 1.0, "on_straggler": "retry"}, [OLD], 8, 1),
        # pools first, then the data set
        ({}, [CUT, CUT], 4, 2),
        # three expired groups trigger a tail batch, which the data set fills, without a surplus
        (TAIL_BATCH, [OLD, OLD, OLD], 4, 3),
    ],
)
def test_a_round_starts_what_the_reference_starts(
    make_mixture: Make, settings: dict[str, object], pools: list[Status], started: int, resumed: int
) -> None:
    mixture = make_mixture(one_task(**settings))
    put(mixture, *pools)
    with mixture.manager.opened():
        assert mixture.round() == started
        assert len(mixture.scene.stream("resume")) == resumed
        assert mixture.round() == 0


def test_sync_makes_up_for_what_was_filtered_and_what_failed_for_good(make_mixture: Make) -> None:
    """The same, but for `max_tries`: there, a group that fails is retried for ever."""
    mixture = make_mixture(one_task(strategy="sync", max_tries=1))
    with mixture.manager.opened():
        mixture.round()
        filtered, failed, *others = mixture.claim()
        mixture.scene.submit(filtered, filtered=True)
        mixture.run.jobs.release("w0", failed, "failed", "no answer")
        complete(mixture, others)
        assert mixture.round() == 2
        complete(mixture, mixture.claim())
        assert mixture.round() == 0
    assert mixture.stages() == {"completed": 4, "filtered": 1, "dead": 1}


def test_what_was_started_beyond_the_batch_counts_in_the_next_round(make_mixture: Make) -> None:
    """Agree with the reference: pending groups survive the round.

    The next round starts only what is missing beyond them.
    """
    mixture = make_mixture(one_task(over_sample_threshold=1.0))
    with mixture.manager.opened():
        assert mixture.round() == 8
        jobs = mixture.claim()
        complete(mixture, jobs[:4])
        mixture.take(1)
        mixture.publish(1)
        assert mixture.round() == 4
    assert mixture.stages() == {"taken": 4, "running": 4, "waiting": 4}


def test_a_tail_batch_lasts_until_it_is_made(make_mixture: Make) -> None:
    """Agree with the reference, which decides once per batch; there, its producer must not die.

    What no round changes: another round, a producer in its stead, settings, lost and failed groups.
    """
    settings = one_task(
        over_sample_threshold=1.0, on_straggler="retry", tail_batch_trigger_size=3, max_tries=1
    )
    mixture = make_mixture(settings)
    old = put(mixture, OLD, OLD, OLD)
    with mixture.manager.opened():
        assert mixture.round() == 4
        assert mixture.round() == 0
    late = put(mixture, OLD)
    mixture.manager = mixture.new_manager()
    with mixture.manager.opened(take_over=True):
        assert mixture.round() == 0
        jobs = mixture.claim()
        mixture.run.jobs.release("w0", jobs.pop(), "failed", "no answer")
        mixture.run.set(parse_settings(LiveSettings, ["over_sample_threshold=2"]))
        assert mixture.round() == 1
        again = mixture.claim()
        assert [job.gid for job in again] == late
        mixture.run.set(parse_settings(LiveSettings, ["on_straggler=drop"]))
        complete(mixture, [*jobs, *again])
        # what the newest weights serve is made: a surplus would be made for no step
        assert mixture.round() == 0
        assert set(old) <= {job.gid for job in jobs}
        mixture.take(1)
        mixture.publish(1)
        assert mixture.round() == 4 + 8
    mixture.scene.check()


def test_a_tail_batch_ends_once_it_is_made_though_newer_weights_ask_for_more(
    make_mixture: Make,
) -> None:
    """In the reference, the next batch is begun after it; here, both may be in flight."""
    settings = one_task(
        over_sample_threshold=1.0,
        on_straggler="retry",
        tail_batch_trigger_size=3,
        stale_threshold=2,
    )
    mixture = make_mixture(settings)
    put(mixture, OLD, OLD, OLD)
    with mixture.manager.opened():
        assert mixture.round() == 8
        jobs = mixture.claim()
        complete(mixture, jobs[:4])
        mixture.take(1)
        mixture.publish(1)
        assert mixture.round() == 4
        complete(mixture, jobs[4:7])
        assert mixture.round() == 0
        complete(mixture, jobs[7:])
        assert mixture.round() == 4


def test_groups_in_flight_may_be_capped(make_mixture: Make) -> None:
    """There, nothing bounds them but target and over-sampling."""
    mixture = make_mixture(one_task(over_sample_threshold=1.0, max_in_flight=3))
    with mixture.manager.opened():
        assert mixture.round() == 3
        assert mixture.round() == 0
        complete(mixture, mixture.claim()[:2])
        assert mixture.round() == 2


def test_a_step_whose_weights_are_too_old_is_not_produced_until_newer_ones_come(
    make_mixture: Make,
) -> None:
    """Have the same statuses as the reference.

    There, one expired task expires the batch for all; here the threshold is the run's.
    """
    mixture = make_mixture(one_task(stale_threshold=2))
    with mixture.manager.opened():
        mixture.rounds(2)
        for step in (1, 2):
            mixture.take(step)
        assert mixture.manager.produce_batch(3).status is STATUS.EXPIRED_BATCH
        assert mixture.round() == 0
        mixture.publish(2)
        assert mixture.round() == 8


def test_nothing_is_started_while_weights_are_updated(make_mixture: Make) -> None:
    """The same: abort flag there, closed lanes here; what was started stays where it is."""
    mixture = make_mixture(one_task())
    with mixture.manager.opened():
        mixture.run.control.set_mode("operator", Mode.ABORT)
        assert mixture.manager.produce_batch(1).status is STATUS.UPDATE_WEIGHT_AND_ABORT
        assert mixture.round() == 0
        mixture.run.control.set_mode("operator", Mode.RUN)
        assert mixture.round() == 4
