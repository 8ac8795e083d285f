"""Yards on the embedded server (`on_both`: on Redis too), or on one that a test kills."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from consumer.handle import taker, wait_rules
from producer_workers.worker import worker
from tests.buffer.scene import Scene
from tests.pipeline.mixture import LIMITS as MIXED
from tests.pipeline.mixture import Mixture
from tests.pipeline.site import Site
from tests.pipeline.yard import LIMITS, Yard
from tests.servers import Server


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers and trainers of this process look often, which ends their waits soon."""
    monkeypatch.setattr(worker, "IDLE_S", 0.2)
    for module in (taker, wait_rules):
        monkeypatch.setattr(module, "POLL_S", 0.05)


@pytest.fixture
def make_yard(
    request: pytest.FixtureRequest,
    server_of: Callable[[str], Server],
    run_name: str,
    tmp_path: Path,
) -> Iterator[Callable[..., Yard]]:
    """Return a function that makes a yard with other limits: `make_yard(max_tries=1)`.

    The fixture's parameter is the kind of server.
    """
    store = Store(server_of(getattr(request, "param", "valkey")).url, deadline_s=400.0)
    yield lambda **changes: Yard(store, run_name, tmp_path, LIMITS.model_copy(update=changes))
    store.close()


@pytest.fixture
def yard(make_yard: Callable[..., Yard]) -> Yard:
    return make_yard()


@pytest.fixture
def make_mixture(
    request: pytest.FixtureRequest, server_of: Callable[[str], Server], run_name: str
) -> Iterator[Callable[..., Mixture]]:
    """Return a function that makes a run of several tasks.

    Usage: `make_mixture({"batch_size": 3}, should_continue=f)`. The fixture's parameter is the kind
    of server.
    """
    server = server_of(getattr(request, "param", "valkey"))
    made = list[Mixture]()
    store = Store(server.url, deadline_s=400.0)
    with server.connect() as raw:

        def make(changes: dict[str, Any] | None = None, **functions: Any) -> Mixture:
            limits = MIXED.model_copy(update=changes or {})
            made.append(Mixture(Scene(store, raw, f"{run_name}-{len(made)}", limits), **functions))
            return made[-1]

        yield make
        for mixture in made:
            mixture.consumer.close()
    store.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """Start a server that the test may kill."""
    with EmbeddedServer(tmp_path / "server") as server:
        yield server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a random model of some thousand weights, once."""
    from tests.consumer.grpo.models.tiny import build_model

    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_site(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Site]]:
    """Return a function that makes a run in a folder; end all of its processes afterwards."""
    sites: list[Site] = []

    def make(folder: str = "site", **changes: Any) -> Site:
        sites.append(Site(tmp_path / folder, tiny_model, **changes))
        return sites[-1]

    yield make
    for site in sites:
        site.close()
