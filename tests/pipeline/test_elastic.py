"""A worker process whose connection is cut, and that gets a signal to leave."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from buffer.redis.store import Store
from tests.buffer.cutting_proxy import CuttingProxy
from tests.pipeline.site import Site
from tests.pipeline.yard import LIMITS, Yard

ENDLESS = (50_000, 50_000)
"""A thousand seconds of the engine of a site."""


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    site = make_site()
    site.server.start()
    return site


@pytest.fixture
def yard(site: Site, tmp_path: Path) -> Iterator[Yard]:
    """Make the run that the site's workers find on its server."""
    with closing(Store(site.server.url, deadline_s=400.0)) as store:
        yield Yard(store, site.name, tmp_path, LIMITS.model_copy(update={"lease_ms": 60_000}))


def test_worker_keeps_results_without_a_network_and_hands_back_the_rest_when_it_is_stopped(
    site: Site, yard: Yard
) -> None:
    server = site.server.url.removeprefix("unix://")
    socket = site.folder / "network"
    network = CuttingProxy(server, socket)
    yard.enqueue(1, tokens=(100, 100))
    long = yard.enqueue(2, ENDLESS)
    options = [
        "redis.deadline_s=1",
        "strategy.enable_partial_rollout=true",
        "worker.drain_timeout_s=1",
        "learner.allow_truncated_sampling=true",  # its rows set min_tokens
    ]
    overrides = [part for option in options for part in ("--set", option)]
    worker = site.start("worker", "--id", "away", "--redis-url", network.url, *overrides)
    site.until(
        lambda: any(worker.requests in (4, 6) for worker in yard.run.fleet.workers()),
        "a full engine",
    )
    network.close()
    if "completed" not in yard.places():  # on a slow machine it was quicker than we were
        site.until(lambda: "keeping finished groups" in worker.said(), "the end of the short group")
        assert yard.places() == {"running": 3}
    socket.unlink()
    with closing(CuttingProxy(server, socket)):
        site.until(lambda: yard.places() == {"completed": 1, "running": 2}, "its result")
        assert worker.end(signal.SIGTERM) == 130, worker.said()
    assert yard.places() == {"completed": 1, "aborted": 2}
    assert not yard.run.fleet.workers(), "it has said good-bye"
    begun = [len(state.response_ids) for gid in long for state in yard.group(gid).states]
    assert all(0 < tokens < ENDLESS[0] for tokens in begun), (
        "the tokens that were made are kept for the next worker"
    )
    assert {record["tries"] for record in yard.records()} == {"0"}
    assert yard.counters().get("leases_lost", 0) == 0
    assert yard.counters()["produced_tokens"] == 200 + sum(begun), "each token was counted once"
    yard.check()


def test_an_id_is_of_one_live_worker_until_another_takes_over(site: Site, yard: Yard) -> None:
    def pids() -> list[str]:
        return [str(worker.facts["pid"]) for worker in yard.run.fleet.workers()]

    first = site.start("worker", "--id", "w0")
    site.until(lambda: pids() == [str(first.pid)], "the first worker")
    second = site.start("worker", "--id", "w0")
    assert second.wait() != 0
    assert "w0" in second.said()
    assert "--take-over" in second.said()
    third = site.start("worker", "--id", "w0", "--take-over")
    site.until(lambda: pids() == [str(third.pid)], "the worker that took over")
    assert first.wait() != 0, "it was fenced"
    assert third.end(signal.SIGTERM) == 130
