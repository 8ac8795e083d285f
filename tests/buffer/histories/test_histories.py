"""Random histories of a run agree with a model of it.

`make test-histories` runs 2,000 of them, different ones every time, for half an hour;
`HISTORIES=500 pytest tests/buffer/histories/test_histories.py` runs as many as you like. With
`MACHINE_SHRINK=1` what is found is made shorter, which takes minutes. `--log-cli-level=INFO` says
in how many histories each move found something to do, and each script gave each reply.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from buffer.limits import Straggler
from tests.buffer.faulty_store import FaultyStore
from tests.buffer.histories.all_moves import AllMoves
from tests.buffer.histories.model import TASKS, WORKERS
from tests.servers import Server, start_server
from tests.thoroughness import examples

log = logging.getLogger("histories")
EXAMPLES = int(os.environ.get("HISTORIES", "0"))
SHRINKS = bool(os.environ.get("MACHINE_SHRINK"))


QUIET = {
    "load_weights", "remember", "collect_garbage", "server_forgets_its_scripts",
    "worker_dies_before_it_submits",
}  # fmt: skip
"""Moves that call no script."""

MOVES = set[str]()
"""All others."""


def moves(
    name: str, **arguments: st.SearchStrategy[Any]
) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    MOVES.update({name} - QUIET)
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


task = st.sampled_from(TASKS)
worker = st.sampled_from(WORKERS)
pick = st.integers(0, 63)
slot = st.integers(0, 1)
lives = st.sampled_from([0, 0, 1, 2, 3, 5])
few = st.integers(0, 3)
some = st.integers(1, 4)
outcome = st.sampled_from(["completed", "aborted", "aborted", "filtered"])
kind = st.sampled_from(["handback", "aborted", "failed", "lost", "skipped"])
pool = st.sampled_from(["aborted", "expired"])
mode = st.sampled_from(["abort", "drain", "keep", "run"])
samples = st.lists(st.sampled_from([1, 1, 1, 1, 0, -1]), min_size=1, max_size=6)

COMMON = [
    moves("produce", worker=worker, task=task, number=some),
    moves("train", math=some, code=few),
    moves("enqueue", task=task, samples=samples, ahead=st.integers(0, 12)),
    moves("claim", worker=worker, limit=some),
    moves("submit", worker=worker, which=pick, outcome=outcome),
    moves("release", worker=worker, which=pick, kind=kind),
    moves("reissue", task=task, status=pool, ahead=st.integers(0, 12), limit=some),
    moves(
        "put",
        task=task,
        status=st.sampled_from(["completed", "completed", "aborted", "expired"]),
        age=few,
    ),
]
RARE = [
    moves("keep_turns", worker=worker, which=pick, number=some),
    moves("keep_turns", worker=worker, which=pick, number=some),
    moves("heartbeat", worker=worker),
    moves("keep_responses", worker=worker, which=pick),
    moves("acknowledge", worker=worker),
    moves("acknowledge_a_pause", worker=worker),
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
    moves("refill", which=pick),
    moves("requeue", which=pick),
    moves("drop", which=pick, by_name=st.booleans()),
    moves("update", which=pick, status=st.sampled_from(["completed", "aborted"]), age=few),
    moves("refresh", task=task, limit=some),
    moves("collect_garbage"),
    moves("sweep", worker=worker, is_silent=st.booleans()),
    moves("clock_steps", leases=st.sampled_from([-1000, -1.1, -0.1, 0, 0.1, 0.6, 1.1, 1000])),
    moves(
        "pause",
        who=st.sampled_from(["operator", "trainer"]),
        mode=mode,
        lanes=st.sampled_from(["", "resume"]),
    ),
    moves("go_on"),
    moves("go_on"),
    moves("change_producer", is_left=st.booleans()),
    moves("zombie_producer", task=task, which=pick),
    moves("enqueue_behind_the_cursor", task=task, back=some),
    moves("set_staleness", max_staleness=few),
    moves("set_tries", max_tries=some),
    moves(
        "set_marks", low=st.sampled_from([1, 2000, 6000]), between=st.sampled_from([0, 1000, 4000])
    ),
    moves("lift_marks"),
    moves("lift_marks"),
    moves("save_and_resume", is_copied=st.booleans()),
    moves("export_and_import", task=task, limit=some),
    moves("producer_dies_before_it_enqueues", task=task, number=some),
    moves("worker_dies_before_it_submits", worker=worker, which=pick),
    moves("trainer_dies_in_its_commit", behind=few, keep=few, slices=few),
    moves("trainer_dies_while_it_opens", back=few, slices=few, again=few),
    moves("delete", task=task, staleness=few),
    moves("server_forgets_its_scripts"),
    moves("remember", slot=slot),
    moves("lose", slot=slot, lives=lives),
    moves("lose_a_change", steps=st.integers(0, 2), which=pick, keep=few, lives=lives),
]
orders = st.sampled_from(["staleness", "fifo"])
token_thresholds = st.sampled_from([None, None, 1])
a_move = st.sampled_from(COMMON * 2 + RARE).flatmap(lambda move: move)
is_lost = st.sampled_from([False] * 14 + [True])
histories = st.lists(st.tuples(a_move, is_lost), min_size=70, max_size=110)
History = list[tuple[tuple[str, dict[str, Any]], bool]]


SHARE = {"valkey": examples(32), "memory": examples(4)}
"""Examples on each kind of store. Memory runs the same scripts, more slowly; whether alike is soon
seen.
"""


@pytest.fixture(scope="module", params=SHARE)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with start_server(request.param, tmp_path_factory.mktemp("histories")) as server:
        yield server


@pytest.mark.hypothesis
@pytest.mark.timeout(3600 if EXAMPLES else 600)
def test_random_histories_agree_with_the_model(server: Server) -> None:
    numbers = count(1)
    said = Counter[str]()

    @settings(
        max_examples=EXAMPLES or SHARE[server.kind],
        derandomize=not EXAMPLES,
        database=None,
        phases=[Phase.generate, Phase.shrink] if SHRINKS else [Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        on_straggler=st.sampled_from(["drop", "retry", "retry", "wait"]),
        order=orders,
        tokens=token_thresholds,
        history=histories,
    )
    def live(on_straggler: Straggler, order: str, tokens: int | None, history: History) -> None:
        raw.flushall()
        run = AllMoves(store, raw, f"history-{next(numbers)}", on_straggler, order, tokens)
        for move, replies_are_lost in history:
            run.make(*move, replies_are_lost)
        run.check_everything()
        said.update(
            {*(f"move {name}" for name in +run.moved), *(f"reply {name}" for name in store.replies)}
        )
        store.replies.clear()

    with server.connect() as raw:
        store = FaultyStore(server.url, raw)
        live()
        store.close()
    for name, number in sorted(said.items()):
        log.info("%6d histories: %s", number, name)
    # a move that never finds anything to do proves nothing; one or two may be missed by so few
    # histories
    idle = [name for name in MOVES if f"move {name}" not in said]
    assert server.kind != "valkey" or len(idle) <= len(MOVES) // 10, idle
