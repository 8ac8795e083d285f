"""Random histories of a run agree with a model of it.

`MACHINE_EXAMPLES=500 pytest tests/buffer/test_machine.py` runs longer, differently every time, and shrinks
what it finds (which takes minutes).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from buffer import Store
from tests.buffer.machine import TASKS, WORKERS, Machine
from tests.servers import Server, start_server

EXAMPLES = int(os.environ.get("MACHINE_EXAMPLES", "0"))


def moves(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


task, worker, pick = st.sampled_from(TASKS), st.sampled_from(WORKERS), st.integers(0, 63)
few, some = st.integers(0, 3), st.integers(1, 4)
outcome = st.sampled_from(["completed", "aborted", "aborted", "filtered"])
kind = st.sampled_from(["handback", "aborted", "failed"])
pool = st.sampled_from(["aborted", "expired"])
samples = st.lists(st.sampled_from([1, 1, 1, 0]), min_size=1, max_size=6)

COMMON = [
    moves("produce", worker=worker, task=task, number=some),
    moves("train", math=some, code=few),
    moves("enqueue", task=task, samples=samples, ahead=st.integers(0, 12)),
    moves("claim", worker=worker, limit=some),
    moves("submit", worker=worker, which=pick, outcome=outcome),
    moves("release", worker=worker, which=pick, kind=kind),
    moves("reissue", task=task, status=pool, ahead=st.integers(0, 12), limit=some),
]
RARE = [
    moves("heartbeat", worker=worker),
    moves("leases_run_out", worker=worker),
    moves("fence", worker=worker),
    moves("take", math=few, code=few, strict=st.booleans()),
    moves("take_again", which=pick),
    moves("take_a_wrong_step", step=st.integers(0, 8)),
    moves("commit", behind=few, keep=few),
    moves("publish"),
    moves("load_weights", worker=worker),
    moves("restart_trainer", back=few),
    moves("restart_trainer_from_a_checkpoint_that_is_gone"),
    moves("zombie_trainer", which=pick),
    moves("quarantine", which=pick),
    moves("requeue", which=pick),
    moves("drop", which=pick, by_name=st.booleans()),
    moves("refresh", task=task, limit=some),
    moves("collect_garbage"),
    moves("server_forgets_its_scripts"),
]
orders = st.sampled_from(["staleness", "fifo", "fifo", "freshest"])
histories = st.lists(st.sampled_from(COMMON * 2 + RARE).flatmap(lambda move: move), min_size=70, max_size=110)


@pytest.fixture(scope="module")
def machine_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server("valkey", tmp_path_factory.mktemp("machine")) as server:
        yield server


@pytest.mark.timeout(3600 if EXAMPLES else 300)
def test_random_histories_agree_with_the_model(machine_server: Server) -> None:
    numbers = count(1)
    store = Store(machine_server.url, deadline_s=10.0)

    @settings(
        max_examples=EXAMPLES or 80,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(tail_batch=st.sampled_from([-1, 0, 2]), order=orders, history=histories)
    def live(tail_batch: int, order: str, history: list[tuple[str, dict[str, Any]]]) -> None:
        raw.flushall()
        machine = Machine(store, raw, f"machine-{next(numbers)}", tail_batch, order)
        for name, arguments in history:
            getattr(machine, name)(**arguments)
            machine.check_totals()
        machine.check_everything()

    with machine_server.connect() as raw:
        live()
    store.close()
